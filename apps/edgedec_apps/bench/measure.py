"""Measures speed: every prompt is decoded in several ways in turn, so that a slow moment of the machine slows all ways.

A way is a function (`Runner`), so that anything that generates can be measured. edgedec has three: speculative, plain,
and plain again; the difference of the two plain ways is noise.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, inf
from time import monotonic

from edgedec.api.engine import Engine
from edgedec.api.requests import SamplingOptions
from edgedec.progress import CancelToken, OnProgress, Progress, report_progress
from edgedec_apps.bench.prompts import BenchRequest

_MEASURING = "measuring the prompts"
SPECULATIVE, PLAIN, AGAIN = "speculative", "plain", "plain again"


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        token_ids: The generated tokens.
        first_token_s: Seconds from the request to the first token.
        total_s: Seconds from the request to the end.
        n_steps: Forwards after the prefill.
        n_accepted: Draft tokens that were accepted.
        reasons: Why drafting was off, where it was.
        draft_s: Mean seconds of a draft, with what drafters learn of its step; 0 without a verified draft.
    """

    token_ids: tuple[int, ...]
    first_token_s: float
    total_s: float
    n_steps: int = 0
    n_accepted: int = 0
    reasons: tuple[str, ...] = ()
    draft_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds after the first token."""
        return self.total_s - self.first_token_s

    @property
    def n_decoded(self) -> int:
        """Tokens after the first one."""
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt run once in every way.

    Attributes:
        request: The prompt.
        round: Number of the repetition, from 0.
        runs: The run of every way.
    """

    request: BenchRequest
    round: int
    runs: Mapping[str, Run]


Runner = Callable[[BenchRequest, CancelToken], Run | None]
"""Runs a prompt; returns None where the run was cancelled."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How long a task is measured: until either limit is reached, but at least one round.

    Attributes:
        n_rounds: Repetitions of all prompts of the task.
        n_tokens: Tokens generated without drafts, over all prompts and repetitions of the task.
    """

    n_rounds: int = 5
    n_tokens: int = 600


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of every run.

    Attributes:
        max_tokens: Most tokens of a run.
        temperature: 0 takes the most probable token; above 0, every prompt has its own seed.
        top_p: Probability that is kept; None for the model's default.
        warm_store: Whether drafters keep what they learned in earlier runs.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    warm_store: bool = False

    def sampling(self, seed: int) -> SamplingOptions:
        """Return the options of Engine.generate for a prompt with a seed."""
        arguments: SamplingOptions = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": seed}
        if self.top_p is not None:
            arguments["top_p"] = self.top_p
        return arguments


def engine_runner(engine: Engine, options: RunOptions, *, draft: bool) -> Runner:
    """Return a runner of an engine, with or without drafts.

    Before every run the KV cache is emptied and, unless the stores stay warm, so are the drafters' stores: a run has no
    advantage from earlier runs.
    """

    def run(request: BenchRequest, cancel: CancelToken) -> Run | None:
        other = int(request.token_ids[0] == 0)  # a text with another first token empties the KV cache
        engine.generate([other], max_tokens=1, temperature=0.0, draft=False, cancel=cancel)
        if not options.warm_store:
            engine.forget()
        generation = engine.generate(request.token_ids, draft=draft, cancel=cancel, **options.sampling(request.seed))
        if generation.finish_reason == "cancelled":
            return None
        stats = generation.stats
        return Run(
            generation.token_ids,
            stats.first_token_s,
            stats.total_s,
            stats.n_steps,
            stats.n_accepted_tokens,
            (*stats.notes, *stats.reasons),
            stats.draft_s / stats.n_drafts if stats.n_drafts else 0.0,
        )

    return run


def engine_runners(engine: Engine, options: RunOptions) -> dict[str, Runner]:
    """Return edgedec's three ways: speculative, plain, and plain again."""
    plain = engine_runner(engine, options, draft=False)
    return {SPECULATIVE: engine_runner(engine, options, draft=True), PLAIN: plain, AGAIN: plain}


def order(ways: Sequence[str], turn: int) -> list[str]:
    """Return the ways in the order of a turn: rotated, and reversed in every other cycle.

    >>> [" ".join(order("abc", turn)) for turn in range(6)]
    ['a b c', 'b c a', 'c a b', 'c b a', 'a c b', 'b a c']
    """
    n = len(ways)
    start = turn % n
    rotated = [*ways[start:], *ways[:start]]
    return rotated[::-1] if turn // n % 2 else rotated


