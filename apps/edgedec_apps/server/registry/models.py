"""Values about models: what is to be loaded, what that would take, and what is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgedec.api.engine import Engine
from edgedec.errors import MemoryCapError
from edgedec.gguf.model_info import ModelInfo
from edgedec.progress import CancelToken


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
        path: The path of the file.
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
        engine: The engine of the model.
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
