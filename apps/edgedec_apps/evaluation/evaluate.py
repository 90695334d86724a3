"""What a setting costs in quality and brings in speed: perplexity and distance from a baseline on a given text.

A text is cut into windows, and each is evaluated teacher-forced: every token is predicted from the true tokens before
it. The baseline and the settings go through a window together, a few rows at a time, so that neither a long text nor a
large vocabulary takes much memory. The last rows of a window are evaluated one at a time, as decoding does it: their
times are the speed, their logits count like the others.

All sums are in f64, also where a runtime's own row operations use less: a divergence is a small difference of large
sums. Close to the baseline these figures say how much differs, not which of two settings answers better
(Nikolić et al. 2026, arXiv:2606.19558).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.counted import counted
from edgedec.errors import CancelledError, RequestError
from edgedec.model import LayerSet, Session
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec.tokenizer import Tokenizer

DEFAULT_TEXT = Path(__file__).with_name("text.txt")
"""A text to evaluate on where none is given: 2,200 tokens of English."""
N_ROWS = 32
"""Most rows of logits held at a time of the baseline, and as many of a setting."""
N_STEPS = 17
"""Rows at the end of a window that are evaluated one at a time; all but the first are timed."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A setting to evaluate.

    Attributes:
        name: What errors call it.
        session: Holds at least a window's tokens; what it has cached is dropped.
        layers: The layers to run; None for all.
        share: Of a whole token's bytes of weights that a token reads.
    """

    name: str
    session: Session
    layers: LayerSet | None = None
    share: float = 1.0


@dataclass(slots=True)
class Samples:
    """What was found at each position, over all windows so far.

    Attributes:
        nll: f64, minus the log-probability of the text's token, in nats.
        kl: f64, KL(baseline || setting) of the two distributions, in nats.
        same: Whether both take the same token for the most probable one (the lowest id on a tie).
        step_s: Seconds of forwards of one token.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def extend(self, other: "Samples") -> None:
        """Add what another one holds."""
        self.nll += other.nll
        self.kl += other.kl
        self.same += other.same
        self.step_s += other.step_s


@dataclass(frozen=True, slots=True)
class Figures:
    """A setting in figures.

    Attributes:
        ppl: Perplexity, exp of the mean negative log-probability of the text's tokens.
        kl_mean: Mean over the positions of KL(baseline || setting), in nats.
        kl_p99: Its 99th percentile, interpolated linearly between two positions.
        top1: Share of positions where both take the same token for the most probable one.
        n_positions: How many tokens were predicted.
        tok_s: Forwards of one token per second (of their median time), at the ends of the windows; no drafts, no
            sampling. None where the windows are too short to time one.
    """

    ppl: float
    kl_mean: float
    kl_p99: float
    top1: float
    n_positions: int
    tok_s: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What evaluate() found.

    Attributes:
        figures: Those of each setting, the baseline's first; empty where no window was finished.
        n_windows: How many windows were finished: fewer than there are when it was cancelled.
    """

    figures: tuple[Figures, ...]
    n_windows: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution that a row of logits stands for.

    Attributes:
        logs: f64[n_vocab], natural logarithms of the probabilities.
        probs: f64[n_vocab], the probabilities.
        best: The most probable token, the lowest id on a tie.
    """

    logs: NDArray[np.float64]
    probs: NDArray[np.float64]
    best: int


