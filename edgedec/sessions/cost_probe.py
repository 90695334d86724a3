"""Measures the cost curve of a model on this machine: in about two seconds at its first load, then it is cached."""

from collections.abc import Callable
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import Cost, CostCurve
from edgedec.errors import EdgedecError
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.progress import check_cancelled, report_progress, stage
from edgedec.storage import probe_cache
from edgedec.storage.probe_cache import machine_key, quiet_from_now
from edgedec.tokenizer import Tokenizer, added_around

N_MAX, LEAST_COMPARED = 16, 8  # rows that are compared: rounding to int8 hides a small difference in many rows
_ROWS = (1, 2, 4, 8, 16, 32, 64)
MOST_ROWS = _ROWS[-1]
_BETWEEN = (3, 6, 12, 24)  # measured where time is left
_N_PAST = 32
_REPEATS, _LEAST = 3, 4  # times that a number of rows is measured; numbers of rows that are measured on a busy machine
_LAST = (2, 1, 3, 1, 4, 1, 6, 8) * 6  # as drafts do: a process's first forwards, and those after many rows, take longer
_PHASE, _WHAT = "measuring", "what a forward of several tokens costs"
_STREAK = 6  # forwards of one row in a row; the last ones are like those of plain decoding
_RESUME = "resume"  # the key of what the first plain step after a draft takes longer, in plain steps


def cost_curve(
    session: Session, options: LoadOptions, limit_s: float = 2.0, *, most_rows: int = MOST_ROWS
) -> CostCurve:
    """Return the cost curve of a session's model, from the options' cache_dir or measured now.

    It is measured at each load where other machines run layers, as the line to them may be another one.

    The tokens are random ones, and others in each forward: the rows of a mixture of experts then go through as many
    experts as different tokens do. Real steps, whose tokens may share experts, refine the curve.

    What the session holds is lost. The limit of `limit_s` seconds begins after the first forward or two, which may have
    to read the weights from a cold disk. The time of each number of rows is the least of several forwards, some time
    apart, so that a busy moment does not count; a busy machine's curve ends early, and is not kept. Each comes after a
    forward of another number of rows, as drafts do. One row is measured in a streak as well, as plain decoding is one.
    The number of rows rises while time is left, at most to `most_rows`; each row takes the memory of a row of logits.
    """
    card = session.model.card
    key = f"{card.fingerprint} {card.runtime} {machine_key(options)} {most_rows} as drafts do"
    cache_dir = None if options.machines else options.cache_dir
    cached = _as_curve(probe_cache.get(cache_dir, "curve", key))
    if cached is not None:
        return cached
    with stage(options.on_progress, _PHASE, _WHAT):
        is_quiet = quiet_from_now()
        measured, streak_s = _measure(session, limit_s, options, most_rows, is_quiet)
    resume_share = 0.0
    if streak_s:
        resume_share = max(0.0, measured[1] / streak_s - 1)
        measured[1] = min(measured[1], streak_s)
    if len(measured) > 1 and is_quiet():  # a single number of rows says nothing about drafts
        numbers = {_RESUME: resume_share} | {str(n): seconds for n, seconds in measured.items()}
        probe_cache.put(cache_dir, "curve", key, numbers)
    return CostCurve(measured, resume_share)


def _as_curve(numbers: object) -> CostCurve | None:
    if not isinstance(numbers, dict):
        return None
    try:
        resume_share = float(numbers.get(_RESUME, 0.0))
        measured = {int(n): float(seconds) for n, seconds in numbers.items() if n != _RESUME}
    except (TypeError, ValueError, OverflowError):
        return None
    sound = 0 <= resume_share < 1e3 and all(n >= 1 and 0 < seconds < 1e6 for n, seconds in measured.items())
    return CostCurve(measured, resume_share) if measured and sound else None


