"""Soft prompts (IDP): tuned vectors stand before every text, which a crushed model then predicts better.

The vectors take the place of tokens' embeddings. A session reads them once; its texts count their tokens behind them.
`benchmarks/studies/soft_prompts.py` tunes them for one file, or for one set of layers that are left out.

Lossy: the text is another one.

Paper: IDP, Hoang et al. 2023, arXiv:2310.00867
Option: `--method soft-prompt:FILE`
For: models with layers left out, or of few bits a weight, where no larger file fits
Measured: smollm2-135m: perplexity 7 to 9 % lower with layer-skip:1.05, 4 to 5 % with its Q2_K and IQ2_XS files, and 2
    to 5 % of the whole model, too, which is no repair (`studies/soft_prompts`, program at 2f50af8c)
Status: opt-in
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, OptionError, RequestError, argument
from edgedec.model import ExactRows, Forward, ForwardItem, RowGroup, Session
from edgedec.progress import OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sessions.outer_session import OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec_methods.sliding_window import tokens_of
from edgedec_runtimes.weights.soft_vectors import read_vectors

_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """Implements edgedec.companion.Companion, with the options of a method.

    Attributes:
        file: The vectors, a GGUF.

    Raises:
        OptionError: No file is given.
    """

    file: str | None = None

    role: ClassVar[str] = ""
    what: ClassVar[str] = "a soft prompt"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) or not self.file:
            raise OptionError("file", self.file, "it is the path of a soft prompt")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session whose texts stand behind the vectors (raises what read_vectors and SoftSession raise)."""
        return SoftSession(target, read_vectors(Path(self.file or ""), target.model.card))


class SoftSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts behind vectors, which hold the first slots of the session inside.

    Args:
        inner: Its rows must not depend on how a prefill is cut, as the vectors move where it is.
        vectors: f32[n, n_embd].

    Raises:
        CapabilityError: The runtime reads no vectors, or its rows depend on how a prefill is cut.
        RequestError: The context has no room for a text behind them.
    """

    what = "a session with a soft prompt"
    option = "methods"

    def __init__(self, inner: Session, vectors: NDArray[np.float32]) -> None:
        card, can = inner.model.card, inner.model.capabilities
        can.require("vector_rows", card.runtime)
        if can.prefill_chunk != 1:
            raise CapabilityError(
                f"on the {card.runtime} runtime a text depends on how its prompt is cut, so no soft prompt stands "
                f"before it; choose another runtime (cpu), or leave {argument('methods')} out"
            )
        if inner.n_ctx < len(vectors) + 2:
            raise RequestError(f"a context of {inner.n_ctx} tokens has no room behind {len(vectors)} vectors; raise it")
        super().__init__(inner)
        self._vectors, self._n = vectors, len(vectors)

    @property
    def n_ctx(self) -> int:
        """Most tokens of a text behind the vectors."""
        return self.inner.n_ctx - self._n

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were evaluated."""
        return max(0, self.inner.n_cached - self._n)

    @property
    def draft_head(self) -> None:
        """None: a head learned texts without the vectors."""

    def room(self, n_tokens: int) -> int:
        """Return how many rows a forward may have behind a text of `n_tokens` tokens."""
        return self.inner.room(n_tokens + self._n)

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return what the session inside says behind the vectors, too."""
        return self.inner.exact_rows(n_past + self._n, measure)

    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> AbstractContextManager[None]:
        """Begin a text whose prompt has so many tokens; the vectors count as its beginning."""
        return self.inner.generating(n_prompt + self._n, sampling, seed, stats)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item behind the vectors, which are read where the session inside lacks them.

        Raises:
            CapabilityError: Hidden states, pictures, or positions apart from slots, were given.
        """
        tokens_of(item, "a soft prompt", "methods")
        if self.inner.n_cached < self._n:
            self.inner.evaluate(ForwardItem(self.inner, 0, (RowGroup(vectors=self._vectors),), _NO_ROWS))
        return self.inner.evaluate(replace(item, session=self.inner, n_past=item.n_past + self._n), on_progress)

    def fork(self) -> Session:
        """Open a second session that shares this one's cached prefix."""
        return SoftSession(self.inner.fork(), self._vectors)
