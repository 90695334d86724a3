"""Reflective Verification: in one forward the model reads a draft, a request to look again, and the draft once more.

A small model drafts a few tokens. The target reads [text, draft, reflection, draft], which gives two laws of each
token: one as ever, and one after the reflection. Tokens are drawn from their mixture, (1 - weight) times the first plus
weight times the second, as long as they are those of the draft; the first other token begins a new draft. So the text
depends on the two models, the weight and the settings, and a forward of the target can give several tokens.

Lossy: the law of a token is no longer the target's own, except with the weight 0.

Paper: Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding, 2025
Option: `--method reflective:MODEL,weight=0.3`
For: a draft model of the same vocabulary that is refused for words that mean the same
Measured: a 0.5B beside the 1.5B, weight 0.3: 1.74 times the time, 19 of 20 texts the same, 17 and 18 word problems
    right (`python benchmarks/answers/two_models.py qwen2.5-coder-1.5b --methods '{"reflective": {"draft_model":
    "qwen2.5-coder-0.5b", "weight": 0.3}}' --out FILE`)
Status: study
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, argument
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec.stats import DecodeStats
from edgedec_methods.anchored import log_law
from edgedec_methods.pair_session import PairSession, name_of

WORDS = "\n\nI look at the last words again, and write them once more, with what was wrong put right:\n\n"
MOST_DRAFT = 16

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reflective:
    """Implements edgedec.companion.Companion: the options of Reflective Verification.

    Attributes:
        draft_model: The model that drafts: a path or a name, as for the target.
        weight: The share of the law after the reflection, 0 (the target's own text) up to, but not, 1.
        n_draft: Most tokens of a draft, 1 to MOST_DRAFT.
        words: The reflection.

    Raises:
        RequestError: The draft model or the weight is missing, or a value is out of range.
    """

    draft_model: str | os.PathLike[str] | None = None
    weight: float | None = None
    n_draft: int = 4
    words: str = WORDS

    role: ClassVar[str] = "draft model"
    what: ClassVar[str] = "a model that reads drafts twice"

    def __post_init__(self) -> None:
        if self.draft_model is None or self.weight is None:
            raise RequestError(
                f"reflective verification needs {argument('draft_model')} and {argument('weight')}; give both"
            )
        if not 0 <= self.weight < 1:
            raise RequestError(f"{argument('weight')} is {self.weight:g}; it must be from 0 (lossless) to below 1")
        if isinstance(self.n_draft, bool) or not isinstance(self.n_draft, int) or not 1 <= self.n_draft <= MOST_DRAFT:
            raise RequestError(f"{argument('n_draft')} is {self.n_draft!r:.40}; it must be from 1 to {MOST_DRAFT}")
        if not self.words:
            raise RequestError(f"{argument('words')} is empty; it must tell the model to look at the draft again")

    @property
    def model(self) -> str | os.PathLike[str]:
        """The name of the draft model."""
        assert self.draft_model is not None, "it was required"
        return self.draft_model

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session whose rows are those of the target, mixed with its rows after the reflection."""
        assert self.weight is not None, "it was required"
        assert companion is not None, "there is a further model"
        reflection = target.model.tokenizer.encode(self.words, add_special=False)
        return ReflectiveSession(target, companion, reflection, weight=self.weight, n_draft=self.n_draft)


def mixed(first: Rows, second: Rows, weight: float) -> Rows:
    """Return log((1 - weight) P + weight R), f32[n, n_vocab]; `first` and `second` are rows of logits of P and of R."""
    logs = np.log1p(-weight), np.log(weight)
    pairs = zip(first, second, strict=True)
    return np.array([np.logaddexp(logs[0] + log_law(p), logs[1] + log_law(r)) for p, r in pairs], np.float32)


class ReflectiveSession(PairSession):
    """Implements edgedec.model.Session on two sessions: a block of rows is read at each place where a draft begins.

    Where a draft begins is a function of the text: at the prompt's last token, behind a whole draft, and at the first
    token that is not the draft's. So going back to an `n_past` gives the rows that the text had there. Where a context
    has no room for the draft and its second copy, the draft is shorter.

    Args:
        target: A session of the model that the text is said to be of.
        small: A session of a model with the same vocabulary. The rows of neither may depend on how a prefill is cut.
        reflection: Tokens between the two copies of a draft.
        weight: The share of the law after the reflection.
        n_draft: Most tokens of a draft.

    Raises:
        CapabilityError: The rows of a model depend on how a prefill is cut, or a model can't go back.
    """

    option = "draft_model"
    together = "read a draft twice"

    def __init__(
        self, target: Session, small: Session, reflection: Sequence[int], *, weight: float, n_draft: int
    ) -> None:
        super().__init__(target, small)
        self.reflection, self.weight, self.n_draft = list(reflection), weight, n_draft
        self._ids: list[int] = []  # the tokens of the text, which the target's KV cache begins with
        self._n_small = 0  # how many of them the small model's KV cache begins with
        self._starts: list[int] = []  # positions at which a draft begins
        self._at = -1  # the position whose draft and rows these are
        self._draft: list[int] = []
        self._rows: Rows = np.empty((0, 0), np.float32)
        self._ops: LogitOps = NUMPY_ROW_OPS

    @property
    def n_cached(self) -> int:
        """How many tokens of the text the target has evaluated."""
        return len(self._ids)

    def begin(self, n_prompt: int) -> None:
        """Begin a text whose first `n_prompt` tokens are its prompt."""
        super().begin(n_prompt)
        self._go_back(min(len(self._ids), self._first))
        self._starts, self._at = [], -1

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate a chain after the first `n_past` tokens of the text (raises as chain_of); see Session.forward."""
        tokens, n_past = self.chain_of(item), item.n_past
        self._go_back(n_past)
        text = [*self._ids, *tokens.tolist()]
        places = [n_past + row for row in item.logit_rows.tolist()]
        by_place = dict[int, NDArray[np.float32]]()
        end = min(len(text), self._first)
        if n_past < end:
            at = sorted(place for place in set(places) if place < end)
            chain, rows = np.array(text[n_past:end], np.int32), np.array(at, np.int32) - np.int32(n_past)
            forward = self.sessions[0].forward(chain, n_past=n_past, rows=rows, on_progress=on_progress)
            by_place, self._ops = dict(zip(at, forward.logits.copy(), strict=True)), forward.ops
        for place in range(max(n_past, end), len(text)):
            by_place[place] = self._row(text, place)
        self._ids = text
        logits = np.array([by_place[place] for place in places], np.float32)
        return Forward(logits.reshape(len(places), self.model.card.n_vocab), {}, self._ops)

    def _go_back(self, n_past: int) -> None:
        """Forget what lies beyond the first `n_past` tokens of the text."""
        del self._ids[n_past:]
        self._starts = [start for start in self._starts if start < n_past]
        self._n_small = min(self._n_small, n_past)

    def _row(self, text: Sequence[int], place: int) -> NDArray[np.float32]:
        """Return the row behind the token at a place, where all rows before it from the prompt's end on were read."""
        if self._starts and self._starts[-1] != self._at:
            self._read(text, self._starts[-1])
        n = place - self._at
        if not self._starts or n > len(self._draft) or list(text[self._at + 1 : place + 1]) != self._draft[:n]:
            self._read(text, place)
            self._starts.append(place)
        row: NDArray[np.float32] = self._rows[place - self._at]
        return row

    def _read(self, text: Sequence[int], start: int) -> None:
        """Draft behind the token at `start`, and read the draft twice."""
        target, small = self.sessions
        self._at = -1
        del self._ids[start:]  # a forward that is interrupted keeps no more of the text than this
        room = min((target.n_ctx - start - 1 - len(self.reflection)) // 2, small.n_ctx - start - 1)
        draft = self._drafted(text, start, min(self.n_draft, room))
        n, again = len(draft), [*self.reflection, *draft] if draft and self.weight else []
        rows = [*range(n + 1), *(range(len(again), len(again) + n + 1) if again else ())]
        chain = np.array([text[start], *draft, *again], np.int32)
        forward = target.forward(chain, n_past=start, rows=np.array(rows, np.int32))
        logits, self._ops = forward.logits, forward.ops
        self._rows = mixed(logits[: n + 1], logits[n + 1 :], self.weight) if again else logits.copy()
        self._at, self._draft = start, draft

    def _drafted(self, text: Sequence[int], start: int, most: int) -> list[int]:
        """Return the tokens that the small model finds most probable behind the token at `start`, up to an end."""
        draft, small, n_past = list[int](), self.sessions[1], min(self._n_small, start)
        missed, self._n_small = list(text[n_past : start + 1]), n_past
        while len(draft) < most:
            logits = small.forward(np.array(missed, np.int32), n_past=n_past).logits[0]
            token_id = int(logits.argmax())
            if self.model.tokenizer.is_end(token_id):
                break
            n_past += len(missed)
            missed = [token_id]
            draft.append(token_id)
        self._n_small = min(start + 1, n_past)
        return draft

    def _count(self, stats: DecodeStats) -> None:
        """Put into the statistics that the text is not the target's own, and how many tokens a forward gave."""
        n_generated = stats.n_generated_tokens
        n_reads = sum(start < self._first + n_generated for start in self._starts)
        if n_generated and n_reads:
            if self.weight:
                stats.add_note(f"lossy: {self.weight:g} of each token's law is what the model says on a second look")
            stats.explanation.append(
                f"reflective: {n_generated} tokens by {n_reads} forwards, with drafts by {name_of(self.sessions[1])}"
            )
