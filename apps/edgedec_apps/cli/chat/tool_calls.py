"""Tools in a chat at the terminal: their servers, started beside the model, and calls of them.

Each call is shown and asked about before it runs, unless it is allowed.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from edgedec.chat import Message
from edgedec.errors import CancelledError, counted
from edgedec.exact_json import dumps, exact_float
from edgedec.progress import CancelToken
from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.cli.chat.echo import forget_typed
from edgedec_apps.cli.interrupts import TerminatedError, interruptible
from edgedec_apps.cli.options import ToolFlags
from edgedec_apps.cli.shown.progress import shown
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.tools.configuration import configured
from edgedec_apps.tools.offered import Tool, is_allowed, patterns_of
from edgedec_apps.tools.results import MOST_CHARACTERS, ToolResult, cut

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec_apps.tools.servers import ToolServers

MOST_ROUNDS = 10
"""How often a model may call tools before a person writes again."""
_MOST_CALLS = 16  # of one answer
_MOST_SHOWN = 400  # characters of an argument, and of an answer
_MOST_ROWS = 20
_Decision = Literal["run", "always", "no", "stop"]
_WORDS: dict[str, _Decision] = {"y": "run", "yes": "run", "a": "always", "always": "always", "n": "no", "no": "no"}
Tools = tuple[dict[str, Any], ...]


@dataclass(slots=True)
class ChatTools:
    """The tools of a chat.

    Attributes:
        servers: Where they are; None where there are none.
        patterns: What runs without a question, such as read_*.
        asks: Whether there is a person to ask; else only what is allowed runs.
        always: The tools that the person has allowed for the rest of the chat.
    """

    servers: "ToolServers | None" = None
    patterns: tuple[str, ...] = ()
    asks: bool = False
    always: set[str] = field(default_factory=set)

    def definitions(self, engine: "Engine") -> Tools | None:
        """Return the tools in OpenAI's form; None where there are none, or the model's chat template knows none."""
        return tuple(tool.definition for tool in self.allowed) or None if knows_tools(engine) else None

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """All tools."""
        return self.servers.tools if self.servers is not None else ()

    def rows(self) -> list[tuple[str, str]]:
        """Return each tool's name, and its server, whether it runs without a question, and what it is for."""
        return [
            (tool.name, f"{tool.server}{', allowed' if self.allows(tool) else ''}: {_short(tool.listed.description)}")
            for tool in self.allowed
        ]

    def notes(self, engine: "Engine") -> list[str]:
        """Return what a person should know of the tools of a chat with this model."""
        if self.servers is None:
            return ["there are no tool servers; --mcp FILE names some"]
        unknown = [each for each in self.patterns if not any(is_allowed(tool.name, [each]) for tool in self.allowed)]
        notes = [f"--allow-tools: no tool is named {each}" for each in unknown]
        if self.allowed and not knows_tools(engine):
            notes.append("the model's chat template knows no tools, so the model gets none")
        return [*self.servers.notes, *notes]

    def allows(self, tool: Tool) -> bool:
        """Return whether a tool runs without a question."""
        return tool.name in self.always or is_allowed(tool.name, self.patterns)

    def run(self, calls: Sequence[ToolCall], engine: "Engine", *, quiet: bool) -> tuple[list[Message], bool]:
        """Run the calls of an answer one after another, those that are allowed.

        Returns:
            A message for each call, for the model; and whether the model is to go on: not after Ctrl-C.
        """
        most = max(1000, min(MOST_CHARACTERS, engine.n_ctx // max(1, len(calls))))
        results, goes_on = list[Message](), True
        for i, call in enumerate(calls):
            if not goes_on:
                result = ToolResult("Not run: the user stopped the answer.", failed=True)
            elif i >= _MOST_CALLS:
                result = ToolResult(f"Not run: an answer may have at most {_MOST_CALLS} calls.", failed=True)
            else:
                result, goes_on = self._one(call, most, quiet=quiet)
            results.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text})
        return results, goes_on

    def _one(self, call: ToolCall, most: int, *, quiet: bool) -> tuple[ToolResult, bool]:
        """Return what a call brought, and whether the model is to go on."""
        tool = None if self.servers is None else self.servers.find(call.name)
        decision = "run" if tool is None else self._decide(tool, call)
        if decision == "stop":
            return ToolResult("Not run: the user stopped the answer.", failed=True), False
        if decision == "no":
            say(f"({one_line(call.name)} did not run)")
            why = "The user declined this call." if self.asks else "This tool is not allowed here."
            return ToolResult(why, failed=True), True
        if decision == "always":
            self.always.add(call.name)
        try:
            with shown(f"running {call.name}", quiet=quiet):
                result = interruptible(partial(self._call, call, most))
        except TerminatedError:
            raise
        except CancelledError:
            say(f"({one_line(call.name)} was stopped)")
            return ToolResult("The user stopped this call.", failed=True), False
        if not quiet:
            what = "failed" if result.failed else "answered"
            note = f"; {result.note}" if result.note else ""
            say(one_line(f"({call.name} {what}: {_short(result.text)}{note})"))
        return result, True

    def _call(self, call: ToolCall, most: int, cancel: CancelToken) -> ToolResult:
        assert self.servers is not None, "a model without tools calls none"
        return self.servers.call(call.name, call.arguments, cancel, most)

    def _decide(self, tool: Tool, call: ToolCall) -> _Decision:
        if self.allows(tool):
            return "run"
        if not self.asks:
            say(f"edgedec: {tool.name} needs a person's consent, and there is nobody to ask; --allow-tools allows it")
            return "no"
        say(f"{tool.name} of the tool server {tool.server} wants to run:")
        for row in argument_rows(call.arguments):
            say(f"  {row}")
        return _ask(call)


