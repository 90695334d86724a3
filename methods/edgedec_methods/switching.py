"""Switching by entropy: the large of two models writes where the text is hard, the small one where it is easy.

The entropy of the writer's own rows says how hard the text is: where its mean over the last WINDOW tokens is above a
threshold, the large model writes on; where the mean is below the threshold, the small model does. A new writer writes
at least WINDOW tokens. The large model reads the prompt and writes first; the small model reads the prompt when it
first writes. A model that writes again first reads what the other one wrote, in one prefill; its KV cache is kept
meanwhile.

Lossy: nothing verifies what the small model wrote. The text still depends only on the two models, the threshold, the
prompt, the settings and the seed.

Paper: Simonds 2025, arXiv:2502.06833
Option: `--method switching:MODEL,entropy=0.75`
For: long easy texts, where other words than the large model's do
Measured: 1.59 times as fast at 0.75 bits (`python benchmarks/answers/switching.py qwen2.5-coder-1.5b
    qwen2.5-coder-0.5b --prompts FILE --count 4 --tokens 320`; docs/faster.md); of three other answers one was wrong
Status: opt-in
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, argument, counted
from edgedec.logit_ops import entropy_of
from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec.stats import DecodeStats
from edgedec_methods.pair_session import PairSession, name_of

LARGE, SMALL = 0, 1
"""Numbers of the two writers."""
WINDOW = 5
"""How many tokens the mean entropy is taken over; also the fewest tokens that a writer writes."""
MOST_ENTROPY = 1.5
"""The highest threshold that was measured, in bits (docs/faster.md)."""


@dataclass(frozen=True, slots=True)
class Written:
    """Which model wrote a token (LARGE or SMALL), and the entropy in bits of the row that the token was drawn from."""

    writer: int
    entropy: float


@dataclass(frozen=True, slots=True)
class Switching:
    """Implements edgedec.companion.Companion: the options of switching two models by entropy.

    Attributes:
        small_model: The smaller model, which writes where the text is easy; named as the target is.
        entropy: Bits: the small model writes where the mean entropy of the last tokens is below; 0 leaves all to the
            large model.
        entropy_force: Allow an `entropy` above MOST_ENTROPY.

    Raises:
        RequestError: Only one of a small model and a threshold is given, or the threshold is out of range.
    """

    small_model: str | os.PathLike[str] | None = None
    entropy: float | None = None
    entropy_force: bool = False

    role: ClassVar[str] = "small model"
    what: ClassVar[str] = "two models that write in turn"

    def __post_init__(self) -> None:
        if self.small_model is None or self.entropy is None:
            missing = "small_model" if self.small_model is None else "entropy"
            both = f"give both, {argument('small_model')} and {argument('entropy')}"
            raise RequestError(f"{argument(missing)} is missing; {both}")
        if not self.entropy >= 0:
            raise RequestError(
                f"{argument('entropy')} is {self.entropy:g} bits; it must be 0 (the large model alone) or more"
            )
        if self.entropy > MOST_ENTROPY and not self.entropy_force:
            raise RequestError(
                f"{argument('entropy')} is {self.entropy:g} bits; thresholds up to {MOST_ENTROPY:g} were measured "
                f"(docs/faster.md): give a lower one, or force it ({argument('entropy_force')})"
            )

    @property
    def model(self) -> str | os.PathLike[str]:
        """The name of the small model."""
        assert self.small_model is not None, "it was required"
        return self.small_model

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session on which the target and the small model write in turn."""
        assert self.entropy is not None, "it was required"
        assert companion is not None, "there is a further model"
        return SwitchingSession(target, companion, self.entropy)


