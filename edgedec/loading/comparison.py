"""Comparing two runtimes by the time of an answer with drafts, the time of its prompt, and their memory.

The time of one token alone misleads: drafts are verified in forwards of several rows, whose further rows cost next to
nothing on one runtime and a whole step each on another. The tokens that a draft brings are taken from a table of
recorded texts (KINDS). So neither a user's requests nor the option `draft` can change the choice, as another runtime
may write another text.

The table was recorded with qwen2.5-coder-1.5b (Q4_K_M) and the drafters of `auto`: 20 prompts of five tasks, up to 160
tokens each, every text begun with empty stores. The table holds no times, so every machine makes the same one:

    edgedec bench qwen2.5-coder-1.5b --runtime cpu --rows ROWS.jsonl
    python benchmarks/speed/draft_yields.py ROWS.jsonl
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from threading import Timer
from time import perf_counter

import numpy as np

from edgedec.errors import CancelledError, EdgedecError
from edgedec.load_options import N_DRAFT_MAX, LoadOptions
from edgedec.memory_plan import format_bytes
from edgedec.model import Model
from edgedec.progress import CancelToken
from edgedec.runtime import Runtime
from edgedec.storage.probe_cache import quietly

_LIMIT_S = 6.0  # for both measurements; loading the first runtime does not count
_MARGIN = 0.95  # the second must take less than this share of the time of the first, which has all capabilities
_DOUBLED = 0.9  # a further factor for each time that the second holds twice the memory of the first
_N_WARM, _N_PROMPT, _ROUNDS = 8, 32, 3
_PROBE_STEPS = 25  # what finding out how many rows are bit-equal mostly takes, in single steps
_N_LONG = 300  # tokens before the rows whose bits are compared, as kernels change with the length of the context


@dataclass(frozen=True, slots=True)
class Kind:
    """The positions of the recorded texts at which drafts promised about the same.

    Attributes:
        share: The share of all positions that these are, 0 to 1.
        tokens: The mean tokens that a forward brings at these positions, by its rows: a draft's nodes and one.
    """

    share: float
    tokens: Mapping[int, float]


ROWS = (1, 2, 4, 8)
"""Rows of the forwards in the table: a plain step, and drafts of 1, 3 and 7 nodes."""
PROMPT_TOKENS = 1.50
"""Tokens of a prompt to each token of an answer, in the recorded texts."""
KINDS: tuple[Kind, ...] = (
    Kind(0.0705, {1: 1.000, 2: 1.000, 4: 1.000, 8: 1.000}),
    Kind(0.1079, {1: 1.000, 2: 1.181, 4: 1.332, 8: 1.383}),
    Kind(0.0841, {1: 1.000, 2: 1.222, 4: 1.468, 8: 1.630}),
    Kind(0.1449, {1: 1.000, 2: 1.355, 4: 1.696, 8: 2.065}),
    Kind(0.1515, {1: 1.000, 2: 1.586, 4: 2.260, 8: 2.910}),
    Kind(0.1203, {1: 1.000, 2: 1.816, 4: 3.149, 8: 4.913}),
    Kind(0.3209, {1: 1.000, 2: 1.982, 4: 3.902, 8: 7.556}),
)
"""All positions, from those where drafts promised least to those where they promised most."""


def seconds_per_token(seconds: Mapping[int, float], kinds: Sequence[Kind] = KINDS) -> float:
    """Return the mean seconds of a token where each kind of position gets the number of rows that pays most.

    Args:
        seconds: Seconds of a forward by its rows, one row among them; rows that are not in the table are ignored.
        kinds: The kinds of positions.

    >>> kinds = (Kind(0.5, {1: 1.0, 8: 1.0}), Kind(0.5, {1: 1.0, 8: 5.0}))
    >>> seconds_per_token({1: 0.10, 8: 0.20}, kinds)
    0.07
    """
    fastest = [
        min(seconds[n_rows] / n_tokens for n_rows, n_tokens in kind.tokens.items() if n_rows in seconds)
        for kind in kinds
    ]
    weighted = sum(kind.share * measured for kind, measured in zip(kinds, fastest, strict=True))
    return weighted / sum(kind.share for kind in kinds)  # shares are rounded


@dataclass(frozen=True, slots=True)
class Measured:
    """What a comparison measured of one runtime.

    Attributes:
        seconds: Seconds of a forward by its number of rows; a forward of one row is always there.
        prompt_s: Seconds for each token of a prompt; None where there was no time to measure it.
        n_exact: The most rows of a forward, up to the last of ROWS, that have the bits of single steps; None where the
            number could not change the choice.
        n_bytes: What the runtime would hold with the default context; None where it does not say.
        is_quiet: Whether no other program took the processor meanwhile.
    """

    seconds: Mapping[int, float]
    prompt_s: float | None = None
    n_exact: int | None = None
    n_bytes: int | None = None
    is_quiet: bool = True

    def drafted_s(self, rows: Sequence[int] = ROWS) -> float:
        """Return the expected seconds of a token with drafts, by forwards of these numbers of rows."""
        n_most = ROWS[-1] if self.n_exact is None else self.n_exact
        return seconds_per_token({n: self.seconds[n] for n in rows if n in self.seconds and (n <= n_most or n == 1)})

    def text(self, name: str) -> str:
        """Return the measurement of the runtime `name` in words."""
        at_best = "at best " if self.n_exact is None else ""
        parts = [f"{name}: {1000 * self.seconds[1]:.1f} ms a token"]
        if len(self.seconds) > 1:
            parts.append(f"{at_best}{1000 * self.drafted_s():.1f} with drafts as expected")
        if self.prompt_s is not None:
            parts.append(f"{1000 * self.prompt_s:.1f} a token of a prompt")
        if self.n_bytes is not None:
            parts.append(format_bytes(self.n_bytes))
        return ", ".join(parts)


def is_faster(of_rival: Measured, of_first: Measured) -> bool:
    """Return whether the second runtime (`of_rival`) is worth taking in place of the first (`of_first`).

    It is by the time of an answer with its prompt, over the numbers of rows that are known of both runtimes. A runtime
    that holds twice the memory must be a tenth faster.

    >>> cpu = Measured({1: 0.0343, 2: 0.037, 4: 0.043, 8: 0.050}, 0.005, 8, 1074_000_000)
    >>> is_faster(Measured({1: 0.0317, 2: 0.050, 4: 0.092, 8: 0.222}, 0.009, 8, 2044_000_000), cpu)
    False
    >>> is_faster(Measured({1: 0.010, 2: 0.012, 4: 0.020, 8: 0.040}, 0.003, 1, 2044_000_000), cpu)
    True
    """
    rows = [n for n in ROWS if _is_known(of_rival, n) and _is_known(of_first, n)]
    prompts = of_rival.prompt_s is not None and of_first.prompt_s is not None

    def seconds(one: Measured) -> float:
        return one.drafted_s(rows) + (PROMPT_TOKENS * (one.prompt_s or 0.0) if prompts else 0.0)

    doublings = log2(of_rival.n_bytes / of_first.n_bytes) if of_rival.n_bytes and of_first.n_bytes else 0.0
    return seconds(of_rival) < _MARGIN * float(_DOUBLED ** max(0.0, doublings)) * seconds(of_first)


def _is_known(one: Measured, n_rows: int) -> bool:
    return n_rows in one.seconds or (one.n_exact is not None and n_rows > one.n_exact)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison of two runtimes found, as it is kept.

    Attributes:
        reason: The measurements, for a person.
        is_faster: Whether the rival is worth taking.
    """

    reason: str
    is_faster: bool