def chat_tools(flags: ToolFlags, stack: ExitStack, *, typed: bool) -> ChatTools:
    """Return the tools of a chat, whose servers begin to connect; `stack` ends them.

    The servers of the configuration folder are for a person at a terminal; a script names its file.

    Raises:
        RequestError: The file of servers is malformed, or there are names of tools and no servers.
        StorageError: The file can't be read.
        RuntimeUnavailableError: MCP's SDK is not installed.
    """
    patterns = patterns_of(flags.allow_tools)
    configurations = configured(flags.mcp) if typed or flags.mcp is not None else ()
    if not configurations:
        return ChatTools(None, patterns, typed)
    from edgedec_apps.tools.servers import ToolServers  # here, as most chats have none

    servers = ToolServers(configurations)
    stack.callback(servers.close)
    return ChatTools(servers, patterns, typed)


def connect(tools: ChatTools, engine: "Engine", *, quiet: bool) -> None:
    """Wait for the servers, and say which can't be used, and how many tools there are.

    Raises:
        CancelledError: Ctrl-C came.
    """
    servers = tools.servers
    if servers is None:
        return
    with shown("connecting to the tool servers", quiet=quiet):
        interruptible(servers.wait)
    for note in tools.notes(engine):
        say(f"edgedec: {one_line(note)}")
    if not quiet and tools.allowed:
        say(f"({counted(len(tools.allowed), 'tool')}; /tools lists them)")


def knows_tools(engine: "Engine") -> bool:
    """Return whether a model's chat template knows tools."""
    return engine.template is not None and "tools" in engine.template.source


def argument_rows(arguments: str, most: int = _MOST_SHOWN) -> list[str]:
    """Return the arguments of a call for a person, one a line, without characters that are not seen.

    Args:
        arguments: A JSON object.
        most: Most characters of a value; of a longer one the beginning and the end are shown.

    >>> argument_rows('{"path": "a\\\\u202eb"}')
    ['path: "a\\\\u202eb"']
    >>> argument_rows("{}")
    ['no arguments']
    """
    parsed = json.loads(arguments or "{}", parse_float=exact_float)
    texts = {name: dumps(value, ensure_ascii=False) for name, value in parsed.items()}
    rows = [f"{_visible(name[:100])}: {_visible(cut(text, most)[0])}" for name, text in texts.items()]
    if len(rows) > _MOST_ROWS and most == _MOST_SHOWN:
        rows = [*rows[:_MOST_ROWS], f"and {len(rows) - _MOST_ROWS} further arguments"]
    return rows or ["no arguments"]


def _ask(call: ToolCall) -> _Decision:
    """Ask the person at the terminal; what was typed before the question is no answer to it."""
    question = "Run it? y: yes, a: always in this chat, n: no, s: show all of it, Ctrl-C: stop > "
    forget_typed()
    while True:
        try:  # Ctrl-C may come as soon as the question is seen
            sys.stderr.write(question)
            sys.stderr.flush()
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            say("")
            return "stop"
        word = line.strip().lower()
        if word in ("s", "show"):
            for row in argument_rows(call.arguments, len(call.arguments) + 1):
                say(f"  {row}")
        elif word in _WORDS:
            return _WORDS[word]


def _short(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 2 * _MOST_SHOWN].split())
    return _visible(line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} …")


def _visible(text: str) -> str:
    """Return a text whose characters that are not seen are written as in Python.

    >>> _visible("a\\u200b b")
    'a\\\\u200b b'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
