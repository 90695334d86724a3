"""Values about models: what is to be loaded, what that would take, what is loaded, and for how long."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.api.engine import Engine
from edgedec.errors import MemoryCapError, RequestError
from edgedec.gguf.model_info import ModelInfo
from edgedec.progress import CancelToken

FOREVER_S = float("inf")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|\u00b5s|ms|s|m|h)")


def keep_seconds(value: Any, name: str = "keep_alive") -> float:
    """Return the seconds that a duration stands for; infinity for a negative one, or for centuries.

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
        seconds = float(min(max(value, -1.0), 1e10))
    elif isinstance(value, str) and len(value) <= 100:
        seconds = _parsed(value.strip())
    if seconds is None or math.isnan(seconds):
        raise RequestError(f'{name} is {value!r:.100}; it must be seconds, or a time such as "5m"; -1 is for ever')
    return seconds if 0 <= seconds < 1e10 else FOREVER_S  # a far end is no date that an answer could have


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


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an engine is loaded from. Names with equal recipes share one engine.

    Attributes:
        model: The model's name or path, for edgedec's resolvers.
        chat_template: Jinja source to use instead of the model's own template, or None.
        draft_head: Name of the draft head, "off", or None for the one that is found.
        lora: Adapters as a preset has them; empty for those of the command line.
    """

    model: str
    chat_template: str | None = None
    draft_head: str | None = None
    lora: str = ""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model's file.

    Attributes:
        info: The facts in the header of a GGUF; else None.
        modified_s: Time of the last change, in seconds since 1970.
        template: Source of the chat template in use, or None.
        embeds: Whether the model was trained to embed texts, not to write them.
    """

    path: Path
    info: ModelInfo | None
    modified_s: float
    template: str | None
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    Attributes:
        file: The model's file.
        close: Frees the model, after saving what is to be kept.
        n_bytes: The most bytes that the model may hold, without what all models of a server share.
        request_bytes: Memory that the plan keeps for requests; None without a plan.
    """

    engine: Engine
    file: ModelFile
    close: Callable[[], None]
    n_bytes: int = 0
    request_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be loaded.

    Attributes:
        fits: Whether it fits into the memory beside the models that are loaded now; alone it does.
        n_ctx: Tokens of the context that it will have.
        n_ctx_train: Tokens of the context that it was trained for; 0 where that is unknown.
        open: Loads the model. It raises EdgedecError, and leaves nothing behind then.
    """

    fits: bool
    n_ctx: int
    n_ctx_train: int
    open: Callable[[], Loaded]


class CrowdedError(MemoryCapError):
    """A model can't be planned now: what the loaded ones may come to hold leaves no memory to read its header with.

    Attributes:
        at_rest: Plans it by what they hold now, which is right while no request uses one of them; it may raise
            CrowdedError, too.
    """

    def __init__(self, message: str, at_rest: "Prepare") -> None:
        super().__init__(message)
        self.at_rest = at_rest


Prepare = Callable[[Recipe, int | None, CancelToken], Prepared]
"""Plans how a recipe is loaded with so many tokens of context, or None for the usual number; called in a thread.

It raises EdgedecError: CrowdedError where the models that are loaded leave no memory to plan with, another
MemoryCapError where the model can't fit even if it were alone.
"""