def compared_runtimes(path: Path, first: Runtime, rival: Runtime, options: LoadOptions) -> Comparison | None:
    """Return whether the second runtime is worth taking in place of the first; None where that can't be measured now.

    That is where the first can't be loaded, or other programs took the processor while one was measured. Loading counts
    for the rival's time limit, and not for the first runtime's, which may have to make tiles. How many of the rival's
    rows are bit-equal takes a probe, which is made only where the choice depends on it.

    Raises:
        CancelledError: The options' `cancel` was cancelled.
    """
    of_first = measure(path, first, options, _LIMIT_S / 3, load_limited=False, matters=lambda measured: True)
    if of_first is None or not of_first.is_quiet:
        return None

    def matters(measured: Measured) -> bool:
        return is_faster(measured, of_first) and not is_faster(replace(measured, n_exact=1), of_first)

    of_rival = measure(path, rival, options, _LIMIT_S * 2 / 3, load_limited=True, matters=matters)
    if of_rival is None:
        return Comparison(f"{of_first.text(first.name)}; {rival.name} took too long to load", is_faster=False)
    reason = f"{of_first.text(first.name)}; {of_rival.text(rival.name)}"
    return Comparison(reason, is_faster(of_rival, of_first)) if of_rival.is_quiet else None


def measure(
    path: Path,
    runtime: Runtime,
    options: LoadOptions,
    limit_s: float,
    *,
    load_limited: bool,
    matters: Callable[[Measured], bool],
) -> Measured | None:
    """Measure a runtime, as far as the time allows.

    Options that change with a request or with its drafts are left out, so that the same model gets the same answer.

    Args:
        path: The model's file.
        runtime: The runtime, which is loaded and closed again.
        options: How the model would be loaded.
        limit_s: Seconds for the measurement.
        load_limited: Whether loading counts for `limit_s`.
        matters: Called with the times; returns whether the number of bit-equal rows is worth finding out.

    Returns:
        The smallest of a few times for each kind of forward; None where not even one forward was timed.

    Raises:
        CancelledError: The options' `cancel` was cancelled.
    """
    outer, token = options.cancel or CancelToken(), CancelToken()
    usual = replace(options, n_ctx=None, n_parallel=1, max_rows=N_DRAFT_MAX + 1, planning_bytes=None, on_progress=None)
    usual = replace(usual, tiles_only=False)  # the other runtime needs the model's file
    n_ctx = _N_PROMPT + max(ROWS)
    seconds: dict[int, float] = {}
    prompts: list[float] = []
    n_exact: int | None = None
    is_quiet = True
    outer.check("measuring the runtimes")
    try:
        with (
            outer.calling(token.cancel),
            _timer(limit_s if load_limited else None, token),
            runtime.load(path, replace(usual, n_ctx=n_ctx, cancel=token, on_progress=options.on_progress)) as model,
        ):
            within = None if load_limited else limit_s
            _, is_quiet = quietly(lambda: _time_forwards(model, n_ctx, token, within, seconds, prompts))
            if seconds and matters(Measured(seconds, min(prompts, default=None))):
                probe_s = 2 * _PROBE_STEPS * seconds[1] + _N_LONG * min(prompts, default=np.inf)
                n_exact = _rows_exact(model, token, may_probe=probe_s < limit_s and not token.cancelled)
    except CancelledError:
        pass
    except EdgedecError:  # loading with this runtime says why
        return None
    outer.check("measuring the runtimes")
    n_bytes = _n_bytes(path, runtime, usual) if seconds else None
    return Measured(seconds, min(prompts, default=None), n_exact, n_bytes, is_quiet) if seconds else None


