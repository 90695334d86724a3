"""The sampling that a model's authors recommend, from the `general.sampling.*` keys of a GGUF."""

import math
from dataclasses import dataclass
from typing import Any

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_float, get_int

_ABOVE_ZERO = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of SamplingParams, and how a GGUF gives it.

    Attributes:
        name: Its name in SamplingParams.
        low, high: Its range there.
        clip_low, clip_high: Whether llama.cpp takes a value below `low`, or above `high`, for "off".
        whole: Whether it is a whole number.
    """

    name: str
    low: float
    high: float
    clip_low: bool = False
    clip_high: bool = False
    whole: bool = False


_OPTIONS = {
    "general.sampling.temp": _Option("temperature", 0, math.inf, clip_low=True),
    "general.sampling.top_k": _Option("top_k", 0, math.inf, clip_low=True, whole=True),
    "general.sampling.top_p": _Option("top_p", _ABOVE_ZERO, 1, clip_high=True),
    "general.sampling.min_p": _Option("min_p", 0, 1, clip_low=True),
    "general.sampling.penalty_repeat": _Option("repetition_penalty", _ABOVE_ZERO, math.inf),
    "general.sampling.penalty_last_n": _Option("penalty_last_n", -1, math.inf, whole=True),
    # Ollama writes these two keys; llama.cpp has none for them.
    "general.sampling.penalty_freq": _Option("frequency_penalty", -100, 100),
    "general.sampling.penalty_present": _Option("presence_penalty", -100, 100),
}


def read_sampling_defaults(gguf: GGUF) -> dict[str, Any]:
    """Return the options that the file recommends, by their names in SamplingParams and within their ranges there.

    Raises:
        ModelFormatError: A value is no finite number, or is out of its option's range.
    """
    defaults: dict[str, Any] = {}
    for key, option in _OPTIONS.items():
        value = get_int(gguf, key, at_least=-(2**31), at_most=2**31 - 1) if option.whole else get_float(gguf, key)
        if value is None:
            continue
        if (option.clip_low and value < option.low) or (option.clip_high and value > option.high):
            value = type(value)(option.low if option.clip_low else option.high)
        if not option.low <= value <= option.high:
            raise ModelFormatError(
                f"{gguf.paths[0]}: metadata {key!r} is {value}, which is no {option.name}; "
                "download another GGUF of the model"
            )
        defaults[option.name] = value
    return defaults