def _measure(
    session: Session, limit_s: float, options: LoadOptions, most_rows: int, is_quiet: Callable[[], bool]
) -> tuple[dict[int, float], float | None]:
    """Return the seconds by number of rows, and those of one row in a streak; None where there was no time for it."""
    most = min(session.model.capabilities.max_rows, session.room(1), most_rows)
    rng, n_vocab = np.random.default_rng(0), session.model.card.n_vocab
    measured: dict[int, float] = {}
    streak_s: float | None = None
    try:
        n_past = _fill(session, _random_tokens(rng, n_vocab, _N_PAST), limit_s, most)
        until = monotonic() + limit_s
        for n in _order(most):
            expected = measured.get(n, 2 * max(measured.values(), default=0.0))
            if measured and (monotonic() + expected > until or (len(measured) >= _LEAST and not is_quiet())):
                continue  # a forward of fewer rows may still fit
            check_cancelled(options.cancel, "measuring the model's speed")
            spent = 1 - (until - monotonic()) / limit_s
            report_progress(options.on_progress, _PHASE, min(99, max(0, int(100 * spent))), 100, "%", _WHAT)
            tokens = _random_tokens(rng, n_vocab, n)
            started = perf_counter()
            session.forward(tokens, n_past=n_past, rows="all")
            seconds = perf_counter() - started
            measured[n] = min(measured.get(n, seconds), seconds)
            if n == 1 and most > 1 and streak_s is None and _STREAK * seconds < limit_s / 8:
                streak_s = _streak_s(session, _random_tokens(rng, n_vocab, _STREAK), n_past)
    except EdgedecError:
        check_cancelled(options.cancel, "measuring the model's speed")
    return measured, streak_s


def _streak_s(session: Session, tokens: NDArray[np.int32], n_past: int) -> float:
    """Return the least seconds of a forward of one token, those of the first half not counted."""
    seconds = []
    for i in range(len(tokens)):
        started = perf_counter()
        session.forward(tokens[i : i + 1], n_past=n_past, rows="all")
        seconds.append(perf_counter() - started)
    return min(seconds[len(seconds) // 2 :])


def as_prompt(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return as many tokens that end as prompts do, where those end in a way: an encoder has read the others then."""
    behind = np.array(added_around(tokenizer)[1], np.int32)
    n, other = len(tokens) - len(behind), next(i for i in range(len(behind) + 1) if i not in behind)
    if not len(behind) or n < 1:
        return tokens
    return np.concatenate([np.where(np.isin(tokens[:n], behind), np.int32(other), tokens[:n]), behind])


def _random_tokens(rng: "np.random.Generator", n_vocab: int, n: int) -> NDArray[np.int32]:
    return rng.integers(0, n_vocab, n, dtype=np.int32)


def _fill(session: Session, tokens: NDArray[np.int32], limit_s: float, most: int) -> int:
    """Evaluate the context that forwards are measured after, which also loads the weights; return its tokens."""
    started, tokens = monotonic(), as_prompt(tokens, session.model.tokenizer)
    session.forward(tokens[:1], n_past=0)
    token_s = monotonic() - started
    n = min(_N_PAST, session.room(max(most, 1)), int(limit_s / (8 * token_s + 1e-9)))
    if n > 1:
        session.forward(as_prompt(tokens[:n], session.model.tokenizer)[1:], n_past=1)
    return max(n, 1) if session.room(0) > 1 else 0


def _order(most: int) -> list[int]:
    """Return the numbers of rows to measure, each several times and apart, so that a busy moment spoils one at most."""
    rows = sorted({n for n in (*_ROWS, most) if 1 <= n <= most})
    return rows * _REPEATS + [n for n in _BETWEEN if n < most] * _REPEATS + [n for n in _LAST if n <= most]


def measuring_s(n_rows: int, cost: Cost) -> float:
    """Return the seconds that Session.exact_rows takes to measure `n_rows` rows."""
    n = min(N_MAX, 1 << (n_rows - 1).bit_length())
    n_steps = max(LEAST_COMPARED, n) + 1
    seconds = 4 * cost(0) + cost(2) + cost(1) + n_steps * cost(0) + cost(n_steps - 1)
    for size in {2, n_rows, n}:
        times, rest = divmod(max(LEAST_COMPARED, size), size)
        seconds += times * cost(size - 1) + (cost(rest - 1) if rest else 0.0) + cost(0)
    return seconds