def warm_up(
    requests: Sequence[BenchRequest],
    runners: Mapping[str, Runner],
    cancel: CancelToken,
    *,
    on_progress: OnProgress | None = None,
) -> bool:
    """Run the longest prompt in every way without measuring; return False where that was cancelled."""
    longest = max(requests, key=lambda request: len(request.token_ids))
    ways = list(dict.fromkeys(runners.values()))
    for number, runner in enumerate(ways):
        report_progress(on_progress, "warming up", number, len(ways), "runs")
        if runner(longest, cancel) is None:
            return False
    report_progress(on_progress, "warming up", len(ways), len(ways), "runs")
    return True


def measure(
    requests: Sequence[BenchRequest],
    runners: Mapping[str, Runner],
    cancel: CancelToken,
    *,
    rounds: Rounds | None = None,
    on_progress: OnProgress | None = None,
    on_trial: Callable[[list[Trial]], None] | None = None,
) -> list[Trial]:
    """Return the trials of all prompts; after a cancel, those that are complete.

    A round covers all tasks that need it, so that the repetitions of a task are apart in time. How many rounds a task
    needs is known once its first round is over; before, progress counts on the most. So the runs that progress tells,
    and the time of those that are left, as long as the longest run each, only fall.

    Args:
        runners: The ways to run a prompt, by name.
        cancel: Ends the measurement.
        rounds: How long each task is measured.
        on_progress: Gets a report after each run.
        on_trial: Gets the trials so far after each of them.
    """
    rounds, n_ways = rounds or Rounds(), len(runners)
    trials: list[Trial] = []
    done, began_s = count(1), monotonic()
    longest_s, left_s = 0.0, inf

    def tell() -> None:
        nonlocal began_s, longest_s, left_s
        n_done, n_all = next(done), n_ways * _n_trials(trials, requests, rounds)
        began_s, run_s = monotonic(), monotonic() - began_s
        longest_s = max(longest_s, run_s)
        left_s = min(left_s, longest_s * max(0, n_all - n_done))
        if on_progress is not None:
            on_progress(Progress(_MEASURING, n_done, max(n_done, n_all), "runs", left_s=left_s))

    report_progress(on_progress, _MEASURING, 0, n_ways * _n_trials(trials, requests, rounds), "runs")
    for number in range(rounds.n_rounds):
        due = _due(trials, requests, rounds)
        for place, request in enumerate(requests):
            if number >= due[request.task]:
                continue
            runs = _run_all(request, runners, order(list(runners), number + place), cancel, tell)
            if runs is None:
                return trials
            trials.append(Trial(request, number, runs))
            if on_trial is not None:
                on_trial(trials)
    return trials


def _n_trials(trials: Sequence[Trial], requests: Sequence[BenchRequest], rounds: Rounds) -> int:
    """Return how many trials there will be at most: a task whose first round is not over may need all rounds."""
    due, begun = _due(trials, requests, rounds), {trial.request.id for trial in trials}
    open_tasks = {request.task for request in requests if request.id not in begun}
    return sum(rounds.n_rounds if request.task in open_tasks else due[request.task] for request in requests)


def n_due(trials: Sequence[Trial], n_prompts: int, rounds: Rounds) -> int:
    """Return the number of rounds that a task of `n_prompts` needs, from its trials so far; 1 before its first round.

    A first round of three prompts with 160 tokens each needs a second round:

    >>> runs = {PLAIN: Run(tuple(range(160)), 0.1, 1.0)}
    >>> trials = [Trial(BenchRequest(name, "chat", (1,), 0), 0, runs) for name in "abc"]
    >>> n_due(trials, 3, Rounds(n_rounds=5, n_tokens=600)), n_due([], 3, Rounds())
    (2, 1)
    """
    lengths = [len(trial.runs[PLAIN].token_ids) for trial in trials if trial.round == 0]
    if not lengths:
        return 1
    n_round = sum(lengths) * n_prompts / len(lengths)
    return min(rounds.n_rounds, ceil(rounds.n_tokens / n_round)) if n_round else rounds.n_rounds


def _due(trials: Sequence[Trial], requests: Sequence[BenchRequest], rounds: Rounds) -> dict[str, int]:
    """Return the number of rounds that every task needs."""
    sizes = Counter(request.task for request in requests)
    return {
        task: n_due([trial for trial in trials if trial.request.task == task], size, rounds)
        for task, size in sizes.items()
    }


def _run_all(
    request: BenchRequest,
    runners: Mapping[str, Runner],
    ways: Sequence[str],
    cancel: CancelToken,
    tell: Callable[[], None],
) -> dict[str, Run] | None:
    runs: dict[str, Run] = {}
    for way in ways:
        run = None if cancel.cancelled else runners[way](request, cancel)
        if run is None:
            return None
        runs[way] = run
        tell()
    return {way: runs[way] for way in runners}
