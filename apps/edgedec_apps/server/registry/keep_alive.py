"""How long a model stays loaded after a request: ollama's field keep_alive."""

import math
import re
from typing import Any

from edgedec.errors import RequestError
from edgedec_apps.server.registry.registry import FOREVER_S

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|\u00b5s|ms|s|m|h)")


def keep_seconds(value: Any, name: str = "keep_alive") -> float:
    """Return the seconds that a duration stands for; infinity for a negative one.

    Args:
        value: A number of seconds, or a text such as "5m", "1h30m", "300" or "-1".
        name: What the message of an error calls the value.

    >>> keep_seconds("1h30m"), keep_seconds(0), keep_seconds("-1"), keep_seconds("300")
    (5400.0, 0.0, inf, 300.0)

    Raises:
        RequestError: The value is no duration.
    """
    seconds = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e300 else math.copysign(FOREVER_S, value)
    elif isinstance(value, str) and len(value) <= 100:
        seconds = _parsed(value.strip())
    if seconds is None or math.isnan(seconds):
        raise RequestError(f'{name} is {value!r:.100}; it must be seconds, or a time such as "5m"; -1 is for ever')
    return FOREVER_S if seconds < 0 else seconds


def asked_seconds(value: Any) -> float | None:
    """Return what keep_seconds does for the value of a field; None for an absent field or an empty text."""
    return None if value is None or value == "" else keep_seconds(value)


def _parsed(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    text = text[1:] if text[:1] in ("-", "+") else text
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        return sign * float(text)
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        return None
    return sign * sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
