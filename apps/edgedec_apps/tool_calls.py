"""Tool calls in a reply, in OpenAI's shape, whole or as it comes.

Read are the conventions of chat templates: `<tool_call>` around a JSON object (Hermes, Qwen), and a reply that is
nothing but JSON (Llama 3: an object with `parameters`, or several with semicolons between; others: an object or an
array, maybe in a code fence). What only looks like a call stays text.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from edgedec_apps.overlaps import n_overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 begins calls so; where it is a control token it is no text
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)
_BEGINNING = re.compile(r"\s*(?:<\|python_tag\|>|```(?:json)?)?\s*")
_FIRST_KEY = re.compile(r'[\s\[]*\{\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "type", "id", "function", "arguments", "parameters"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: The tool's.
        arguments: A JSON object, as text.
        id: By which the tool's answer will name it; no part of a comparison.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}", compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return an entry of OpenAI's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates have it, with the arguments as an object."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


Parsed = tuple[str, list[ToolCall]]


def parse_tool_calls(text: str, names: Set[str] | None = None) -> Parsed:
    """Return a reply's text without its tool calls, and the calls.

    White space around calls is dropped. A reply without a call is returned unchanged.

    Args:
        text: The reply.
        names: The names of the tools: JSON without a tag around it is a call only if it names one of them.

    >>> parse_tool_calls('Let me look.\\n<tool_call>\\n{"name": "time", "arguments": {"zone": "UTC"}}\\n</tool_call>')
    ('Let me look.', [ToolCall(name='time', arguments='{"zone": "UTC"}')])
    """
    stream = ToolCallStream(names)
    content, calls = stream.feed(text)
    rest, more = stream.finish()
    return content + rest, calls + more


class ToolCallStream:
    """Parses a reply that arrives in pieces: the results of the pieces add up to parse_tool_calls of the whole.

    Text is returned as soon as it can't become part of a call, and a call when it is complete. A reply that begins like
    JSON is held back until it is certain that it is no call, at its end at the latest.

    Args:
        names: As for parse_tool_calls.

    Attributes:
        n_calls: Number of calls returned so far.
    """

    def __init__(self, names: Set[str] | None = None) -> None:
        self._names = names
        self._held = ""  # text of an open call, or text that may become a call
        self._spaces = ""  # white space, which is dropped before a call or the end
        self._in_call = False
        self._begins = True  # nothing was returned yet
        self.n_calls = 0

    def feed(self, text: str) -> Parsed:
        """Take the next piece; return the text and the calls that are now certain."""
        self._held += text
        if self._begins and _may_be_calls(self._held):
            return "", []
        self._begins = False
        content, calls = "", []
        while True:
            tag = _CLOSE if self._in_call else _OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._held = after
            if self._in_call:
                call = _tagged(before)
                if call is None:
                    content += self._shown(_OPEN + before + _CLOSE)
                else:
                    calls.append(call)
                    self._spaces = ""
            else:
                content += self._shown(before)
            self._in_call = not self._in_call
        if not self._in_call:
            n_held = n_overlap(self._held, _OPEN)
            cut = len(self._held) - n_held
            content += self._shown(self._held[:cut])
            self._held = self._held[cut:]
        self.n_calls += len(calls)
        return content, calls

    def finish(self) -> Parsed:
        """Return the rest of the reply, which has ended."""
        held, self._held = self._held, ""
        if self._begins:
            calls = _plain(held, self._names)
            if calls:
                self.n_calls += len(calls)
                return "", calls
            self._begins = False
            content, calls = self.feed(held)
            rest, more = self.finish()
            return content + rest, calls + more
        if self._in_call:  # the closing tag is missing
            call = _tagged(held)
            if call is not None:
                self.n_calls += 1
                return "", [call]
            held = _OPEN + held
        content = self._shown(held)
        return content if self.n_calls else content + self._spaces, []

    def _shown(self, text: str) -> str:
        """Return a text with the white space that was held back before it; hold back the white space at its end."""
        bare = text.rstrip()
        if not bare:
            self._spaces += text
            return ""
        shown = self._spaces + bare
        self._spaces = text[len(bare) :]
        return shown


def tool_call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of one call of one of these tools (OpenAI's `tools`), as parse_tool_calls reads it.

    With it as json_schema a model calls a tool, whatever its template's convention (`tool_choice: "required"`).
    """
    functions = [tool["function"] for tool in tools]
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": function.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in functions
        ]
    }


def _may_be_calls(text: str) -> bool:
    """Return whether a reply that begins like this may consist of calls in JSON only."""
    text = text.lstrip()
    if _PYTHON_TAG.startswith(text) or "```json".startswith(text):
        return True
    text = _BEGINNING.sub("", text, count=1)
    if text and text[0] not in "{[":
        return False
    first = _FIRST_KEY.match(text)
    return first is None or first[1] in _CALL_KEYS


def _plain(text: str, names: Set[str] | None) -> list[ToolCall]:
    """Return the calls that a reply consists of; an empty list where it has anything else."""
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    fenced = _FENCE.fullmatch(text)
    found = _values(fenced[1] if fenced else text)
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    calls = [_call(value, whole=True) for value in found]
    known = [call for call in calls if call is not None and (names is None or call.name in names)]
    return known if len(known) == len(found) else []


def _values(text: str) -> list[Any]:
    """Return the JSON values of a text, with semicolons or white space between; an empty list for any other text."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        while at < len(text) and text[at] in "; \t\r\n":
            at += 1
    return values


def _tagged(text: str) -> ToolCall | None:
    values = _values(text.strip())
    return _call(values[0], whole=False) if len(values) == 1 else None


def _call(value: Any, *, whole: bool) -> ToolCall | None:
    """Return the call of a JSON value, or None; without a tag a call needs arguments, as many objects have a name."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        return None if whole else ToolCall(value["name"], "{}")
    if isinstance(arguments, str):  # JSON within JSON
        try:
            if not isinstance(json.loads(arguments), dict):
                return None
        except (ValueError, RecursionError):
            return None
        return ToolCall(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
