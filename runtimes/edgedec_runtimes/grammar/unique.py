"""uniqueItems: arrays whose items differ, checked while their text is written."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from edgedec_runtimes.grammar.references import combined, property_parts

_N_KEPT = 32  # states of earlier texts; a token is asked about with a few others before it is taken
_MOST_VALUES = 200  # of items that are enumerated
_NODES = tuple[Any, ...]


def asks_for_unique(schema: Any) -> bool:
    """Return whether a schema has arrays whose items must differ."""
    if isinstance(schema, dict):
        return schema.get("uniqueItems") is True or any(map(asks_for_unique, schema.values()))
    return isinstance(schema, list) and any(map(asks_for_unique, schema))


def without_unique(schema: Any) -> Any:
    """Return a schema without its `uniqueItems`."""
    if isinstance(schema, dict):
        return {key: without_unique(part) for key, part in schema.items() if key != "uniqueItems" or part is not True}
    return [without_unique(part) for part in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True, slots=True)
class _Open:
    """An array or object that is not closed yet.

    Attributes:
        is_array: Which of the two.
        nodes: The parts of the schema that may be about it.
        key: Of an object, the key of the value that is being written; None before it.
        items: Of an array whose items must differ, those that are whole; None of any other.
        n_items: Whole items, or values.
        values: The JSON texts that an item may have, where they are enumerated; else None.
        start: Where the text of the current key, value or item begins.
    """

    is_array: bool
    nodes: _NODES
    key: str | None = None
    items: frozenset[Any] | None = None
    n_items: int = 0
    values: tuple[str, ...] | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text is in JSON: the open brackets, whether it is within a string, and whether it repeats an item."""

    stack: tuple[_Open, ...] = ()
    in_string: bool = False
    escaped: bool = False
    repeats: bool = False


class UniqueItems:
    """Implements edgedec.grammar.Predicate: no array that must have different items has two equal ones.

    Which arrays must is looked up in the schema by their place; a part that only one of several cases asks for counts
    for all of them.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._states: dict[str, _State] = {"": _State()}

    def __call__(self, text: str, is_end: bool, /) -> bool:
        """Return whether the text repeats no item, and may still go on without."""
        state = self._state(text)
        return not state.repeats and self._can_go_on(state, text)

    def _state(self, text: str) -> _State:
        if text not in self._states:
            prefix = max((each for each in self._states if text.startswith(each)), key=len, default="")
            state = self._states.get(prefix, _State())
            for at in range(len(prefix), len(text)):
                if not state.repeats:
                    state = self._after(state, text, at)
            self._states[text] = state
            for old in list(self._states)[: max(0, len(self._states) - _N_KEPT)]:
                if old:
                    del self._states[old]
        return self._states[text]

    def _can_go_on(self, state: _State, text: str) -> bool:
        """Return whether the enumerated item that is being written can still become one that is not there yet."""
        if not state.stack or (top := state.stack[-1]).values is None or top.items is None:
            return True
        begun = text[top.start :].lstrip()
        return top.start == 0 or any(
            value.startswith(begun) for value in top.values if _comparable(json.loads(value)) not in top.items
        )

    def _after(self, state: _State, text: str, at: int) -> _State:
        """Return the state behind one more character."""
        character = text[at]
        if state.in_string:
            if state.escaped or character == "\\":
                return replace(state, escaped=not state.escaped)
            return replace(state, in_string=character != '"')
        if character == '"':
            return replace(state, in_string=True)
        stack = state.stack
        if character in "[{":
            nodes = self._inner(stack[-1]) if stack else tuple(combined(self._schema, self._schema))
            return replace(state, stack=(*stack, self._opened(character == "[", nodes, at + 1)))
        if not stack or character not in ":,]}":
            return state
        top = stack[-1]
        if character == ":" and not top.is_array:
            key = _parsed(text[top.start : at])
            return replace(state, stack=(*stack[:-1], replace(top, key=key if isinstance(key, str) else None)))
        if character == ",":
            top, repeats = _with_item(top, text[top.start : at])
            full = top.values is not None and top.items is not None and len(top.items) >= len(top.values)
            top = replace(top, start=at + 1, key=None)
            return replace(state, stack=(*stack[:-1], top), repeats=repeats or full)
        if character in "]}":
            _, repeats = _with_item(top, text[top.start : at])
            return replace(state, stack=stack[:-1], repeats=repeats)
        return state

    def _opened(self, is_array: bool, nodes: _NODES, start: int) -> _Open:
        unique = is_array and any(node.get("uniqueItems") is True for node in nodes)
        opened = _Open(is_array, nodes, items=frozenset() if unique else None, start=start)
        return replace(opened, values=_enumerated(self._inner(opened))) if unique else opened

    def _inner(self, top: _Open) -> _NODES:
        """Return the parts of the schema that may be about the value that comes next."""
        parts = (part for node in top.nodes for part in _children(node, top))
        return tuple(each for part in parts for each in combined(part, self._schema))


def _children(node: Mapping[str, Any], top: _Open) -> Iterator[Any]:
    """Yield the parts of a schema for the next item of an array, or the value of an object's key."""
    if top.is_array:
        for key in ("prefixItems", "items"):
            if isinstance(node.get(key), list) and top.n_items < len(node[key]):
                yield node[key][top.n_items]
                return
        yield node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")
        return
    yield from property_parts(node, top.key or "")


def _with_item(top: _Open, data: str) -> tuple[_Open, bool]:
    """Return an array with one more item, and whether the item was there already."""
    if top.items is None or not data.strip():
        return replace(top, n_items=top.n_items + 1), False
    item = _comparable(_parsed(data))
    return replace(top, n_items=top.n_items + 1, items=top.items | {item}), item in top.items


def _parsed(data: str) -> Any:
    try:
        return json.loads(data, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError):  # also of an exponent that no Decimal holds
        return None


def _comparable(value: Any) -> Any:
    """Return what equals that of another value where JSON Schema calls the two equal."""
    if isinstance(value, bool) or value is None:
        return (str(value),)
    if isinstance(value, list):
        return ("list", *map(_comparable, value))
    if isinstance(value, dict):
        return ("object", frozenset((key, _comparable(each)) for key, each in value.items()))
    return ("text", value) if isinstance(value, str) else ("number", Decimal(value))


def _enumerated(nodes: _NODES) -> tuple[str, ...] | None:
    """Return the JSON texts of the values that an item may have; None where they are not enumerated."""
    for node in nodes:
        values = [node["const"]] if "const" in node else node.get("enum")
        low, high = node.get("minimum"), node.get("maximum")
        if node.get("type") == "boolean":
            values = [True, False]
        elif node.get("type") == "integer" and type(low) is int and type(high) is int and high - low < _MOST_VALUES:
            values = list(range(low, high + 1))
        if isinstance(values, list) and len(values) <= _MOST_VALUES:
            return tuple(dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in values))
        if "$ref" not in node and "allOf" not in node:  # what follows may be one of several cases
            return None
    return None
