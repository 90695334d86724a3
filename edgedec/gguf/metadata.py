"""Typed access to a GGUF's metadata.

Every function returns None where the key is absent, and raises ModelFormatError where the value has another type or is
out of bounds.
"""

import math
from typing import NoReturn

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, GGUFArray, Value, ValueType
from edgedec.gguf.values import show


def get_text(gguf: GGUF, key: str) -> str | None:
    """Return the string of a key."""
    value = gguf.metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _wrong(gguf, key, value, "text")


def get_bool(gguf: GGUF, key: str) -> bool | None:
    """Return the boolean of a key."""
    value = gguf.metadata.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong(gguf, key, value, "true or false")


def get_int(gguf: GGUF, key: str, *, at_most: int, at_least: int = 0) -> int | None:
    """Return the whole number of a key, which must be from `at_least` to `at_most`."""
    value = gguf.metadata.get(key)
    if value is None or (type(value) is int and at_least <= value <= at_most):
        return value
    raise _wrong(gguf, key, value, f"a whole number from {at_least} to {at_most}")


def get_float(gguf: GGUF, key: str) -> float | None:
    """Return the finite number of a key; a 32-bit float as the decimal it was made from (0.95, not 0.9499...)."""
    value = gguf.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, float) and math.isfinite(value):
        with np.errstate(over="ignore", under="ignore"):
            narrow = np.float32(value)
        return float(str(narrow)) if float(narrow) == value else value
    if type(value) is int:
        return float(value)
    raise _wrong(gguf, key, value, "a finite number")


def get_array(gguf: GGUF, key: str, element_types: frozenset[ValueType]) -> GGUFArray | None:
    """Return the array of a key, whose elements must have one of these types."""
    value = gguf.metadata.get(key)
    if value is None or (isinstance(value, GGUFArray) and value.element_type in element_types):
        return value
    raise _wrong(gguf, key, value, "an array of " + " or ".join(sorted(t.name for t in element_types)))


def get_per_layer(gguf: GGUF, key: str, n_layer: int, *, at_most: int) -> tuple[int, ...] | None:
    """Return int[n_layer], a whole number (or 0 and 1 for booleans) for each layer.

    The value is an array of at least n_layer elements, each from 0 to `at_most`, or one number for all layers.
    """
    value = gguf.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value <= at_most:
        return (int(value),) * n_layer
    if isinstance(value, GGUFArray) and value.element_type in WHOLE_OR_BOOL and len(value) >= n_layer:
        numbers = tuple(int(number) for number in value.numpy()[:n_layer])
        if all(0 <= number <= at_most for number in numbers):
            return numbers
    raise _wrong(gguf, key, value, f"a whole number from 0 to {at_most}, or {n_layer} of them")


def refuse_missing(gguf: GGUF, key: str) -> NoReturn:
    """Raise ModelFormatError for a key that every text model has."""
    raise ModelFormatError(
        f"{gguf.paths[0]}: the metadata has no {key[:80]!r}, which a text model needs; "
        "convert the model again with a current llama.cpp, or download another GGUF of it"
    )


WHOLE = frozenset(kind for kind in ValueType if kind.name.startswith(("INT", "UINT")))
WHOLE_OR_BOOL = WHOLE | {ValueType.BOOL}


def _wrong(gguf: GGUF, key: str, value: Value, expected: str) -> ModelFormatError:
    return ModelFormatError(
        f"{gguf.paths[0]}: metadata {key[:80]!r} is {show(value)}, expected {expected}; "
        "the file is damaged or was converted wrongly: download another GGUF of the model"
    )
