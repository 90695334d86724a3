"""References of JSON schemas: what they lead to, and how they lead there once a schema is a part of another one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keys of a schema whose objects have names of the user's as keys."""
_VALUES = ("const", "enum", "default", "examples", "example")  # what stands there is no schema


def target(schema: Any, name: str) -> Any:
    """Return the part of a JSON schema that a reference "#/..." names; None where there is none, or for other names.

    >>> target({"$defs": {"a": {"type": "null"}}}, "#/$defs/a")
    {'type': 'null'}
    """
    if name not in ("", "#") and not name.startswith("#/"):
        return None
    for step in unquote(name).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(step)] if step.isdecimal() and int(step[:9]) < len(schema) else None
        else:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def combined(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema's object and those that it refers to or combines, each once; references lead from `root`."""
    left, seen = [schema], set[int]()
    while left:
        node = left.pop(0)
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node.get("$ref"), str):
            left.append(target(root, node["$ref"]))
        for key in ("allOf", "anyOf", "oneOf"):
            left += node[key] if isinstance(node.get(key), list) else []
        left += [node[key] for key in ("if", "then", "else") if key in node]


def property_parts(node: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the parts of an object's schema that its property of a name must keep to; None where there is none."""
    properties, patterned = node.get("properties"), node.get("patternProperties")
    is_named = False
    if isinstance(properties, dict) and name in properties:
        is_named = True
        yield properties[name]
    for pattern, part in patterned.items() if isinstance(patterned, dict) else ():
        try:
            matches = re.search(pattern, name) is not None
        except re.error:
            matches = False
        if matches:
            is_named = True
            yield part
    if not is_named:
        yield node.get("additionalProperties")


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a JSON schema as it must stand within another one, so that its references lead where they led.

    A part with an `$id` of its own has its own references, which stay.

    Args:
        schema: The whole schema; its `$id` is left out.
        place: The JSON pointer of its place in the other one, such as "/anyOf/0".

    >>> moved({"$ref": "#/$defs/a", "$defs": {"a": {"const": {"$ref": "#"}}}}, "/items")
    {'$ref': '#/items/$defs/a', '$defs': {'a': {'const': {'$ref': '#'}}}}
    """
    address = str(schema.get("$id", "")).removesuffix("#")
    anchored = place.replace("/", ".")  # anchors hold for all of the other schema, whose parts may have the same ones

    def led(reference: str) -> str:
        inner = reference.removeprefix(address) or "#"
        if inner == "#" or inner.startswith("#/"):
            return f"#{place}{inner[1:]}"
        return inner + anchored if inner.startswith("#") else reference

    whole = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    left: list[tuple[Any, bool]] = [(whole, False)]
    while left:
        node, has_names = left.pop()
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if not has_names and key in REFERENCES and isinstance(value, str):
                node[key] = led(value)
            elif not has_names and key in ("$anchor", "$dynamicAnchor"):
                node[key] = f"{value}{anchored}"
            elif isinstance(value, dict | list) and (has_names or key not in _VALUES) and not _has_address(value):
                node[key] = value.copy()
                left.append((node[key], not has_names and key in MAPS))
    return whole


def _has_address(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("$id"), str)
