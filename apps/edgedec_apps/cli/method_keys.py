"""Keys as a person types them: `--method beam:n=4,answer=REGEX`, `--draft-option max=8`.

A frozen dataclass declares keys: its fields, each with its line under "Attributes:" of the docstring. A guest that
writes on a session is such a dataclass itself (edgedec.companion).
"""

import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edgedec.callers import did_you_mean
from edgedec.errors import RequestError
from edgedec.load_options import read_value

_PAIR = re.compile(r"""(?:([a-z][\w-]*)=)?("[^"]*"|'[^']*'|(?:[^,]|,(?![a-z][\w-]*=))*)(?:,|$)""")
_QUOTED = re.compile(r"""(["']).*\1""", re.DOTALL)
_WORDS = {bool: "yes or no", int: "N", float: "X", str: "TEXT"}


def split_pairs(words: str) -> list[tuple[str, str]]:
    """Return the keys and values of "KEY=VALUE,KEY=VALUE"; a value without a key, which may come first, has "".

    A comma ends a value where another key follows. A value in quotes holds any comma.

    >>> split_pairs("threshold:0.9,window:64"), split_pairs("n=4,check='./check --a,b=c'")
    ([('', 'threshold:0.9,window:64')], [('n', '4'), ('check', './check --a,b=c')])
    """
    pairs = [(match[1] or "", match[2]) for match in _PAIR.finditer(words) if match[0]]
    return [(key, value[1:-1] if _QUOTED.fullmatch(value) else value) for key, value in pairs]


def read_keys(owner: str, kind: type[Any], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the values of keys by the names of fields, as a person gave them; a later one takes the place.

    Args:
        owner: What has the keys, as it is typed: "--method beam:".
        kind: The dataclass that declares them; a value without a key is the first one's.
        pairs: Keys and values.

    Raises:
        RequestError: There is no key of a name, or one without a default is missing.
        OptionError: A key does not take the value.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in {each.name for each in fields(kind)}}
    words = [typed for typed, _ in shown_keys(kind)]
    has, who, values = f"it has {', '.join(words) or 'none'}", owner.rstrip(": "), dict[str, Any]()
    for key, text in pairs:
        name = key.replace("-", "_") or next(iter(hints), "")
        if name not in hints:
            hint = did_you_mean(key, [typed.partition("=")[0] for typed in words])
            raise RequestError(f"{who} has no key {key!r:.60}{hint}; {has}" if key else f"{who} takes no {text!r:.60}")
        values[name] = read_value(owner + name.replace("_", "-"), Union[_kinds(hints[name])], text)  # noqa: UP007
    for each, typed in zip(fields(kind), words, strict=True):
        if each.default is MISSING and each.name not in values:
            raise RequestError(f"{who} needs {typed}; {has}")
    return values


def shown_keys(kind: type[Any]) -> list[tuple[str, str]]:
    """Return the keys of a dataclass as they are typed, "n=N", each with what it does and its default."""
    hints, doc = get_type_hints(kind), inspect.cleandoc(kind.__doc__ or "")
    lines = re.findall(r"(?m)^ {4}(\w+): (.+(?:\n {8}.+)*)$", doc.partition("Attributes:\n")[2])
    said, rows = {name: re.sub(r"\s+", " ", text) for name, text in lines}, list[tuple[str, str]]()
    for each in fields(kind):
        default = {True: "yes", False: "no"}[each.default] if isinstance(each.default, bool) else each.default
        shown = "" if default is MISSING or default is None else f" (default: {default})"
        rows.append((f"{each.name.replace('_', '-')}={_words(hints[each.name])}", said.get(each.name, "") + shown))
    return rows


def model_keys(kind: type[Any]) -> list[str]:
    """Return the fields of a dataclass whose values are names of models."""
    hints = get_type_hints(kind)
    return [each.name for each in fields(kind) if _words(hints[each.name]) == "NAME"]


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, without None."""
    kinds = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def _words(hint: Any) -> str:
    kinds = _kinds(hint)
    if any((get_origin(kind) or kind) is os.PathLike for kind in kinds):
        return "NAME"
    return "|".join(get_args(kinds[0])) if get_origin(kinds[0]) is Literal else _WORDS[kinds[0]]
