"""Evaluates settings of a model on a text: perplexity, distance from a baseline, and speed.

A text is cut into windows, and each window is evaluated teacher-forced: every token is predicted from the true tokens
before it. All settings evaluate a few rows of a window in turn, so that neither a long text nor a large vocabulary
takes much memory. The last rows of a window are evaluated one at a time, as in decoding: their times give the speed,
and their logits count like all others.

All sums are in f64, even where a runtime sums in less: a divergence is a small difference of large sums. Close to the
baseline the figures say how much the distributions differ, not which setting answers better (Nikolić et al. 2026,
arXiv:2606.19558).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CancelledError, RequestError, counted
from edgedec.model import LayerSet, Session
from edgedec.progress import CancelToken, OnProgress, report_progress

DEFAULT_TEXT = Path(__file__).with_name("text.txt")
"""A text to evaluate on where none is given: 2,200 tokens of English."""
N_ROWS = 32
"""Most rows of logits in memory of the baseline, and as many of another setting."""
N_STEPS = 17
"""Rows at the end of a window that are evaluated one at a time; all except the first are timed."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A setting to evaluate, with its session.

    Attributes:
        name: The name of the setting in errors.
        session: A session for at least the tokens of a window; its cached tokens are dropped.
        layers: The layers to run; None for all.
        share: Share of the bytes of the weights that a token reads.
    """

    name: str
    session: Session
    layers: LayerSet | None = None
    share: float = 1.0


@dataclass(slots=True)
class Samples:
    """What was found at each position of a window.

    Attributes:
        nll: f64, the negative log-probability of the text's token, in nats.
        kl: f64, KL(baseline || setting), in nats.
        same: Whether both have the same most probable token (the lowest id on a tie).
        step_s: Seconds of each forward of one token.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a setting.

    Attributes:
        ppl: Perplexity, exp of the mean negative log-probability of the text's tokens.
        kl_mean: Mean over the positions of KL(baseline || setting), in nats.
        kl_p99: The 99th percentile of KL(baseline || setting), interpolated linearly between two positions.
        top1: Share of positions where both have the same most probable token.
        n_positions: Number of tokens that were predicted.
        tok_s: Tokens per second, from the median time of forwards of one token at the ends of the windows, without
            drafts or sampling; None where the windows are too short to time a forward.
        kl_error: Standard error of kl_mean; None with fewer than two windows. Windows are taken as the independent
            samples, as neighbouring tokens are alike (cluster sampling: Cochran 1977, Sampling Techniques, ch. 9).
        top1_error: Standard error of top1, as that of kl_mean.
        tok_s_range: Tokens per second from the median of the slowest window and from that of the fastest; None where
            tok_s is None.
    """

    ppl: float
    kl_mean: float
    kl_p99: float
    top1: float
    n_positions: int
    tok_s: float | None
    kl_error: float | None
    top1_error: float | None
    tok_s_range: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of evaluate().

    Attributes:
        figures: The figures of each setting, the baseline first; empty where no window was finished.
        n_windows: Number of windows that were finished; a cancelled evaluation has not finished all.
    """

    figures: tuple[Figures, ...]
    n_windows: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a row of logits.

    Attributes:
        logs: f64[n_vocab], natural logarithms of the probabilities.
        probs: f64[n_vocab], the probabilities.
        best: The most probable token, the lowest id on a tie.
    """

    logs: NDArray[np.float64]
    probs: NDArray[np.float64]
    best: int


def cut_windows(token_ids: Sequence[int], leading: Sequence[int], n_window: int) -> list[NDArray[np.int32]]:
    """Cut a text into windows int32[2 to n_window], each with the leading tokens before its part of the text.

    A last window of one token is dropped, as it predicts nothing.

    >>> [window.tolist() for window in cut_windows([5, 6, 7, 8, 9], [1], 3)]
    [[1, 5, 6], [1, 7, 8], [1, 9]]

    Raises:
        RequestError: The windows are too small, or the text is too short for a window.
    """
    n_own = n_window - len(leading)
    if n_own < 1 or n_window < 2:
        raise RequestError(
            f"a window of {counted(n_window, 'token')} predicts nothing; it must have at least {len(leading) + 2}"
        )
    parts = [[*leading, *token_ids[start : start + n_own]] for start in range(0, len(token_ids), n_own)]
    windows = [np.array(part, dtype=np.int32) for part in parts if len(part) >= 2]
    if not windows:
        raise RequestError(
            f"the text is too short: it has {counted(len(token_ids), 'token')}, and a "
            "prediction takes at least 2; give a longer text (some thousand tokens give reliable figures)"
        )
    return windows


def read_row(row: NDArray[np.float32]) -> Distribution | None:
    """Return the distribution of f32[n_vocab] logits, or None where a logit is not finite."""
    logs = row.astype(np.float64)
    logs -= logs.max()
    if not np.isfinite(logs.min()):  # the minimum is NaN where a logit is NaN
        return None
    probs = np.exp(logs)
    total = float(probs.sum())
    logs -= math.log(total)
    probs /= total
    return Distribution(logs, probs, int(row.argmax()))


def divergence(p: Distribution, q: Distribution) -> float:
    """Return KL(p || q) in nats: exactly 0 for equal logits, and never negative by rounding."""
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

    A cancel ends the evaluation, and the windows that all lanes finished count. It has 2 × max(n_rows, n_steps) rows of
    f32 logits in memory.

    Args:
        lanes: Settings with the same vocabulary; their sessions must not be in use.
        windows: int32[2 or more] each, with the leading tokens; the first token of a window is not predicted.
        cancel: Ends the evaluation.
        n_rows: Most rows of a forward, where the runtime takes so many.
        n_steps: Rows at the end of each window that are evaluated one at a time.
        on_progress: Gets the number of tokens that all lanes have evaluated.

    Raises:
        RequestError: A lane's logits are not finite.
        EdgedecError: As Session.forward.
    """
    finished: list[list[Samples]] = []
    done, total = 0, sum(len(window) - 1 for window in windows)
    n_rows = min(n_rows, *(lane.session.model.capabilities.max_rows for lane in lanes))
    shape = (2, max(n_rows, n_steps), lanes[0].session.model.card.n_vocab)
    rows = np.empty(shape, np.float32)
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(cancel.calling(lane.session.cancel))
        report_progress(on_progress, "evaluating", 0, total, "tokens")
        for window in windows:
            samples = [Samples() for _ in lanes]
            try:
                for n in _evaluate_window(lanes, rows, window, samples, n_rows, n_steps, cancel):
                    done += n
                    report_progress(on_progress, "evaluating", done, total, "tokens")
            except CancelledError:
                if not cancel.cancelled:
                    raise
                break
            finished.append(samples)
    return Reading(tuple(map(summarize, zip(*finished, strict=True))), len(finished))


