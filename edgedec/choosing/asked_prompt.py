"""The prompt whose texts are chosen among or searched for, as choosers and searches see it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from edgedec.chat import Message
from edgedec.decoding.branches import Branches
from edgedec.model import Model
from edgedec.progress import CancelToken, OnProgress
from edgedec.tokenizer import Tokenizer


class BranchingEngine(Protocol):
    """What a chooser or a search may ask of the engine.

    Attributes:
        model: The runtime's model.
    """

    model: Model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def branches(
        self,
        prompt: Sequence[int],
        *,
        most: int,
        cancel: CancelToken | None,
        on_progress: OnProgress | None = None,
    ) -> AbstractContextManager[Branches]:
        """Open branches of a prompt inside the block."""


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt whose texts are chosen among or searched for.

    Attributes:
        engine: Has the model.
        token_ids: The prompt.
        prefix: The prompt as text, for the caller's scorer: of a chat its last message, of token ids nothing.
        render: `(messages)` -> the prompt that the model's chat template makes of them, as text; None where the prompt
            is no chat.
        cancel: Stops the writing, the search and the scorer; None where nobody can cancel.
    """

    engine: BranchingEngine
    token_ids: Sequence[int]
    prefix: str
    render: Callable[[Sequence[Message]], str] | None
    cancel: CancelToken | None