def _time_forwards(
    model: Model,
    n_ctx: int,
    token: CancelToken,
    limit_s: float | None,
    seconds: dict[int, float],
    prompts: list[float],
) -> None:
    """Add times to `seconds` (of forwards by their rows) and `prompts` (for each token) until `token` is cancelled.

    The limit begins after a first forward, which may have to read the weights from a cold disk; None for no limit.
    """
    session = model.session(n_ctx)
    tokens = np.arange(n_ctx, dtype=np.int32) % model.card.n_vocab

    def timed(start: int, n: int, rows: str) -> float:
        token.check("measuring")
        started = perf_counter()
        session.forward(tokens[start : start + n], n_past=start, rows=rows)  # type: ignore[arg-type]
        return perf_counter() - started

    with suppress(CancelledError), token.calling(session.cancel):
        timed(0, _N_WARM, "last")
        with _timer(limit_s, token):
            seconds[1] = timed(_N_WARM, 1, "all")
            for _ in range(_ROUNDS):
                prompts.append(timed(0, _N_PROMPT, "last") / _N_PROMPT)
                for n in ROWS:
                    seconds[n] = min(timed(_N_PROMPT, n, "all"), seconds.get(n, np.inf))


def _rows_exact(model: Model, token: CancelToken, *, may_probe: bool) -> int:
    """Return how many rows of a forward have the bits of single steps, in a context of _N_LONG tokens.

    The answer is 1 where it would take a probe and `may_probe` is false.
    """
    if not may_probe:
        return 1
    if model.batch_invariant is True:
        return max(ROWS)
    session = model.session(_N_LONG + N_DRAFT_MAX + 2)
    try:
        with token.calling(session.cancel):
            session.forward(np.arange(_N_LONG, dtype=np.int32) % model.card.n_vocab, n_past=0)
            return max((n for n in ROWS if session.exact_rows(_N_LONG, measure=n).sure >= n), default=1)
    finally:
        session.close()


def _n_bytes(path: Path, runtime: Runtime, options: LoadOptions) -> int | None:
    try:
        terms = runtime.plan(path, replace(options, cancel=None))
    except EdgedecError:
        return None
    return sum(term.n_bytes for term in terms if not term.base) or None


@contextmanager
def _timer(limit_s: float | None, token: CancelToken) -> Iterator[None]:
    """Cancel the token when `limit_s` seconds are over and the block is not; None for no limit."""
    if limit_s is None:
        yield
        return
    timer = Timer(limit_s, token.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