class SwitchingSession(PairSession):
    """Implements edgedec.model.Session on two sessions: the model whose turn it is evaluates a row.

    A token is drawn from every row from the prompt's last one on, in the order of the text. So whose turn it is depends
    on the text alone: going back to an `n_past` gives the state that the text had there.

    Args:
        large: A session of the model that reads the prompt.
        small: A session of a model with the same vocabulary. The rows of neither model may depend on how a prefill is
            cut (Capabilities.prefill_chunk is 1), as the text would depend on which model read which piece.
        entropy: The threshold in bits.

    Attributes:
        written: The writer and the entropy of each row that a token is drawn from.

    Raises:
        CapabilityError: The rows of a model depend on how a prefill is cut, or a model can't go back.
    """

    option = "small_model"
    together = "write in turn"

    def __init__(self, large: Session, small: Session, entropy: float) -> None:
        super().__init__(large, small)
        self.entropy = entropy
        self.written: list[Written] = []
        self._ids: list[int] = []  # the tokens of the text
        self._n_held = [0, 0]  # how many tokens of the text each model has in its KV cache

    @property
    def n_cached(self) -> int:
        """How many tokens of the text at least one model has evaluated."""
        return len(self._ids)

    def begin(self, n_prompt: int) -> None:
        """Begin a text whose first `n_prompt` tokens are its prompt; tokens of the prompt that are cached stay."""
        super().begin(n_prompt)
        del self._ids[self._first :]
        self.written = []

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate a chain after the first `n_past` tokens of the text (raises as chain_of); see Session.forward."""
        tokens, n_past = self.chain_of(item), item.n_past
        text = [*self._ids[:n_past], *tokens.tolist()]
        written = self.written[: max(0, n_past - self._first)]
        self._n_held = [min(n, n_past) for n in self._n_held]  # what lies beyond is dropped, also by a failure
        n_held, rows, begin = list(self._n_held), {n_past + row for row in item.logit_rows.tolist()}, n_past
        logits: list[NDArray[np.float32]] = []
        while True:
            writer = next_writer(written, self.entropy)
            drawn_from = range(max(begin, self._first), len(text))
            places = sorted({place for place in rows if place >= begin}.union(drawn_from))
            report = on_progress if n_past <= self._first else None
            forward = self._read(writer, text, min(n_held[writer], begin), places, report)
            n_held[writer] = len(text)
            n_own = self._judge(writer, places, forward, written)
            logits.append(forward.logits[[i for i in range(n_own) if places[i] in rows]])
            if n_own == len(places):
                break
            begin = places[n_own]
        self._ids, self.written, self._n_held = text, written, n_held
        return Forward(np.concatenate(logits), {}, forward.ops)

    def _read(
        self, writer: int, text: Sequence[int], n_held: int, places: Sequence[int], on_progress: OnProgress | None
    ) -> Forward:
        """Let a model evaluate the tokens of `text` behind its first `n_held`; return its logits at `places`."""
        rows = np.array(places, np.int32) - np.int32(n_held)
        missed = np.array(text[n_held:], np.int32)
        return self.sessions[writer].forward(missed, n_past=n_held, rows=rows, on_progress=on_progress)

    def _judge(self, writer: int, places: Sequence[int], forward: Forward, written: list[Written]) -> int:
        """Add the rows that tokens are drawn from to `written`, up to where the other model takes over.

        Returns:
            How many of the rows at `places` are this writer's.
        """
        for n, (place, row) in enumerate(zip(places, forward.logits, strict=True), start=1):
            if place >= self._first:
                written.append(Written(writer, entropy_of(row, forward.ops)))
                if next_writer(written, self.entropy) != writer:
                    return n
        return len(places)

    def _count(self, stats: DecodeStats) -> None:
        """Put into the statistics which of the two models wrote how many of a text's tokens."""
        written = self.written[: stats.n_generated_tokens]
        if not written:
            return
        n_small = sum(token.writer == SMALL for token in written)
        n_switches = sum(one.writer != other.writer for one, other in pairwise(written))
        mean = _mean(written)
        stats.switching = {
            "large_tokens": len(written) - n_small,
            "small_tokens": n_small,
            "switches": n_switches,
            "entropy_bits": mean,
        }
        large, small = map(name_of, self.sessions)
        stats.add_note(f"lossy: {small} wrote {n_small} of {counted(len(written), 'token')}")
        stats.explanation += [
            f"switching: {counted(len(written) - n_small, 'token')} by {large}, {n_small} by {small}, "
            f"{counted(n_switches, 'change')} of the writer; "
            f"entropy {mean:.2f} bits on the average, below {self.entropy:g} the small model writes",
            "drafting off: two models write in turn",
        ]


def next_writer(written: Sequence[Written], entropy: float) -> int:
    """Return which model writes the token after those in `written`, LARGE or SMALL (arXiv:2502.06833).

    >>> easy, hard = Written(LARGE, 0.1), Written(SMALL, 3.0)
    >>> [next_writer([easy] * n, 1.0) for n in (0, 4, 5)]
    [0, 0, 1]
    >>> [next_writer([easy] * 5 + [hard] * n, 1.0) for n in (0, 1, 4, 5)]
    [1, 1, 1, 0]
    """
    if not written:
        return LARGE
    writer, latest = written[-1].writer, written[-WINDOW:]
    if len(latest) < WINDOW or any(token.writer != writer for token in latest):
        return writer
    mean = _mean(latest)
    if mean == entropy:
        return writer
    return SMALL if mean < entropy else LARGE


def _mean(written: Sequence[Written]) -> float:
    """Return the mean entropy in bits of at least one token."""
    return sum(token.entropy for token in written) / len(written)