def leading_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the model expects before a text (its BOS token, or none)."""
    bare, whole = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def cut_windows(token_ids: Sequence[int], leading: Sequence[int], n_window: int) -> list[NDArray[np.int32]]:
    """Cut a text into windows int32[2 to n_window], each with the leading tokens before its part of the text.

    A last window of one token is left out, as it predicts nothing.

    >>> [window.tolist() for window in cut_windows([5, 6, 7, 8, 9], [1], 3)]
    [[1, 5, 6], [1, 7, 8], [1, 9]]

    Raises:
        RequestError: The windows are too small, or the text is too short for one.
    """
    n_own = n_window - len(leading)
    if n_own < 1 or n_window < 2:
        raise RequestError(
            f"a window of {counted(n_window, 'token')} predicts nothing; it must hold at least {len(leading) + 2}"
        )
    parts = [[*leading, *token_ids[start : start + n_own]] for start in range(0, len(token_ids), n_own)]
    windows = [np.array(part, dtype=np.int32) for part in parts if len(part) >= 2]
    if not windows:
        raise RequestError(
            f"the text is too short: it has {counted(len(token_ids), 'token')}, and a "
            "prediction takes at least 2; give a longer text (some thousand tokens make sound figures)"
        )
    return windows


def read_row(row: NDArray[np.float32]) -> Distribution | None:
    """Return the distribution of f32[n_vocab] logits, or None where a logit is not finite."""
    logs = row.astype(np.float64)
    logs -= logs.max()
    if not np.isfinite(logs.min()):  # not a number is the least of all to numpy
        return None
    probs = np.exp(logs)
    total = float(probs.sum())
    logs -= math.log(total)
    probs /= total
    return Distribution(logs, probs, int(row.argmax()))


def divergence(p: Distribution, q: Distribution) -> float:
    """Return KL(p || q) in nats: exactly 0 for equal logits, and never the small negative number of a rounded sum."""
    terms = p.logs - q.logs
    terms *= p.probs
    return max(0.0, float(terms.sum()))


def evaluate(
    lanes: Sequence[Lane],
    windows: Sequence[NDArray[np.int32]],
    cancel: CancelToken,
    *,
    n_rows: int = N_ROWS,
    n_steps: int = N_STEPS,
    on_progress: OnProgress | None = None,
) -> Reading:
    """Evaluate windows in every lane; the first lane is the baseline.

    Cancelling ends it after the last window that all lanes had finished. It holds 2 × max(n_rows, n_steps) rows of
    logits, f32.

    Args:
        lanes: Settings of one vocabulary; their sessions must not be in use.
        windows: int32[2 or more] each, the leading tokens included; the first token of each is not predicted.
        cancel: Stops it.
        n_rows: Most rows of a forward, where the runtime takes as many.
        n_steps: Rows at the end of each window that are evaluated one at a time.
        on_progress: Told how far all lanes are.

    Raises:
        RequestError: A lane's logits are not finite.
        EdgedecError: As Session.forward.
    """
    samples = [Samples() for _ in lanes]
    done, total, n_windows = 0, sum(len(window) - 1 for window in windows), 0
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(cancel.calling(lane.session.cancel))
        evaluation = _Evaluation(lanes, n_rows, n_steps)
        if on_progress is not None:
            on_progress(Progress("evaluating", 0, total, "tokens"))
        for window in windows:
            found = [Samples() for _ in lanes]
            try:
                for n in evaluation.window(window, found, cancel):
                    done += n
                    if on_progress is not None:
                        on_progress(Progress("evaluating", done, total, "tokens"))
            except CancelledError:
                if not cancel.cancelled:
                    raise
                break
            for all_of_them, new in zip(samples, found, strict=True):
                all_of_them.extend(new)
            n_windows += 1
    return Reading(tuple(map(summarize, samples)) if n_windows else (), n_windows)


def summarize(samples: Samples) -> Figures:
    """Return the figures of at least one position."""
    step_s = float(np.median(samples.step_s)) if samples.step_s else 0.0
    return Figures(
        ppl=math.exp(math.fsum(samples.nll) / len(samples.nll)),
        kl_mean=math.fsum(samples.kl) / len(samples.kl),
        kl_p99=float(np.percentile(samples.kl, 99)),
        top1=sum(samples.same) / len(samples.same),
        n_positions=len(samples.nll),
        tok_s=1 / step_s if step_s > 0 else None,
    )


class _Evaluation:
    """The buffers and sizes of an evaluation."""

    def __init__(self, lanes: Sequence[Lane], n_rows: int, n_steps: int) -> None:
        self._lanes = lanes
        self._n_rows = min(n_rows, *(lane.session.model.capabilities.max_rows for lane in lanes))
        self._n_steps = n_steps
        shape = (max(self._n_rows, n_steps), lanes[0].session.model.card.n_vocab)
        self._base, self._other = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def window(self, tokens: NDArray[np.int32], found: Sequence[Samples], cancel: CancelToken) -> Iterator[int]:
        """Add to `found` what each lane makes of a window; yield how many rows were done (CancelledError)."""
        n = len(tokens) - 1  # the last token is only predicted
        n_together = max(0, n - self._n_steps)
        for start in (*range(0, n_together, self._n_rows), n_together):
            single = start == n_together
            stop = n if single else min(start + self._n_rows, n_together)
            base_rows = self._base[: stop - start]
            for index, (lane, samples) in enumerate(zip(self._lanes, found, strict=True)):
                cancel.check("evaluating")
                rows = self._other[: stop - start] if index else base_rows
                samples.step_s += _fill(rows, lane, tokens[start:stop], start, single=single)
                _compare(base_rows, rows, tokens[start + 1 : stop + 1], lane.name, samples)
            yield stop - start


def _compare(
    base_rows: NDArray[np.float32], rows: NDArray[np.float32], following: NDArray[np.int32], name: str, into: Samples
) -> None:
    """Note for each row how probable the token that follows is, and how far it is from the baseline's row."""
    for base_row, row, token in zip(base_rows, rows, following.tolist(), strict=True):
        base = read_row(base_row)
        here = base if rows is base_rows else read_row(row)
        if base is None or here is None:
            raise RequestError(
                f"the logits of {name} are not finite; the model file is damaged, or the setting breaks it"
            )
        into.nll.append(-float(here.logs[token]))
        into.kl.append(divergence(base, here))
        into.same.append(base.best == here.best)


def _fill(
    rows: NDArray[np.float32], lane: Lane, tokens: NDArray[np.int32], n_past: int, *, single: bool
) -> list[float]:
    """Write the logits after `tokens` to f32[n, n_vocab]; return the seconds of each single forward but the first."""
    if not single:
        rows[:] = lane.session.forward(tokens, n_past=n_past, layers=lane.layers, rows="all").logits
        return []
    seconds = []
    for i in range(len(tokens)):
        started = perf_counter()
        forward = lane.session.forward(tokens[i : i + 1], n_past=n_past + i, layers=lane.layers)
        seconds.append(perf_counter() - started)
        rows[i] = forward.logits[0]
    return seconds[1:]
