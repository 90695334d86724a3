"""The tools of all servers, by the names that a model calls them, and which of them run without a question."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

MOST_TOOLS = 128
_MOST_NAME = 64
_MOST_DESCRIPTION = 2_000
_MOST_SCHEMA = 20_000
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool as its server lists it: its name there, what it is for, and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        name: How the model calls it.
        server: The name of its server.
        listed: The tool as its server lists it.
    """

    name: str
    server: str
    listed: Listed

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates take it."""
        function = {"name": self.name, "description": self.listed.description, "parameters": self.listed.parameters}
        return {"type": "function", "function": function}


def offered(lists: Sequence[tuple[str, Sequence[Listed]]]) -> tuple[list[Tool], list[str]]:
    """Return the tools of servers by names that differ, and a sentence for each that is left out.

    A name that several tools would have, or that begins with the name of another server and "_", gets its server's
    name before it. A tool whose name still begins with that of another server is left out. So no server can put itself
    in the place of another one, whichever is listed first. Long descriptions are cut.

    >>> [tool.name for tool in offered([("a", [Listed("x.y", "", {})]), ("b", [Listed("z", "", {})])])[0]]
    ['x_y', 'z']
    >>> [tool.name for tool in offered([("a", [Listed("x", "", {})]), ("b", [Listed("x", "", {})])])[0]]
    ['a_x', 'b_x']
    """
    all_tools = [(server, each) for server, listed in lists for each in listed]
    plain = [_plain(each.name) for _, each in all_tools]
    times = Counter(plain)
    prefixes = {server: _plain(f"{server}_") for server, _ in lists}
    tools, left_out, taken = list[Tool](), list[str](), set[str]()
    for (server, each), name in zip(all_tools, plain, strict=True):
        others = tuple(prefix for other, prefix in prefixes.items() if other != server)
        final = name if times[name] == 1 and not name.startswith(others) else _plain(f"{server}_{name}")
        if (fault := _fault(final, taken, others, each)) is not None:
            left_out.append(f"the tool {each.name!r:.80} of {server} is left out: {fault}")
            continue
        taken.add(final)
        short = Listed(each.name, each.description[:_MOST_DESCRIPTION], each.parameters)
        tools.append(Tool(final, server, short))
    return tools, left_out


def is_allowed(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a tool runs without a question: whether one of the patterns, such as read_*, fits its name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def patterns_of(text: str | None) -> tuple[str, ...]:
    """Return the patterns of an option.

    >>> patterns_of("read_*, search"), patterns_of(None)
    (('read_*', 'search'), ())
    """
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _plain(name: str) -> str:
    return _FOREIGN.sub("_", name)[:_MOST_NAME]


def _is_short(schema: Mapping[str, Any]) -> bool:
    try:
        return len(json.dumps(schema)) <= _MOST_SCHEMA
    except (ValueError, TypeError, RecursionError):
        return False


def _fault(final: str, taken: set[str], others: tuple[str, ...], each: Listed) -> str | None:
    """Return why a tool can't be offered beside those whose names are taken, and other servers' prefixes."""
    if not each.name:
        return "it has no name"
    if final.startswith(others):
        return f"its name {final} begins with that of another server; rename one of the two servers"
    if final in taken:
        return f"another one is named {final}"
    if not _is_short(each.parameters):
        return f"the schema of its arguments has more than {_MOST_SCHEMA} characters"
    return f"a model gets at most {MOST_TOOLS}" if len(taken) == MOST_TOOLS else None
