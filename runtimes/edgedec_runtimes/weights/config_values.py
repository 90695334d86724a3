"""Typed access to the values of a checkpoint's config.json, and the RoPE scalings that such a file names."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Typed access to the values of config.json, or of an object in it.

    Attributes:
        path: The file, for messages.
        remedy: The end of the message that refuses a value: what the reader can't do with it, and what to do instead.
    """

    path: Path
    values: dict[str, Any]
    remedy: str

    def whole(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Return an integer from 1 to `most`."""
        value = self.values.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self.fail(f"{key} is {shown(value)}, expected a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.fail(f"{key} is {shown(value)}, expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} is {shown(value)}, expected true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return an object; an empty one where the key is absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(f"{key} is {shown(value)}, expected an object")
        return value

    def fail(self, actual: str) -> NoReturn:
        """Raise ModelFormatError."""
        raise ModelFormatError(f"{self.path}: {actual}; download the checkpoint again")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise UnsupportedModelError for the value of a key."""
        raise UnsupportedModelError(f"{self.path}: {key} is {shown(self.values.get(key))}, {expected}; {self.remedy}")


def shown(value: Any) -> str:
    """Return at most 80 characters of a value for a message; what a terminal can't show is escaped.

    >>> shown("gelu"), shown([2, "\\ud800"])
    ('gelu', "[2, '\\\\ud800']")
    """
    text = str(value)[:80]
    return text if text.isprintable() else ascii(value)[:80]


def llama3_divisors(rope: ConfigValues, base: float, head_dim: int) -> NDArray[np.float32]:
    """Return float32[head_dim // 2]: 1 for short waves, the factor for long ones, and values between for the rest.

    The Llama 3 Herd of Models, arXiv:2407.21783; the rule is that of transformers ("llama3").
    """
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.fail(f"high_freq_factor is {high}, expected more than low_freq_factor, {low}")
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    n_turns = rope.whole("original_max_position_embeddings") / waves
    smooth = np.clip((n_turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