def summarize(windows: Sequence[Samples]) -> Figures:
    """Return the figures of a setting from its samples of at least one window."""
    kl = [value for samples in windows for value in samples.kl]
    times = [seconds for samples in windows for seconds in samples.step_s]
    step_s = float(np.median(times)) if times else 0.0
    medians = [float(np.median(samples.step_s)) for samples in windows if samples.step_s]
    return Figures(
        ppl=math.exp(math.fsum(value for samples in windows for value in samples.nll) / len(kl)),
        kl_mean=math.fsum(kl) / len(kl),
        kl_p99=float(np.percentile(kl, 99)),
        top1=sum(same for samples in windows for same in samples.same) / len(kl),
        n_positions=len(kl),
        tok_s=1 / step_s if step_s > 0 else None,
        kl_error=standard_error([samples.kl for samples in windows]),
        top1_error=standard_error([samples.same for samples in windows]),
        tok_s_range=(1 / max(medians), 1 / min(medians)) if medians and min(medians) > 0 else None,
    )


def standard_error(windows: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean of all values, where windows are the samples; None for fewer than two.

    >>> standard_error([[1.0, 1.0], [3.0, 3.0]]), standard_error([[1.0, 3.0]])
    (1.0, None)
    """
    n_windows, n_values = len(windows), sum(map(len, windows))
    if n_windows < 2:
        return None
    mean = math.fsum(value for values in windows for value in values) / n_values
    squares = math.fsum((math.fsum(values) - mean * len(values)) ** 2 for values in windows)
    return math.sqrt(squares * n_windows / (n_windows - 1)) / n_values


def _evaluate_window(
    lanes: Sequence[Lane],
    buffers: NDArray[np.float32],
    tokens: NDArray[np.int32],
    per_lane: Sequence[Samples],
    n_rows: int,
    n_steps: int,
    cancel: CancelToken,
) -> Iterator[int]:
    """Evaluate a window in each lane, add to `per_lane`, yield the number of rows after each part (CancelledError).

    `buffers` is f32[2, rows, n_vocab]: the logits of the baseline, and those of the lane that is compared with it.
    """
    n = len(tokens) - 1  # the last token is only predicted
    n_together = max(0, n - n_steps)
    for start in (*range(0, n_together, n_rows), n_together):
        single = start == n_together
        stop = n if single else min(start + n_rows, n_together)
        base_rows, other_rows = buffers[:, : stop - start]
        for index, (lane, samples) in enumerate(zip(lanes, per_lane, strict=True)):
            cancel.check("evaluating")
            rows = other_rows if index else base_rows
            samples.step_s += _fill(rows, lane, tokens[start:stop], start, single=single)
            _compare(base_rows, rows, tokens[start + 1 : stop + 1], lane.name, samples)
        yield stop - start


def _compare(
    base_rows: NDArray[np.float32], rows: NDArray[np.float32], following: NDArray[np.int32], name: str, into: Samples
) -> None:
    """Add to `into`, for each row, the log-probability of the following token and the distance from the baseline."""
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
