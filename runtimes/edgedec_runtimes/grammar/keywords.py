"""Whether the keywords of a JSON schema have values of the forms that the standard gives them."""

from collections.abc import Callable, Mapping
from typing import Any

from edgedec_runtimes.grammar.references import MAPS, target


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _all(keys: str, is_sound: Callable[[Any], bool]) -> dict[str, Callable[[Any], bool]]:
    return dict.fromkeys(keys.split(), is_sound)


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "type": lambda value: isinstance(value, str) or _is_names(value),
    "required": _is_names,
    **_all("pattern format $ref", lambda value: isinstance(value, str)),
    **_all("enum anyOf allOf oneOf prefixItems", lambda value: isinstance(value, list)),
    **_all(" ".join(MAPS), lambda value: isinstance(value, dict)),
    **_all("uniqueItems", lambda value: isinstance(value, bool)),
    **_all("minimum maximum multipleOf", _is_number),
    **_all("exclusiveMinimum exclusiveMaximum", lambda value: isinstance(value, bool) or _is_number(value)),
    **_all("minLength maxLength minItems maxItems minProperties maxProperties", _is_number),
}
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "propertyNames")
"""Keys of a schema whose values are schemas; so are those of LISTS in a list, and that of "contains", which is kept."""


def is_well_formed(schema: Any) -> bool:
    """Return whether every part of a schema, and what it refers to, is an object or a boolean with sound keywords.

    >>> is_well_formed({"not": {"required": ["a"]}}), is_well_formed({"not": {"required": [{}]}})
    (True, False)
    """
    left, seen = [schema], set[int]()
    while left:
        node = left.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        if not isinstance(node, dict):
            return False
        seen.add(id(node))
        if not all(_FORMS[key](value) for key, value in node.items() if key in _FORMS):
            return False
        for key, value in node.items():
            if key in MAPS:  # of a dependency, the names that it needs are no schema
                left += [part for part in value.values() if not _is_names(part)]
            elif key in LISTS or (key == "items" and isinstance(value, list)):
                left += value
            elif key in SINGLE or key == "contains":
                left.append(value)
            elif key == "$ref" and (part := target(schema, value)) is not None:
                left.append(part)
    return True
