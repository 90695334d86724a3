"""Base class of models around another model, to which they pass on what they do not change."""

from typing import Literal

from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Closeable, Model, ModelCard
from edgedec.runtime import processes_of
from edgedec.tokenizer import Tokenizer


class OuterModel(Closeable):
    """The part of edgedec.model.Model that a model around another one passes on.

    Attributes:
        inner: The model inside, which is closed with this one.
        card: The facts of this model; its fingerprint is another than the inner model's where a logit is.
        capabilities: What sessions of this model can do.
    """

    def __init__(self, inner: Model, card: ModelCard, capabilities: Capabilities) -> None:
        self.inner = inner
        self.card = card
        self.capabilities = capabilities

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""
        return self.inner.tokenizer

    @property
    def batch_invariant(self) -> int | Literal[True]:
        """How many rows of a forward are bit-equal to single steps, as the model inside says."""
        return self.inner.batch_invariant

    @property
    def processes(self) -> tuple[int, ...]:
        """The further processes of the model inside."""
        return processes_of(self.inner)

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return the terms of the model inside."""
        return self.inner.memory(n_ctx, n_rows)

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""
        self.inner.close()
