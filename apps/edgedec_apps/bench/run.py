"""edgedec bench: how fast a model decodes with drafts and without, on prompts of several kinds."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from edgedec.api.engine import Engine
from edgedec.errors import CancelledError, RequestError, StorageError
from edgedec.loading.resolve import resolve
from edgedec.memory.system import peak_resident_bytes
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken, OnProgress, stage
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec_apps.bench.job import BenchJob
from edgedec_apps.bench.llamacpp import LLAMACPP, LOOKUP, open_lookup
from edgedec_apps.bench.machine import bandwidths, forget_peak, versions
from edgedec_apps.bench.measure import Runner, RunOptions, Trial, engine_runner, engine_runners, measure, warm_up
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, BenchPrompt, BenchRequest, prepare, read_prompts
from edgedec_apps.bench.rows import head_of, record
from edgedec_apps.bench.summary import summarize, totals
from edgedec_apps.bench.table import lines
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.json_file import report, require_json_file, write_json_file
from edgedec_apps.cli.opening import open_model
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import one_line
from edgedec_models.folders import cache_folder
from edgedec_runtimes.shared.cpu_count import usable_cores

_OTHERS = ("llamacpp",)
_READING = "measuring how fast memory is read"


@dataclass(slots=True)
class Outcome:
    """What was measured; the document of an interrupted benchmark holds what there is.

    Attributes:
        trials: The trials that are whole.
        interrupted: Whether it was cancelled before the last.
        runtime: The runtime that was measured.
        curve: Seconds of a forward by its number of tokens.
        peak_bytes: Most that the process held, llama.cpp not counted where it was loaded as well; None if not known.
        lookup_reason: Why llama.cpp's prompt lookup was not measured.
        bandwidth: GB/s read from memory, each time it was measured.
    """

    trials: list[Trial]
    interrupted: bool
    runtime: str
    curve: dict[int, float]
    peak_bytes: int | None
    lookup_reason: str | None
    bandwidth: list[float]


def run_options(job: BenchJob) -> RunOptions:
    """Return how the runs of a benchmark generate."""
    return RunOptions(job.max_tokens, job.temperature, job.top_p, job.warm_store)


def n_threads_of(job: BenchJob) -> int:
    """Return the number of threads of a forward."""
    return job.load.threads or usable_cores()


def run_bench(job: BenchJob) -> None:
    """Measure and report (CancelledError after what an interrupted benchmark had measured was reported).

    Raises:
        RequestError: An option is out of range, or the prompts' file is not as it should be.
        CancelledError: It was interrupted.
    """
    _check(job)
    prompts = read_prompts(job.prompts or DEFAULT_PROMPTS, job.per_task)
    outcome = interruptible(lambda cancel: _work(job, prompts, cancel))
    if outcome.trials:
        _report(job, outcome)
    if outcome.interrupted:
        raise CancelledError("interrupted" if outcome.trials else "interrupted before a prompt was measured")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write recorded rows to a file, one JSON object a line (StorageError when it can't be written)."""
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error


def _check(job: BenchJob) -> None:
    """Refuse what can't be done before anything is loaded."""
    SamplingParams(**run_options(job).sampling(0))
    if job.max_tokens < 2:
        raise RequestError(f"--max-tokens is {job.max_tokens}; a speed needs at least 2")
    if job.per_task is not None and job.per_task < 1:
        raise RequestError(f"--per-task is {job.per_task}; it must be at least 1")
    if job.against is not None and job.against not in _OTHERS:
        raise RequestError(f"--against {one_line(job.against)!r}; known: {', '.join(_OTHERS)}")
    if job.load.prompt_cache is not None:
        raise RequestError("--prompt-cache means nothing to a benchmark, whose runs all start cold; leave it out")
    if job.load.draft_store is not None:
        raise RequestError("--draft-store means nothing to a benchmark, which begins with nothing; leave it out")
    for path in (job.output.json_out, job.rows, job.curve_out):
        if path is not None:
            require_json_file(path)


def _work(job: BenchJob, prompts: list[BenchPrompt], cancel: CancelToken) -> Outcome:
    cap_bytes = None if job.load.memory is None else parse_size(job.load.memory)
    with ProgressLine(quiet=job.output.quiet) as on_progress:
        with stage(on_progress, _READING):
            bandwidth = bandwidths(n_threads_of(job), cap_bytes) if forget_peak() else []
        forget_peak()  # the buffer that was read counts for nothing
        outcome = _measured(job, prompts, cancel, on_progress)
        with stage(on_progress, _READING):
            again = [] if outcome.interrupted else bandwidths(n_threads_of(job), cap_bytes)
        outcome.bandwidth = bandwidth + again
        return outcome


def _measured(job: BenchJob, prompts: list[BenchPrompt], cancel: CancelToken, on_progress: OnProgress) -> Outcome:
    with ExitStack() as stack:
        engine = stack.enter_context(open_model(job.model, job.load, job.output, cancel))
        requests = prepare(engine, prompts, job.max_tokens)
        outcome = Outcome([], True, engine.card.runtime, {}, None, None, [])
        runners = engine_runners(engine, run_options(job))
        if not warm_up(requests, runners, cancel, on_progress=on_progress):
            return outcome
        if job.against is not None:
            outcome.peak_bytes = peak_resident_bytes()
            others, outcome.lookup_reason = _open_others(job, engine, requests, stack, cancel)
            if not warm_up(requests, others, cancel, on_progress=on_progress):
                return outcome
            runners |= others
        outcome.trials = measure(requests, runners, cancel, on_progress=on_progress)
        outcome.interrupted = cancel.cancelled
        outcome.curve = engine.curve.table()
        if job.rows is not None and not outcome.interrupted:
            resolving = ResolveOptions(cache_folder(), job.load.offline)
            path = resolve(job.model, resolving)
            drafts = None if job.load.draft_model is None else resolve(job.load.draft_model, resolving)
            head = head_of(job.model, path, drafts)
            rows = record(engine, requests, run_options(job), path, on_progress=on_progress)
            write_rows(job.rows, chain([head], rows))
        if job.against is None:
            outcome.peak_bytes = peak_resident_bytes()
        return outcome


def _open_others(
    job: BenchJob, engine: Engine, requests: list[BenchRequest], stack: ExitStack, cancel: CancelToken
) -> tuple[dict[str, Runner], str | None]:
    """Return the ways of llama.cpp, and why its prompt lookup is not among them; `stack` closes what is opened.

    It gets the same file, options, threads and token ids; a memory cap is for the engine that is measured.
    """
    load = replace(job.load, runtime="llamacpp", draft="off", threads=n_threads_of(job), memory=None, layer_skip=None)
    load = replace(load, small_model=None, entropy=None)
    other = stack.enter_context(open_model(job.model, load, job.output, cancel))
    runners = {LLAMACPP: engine_runner(other, run_options(job), draft=False)}
    if job.temperature:
        return runners, "at a temperature it would draw other tokens"
    lookup = open_lookup(
        resolve(job.model, ResolveOptions(cache_folder(), job.load.offline)),
        requests,
        engine.tokenizer,
        max_tokens=job.max_tokens,
        n_threads=n_threads_of(job),
        n_vocab=engine.card.n_vocab,
    )
    if isinstance(lookup, str):
        return runners, lookup
    stack.callback(lookup.close)
    return runners | {LOOKUP: lookup.run}, None


def as_document(job: BenchJob, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of a benchmark."""
    return {
        "model": job.model,
        "runtime": outcome.runtime,
        "draft": job.load.draft,
        "draft_model": job.load.draft_model,
        "draft_numerics": job.load.draft_numerics,
        "threads": n_threads_of(job),
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "top_p": job.top_p,
        "warm_store": job.warm_store,
        "interrupted": outcome.interrupted,
        **summarize(outcome.trials),
        "against": {} if job.against is None else {job.against: _against(outcome)},
        "curve": {n: 1000 * seconds for n, seconds in outcome.curve.items()},
        "bandwidth_gb_s": median(outcome.bandwidth) if outcome.bandwidth else None,
        "peak_rss_bytes": outcome.peak_bytes,
        "versions": versions(),
    }


def _against(outcome: Outcome) -> dict[str, Any]:
    with_lookup = outcome.lookup_reason is None
    return {
        "tok_s": totals(outcome.trials, LLAMACPP).tok_s,
        "lookup_tok_s": totals(outcome.trials, LOOKUP).tok_s if with_lookup else None,
        "lookup_reason": outcome.lookup_reason,
    }


def _report(job: BenchJob, outcome: Outcome) -> None:
    document = as_document(job, outcome)
    report(document, lines, as_json=job.output.as_json, json_out=job.output.json_out)
    if job.curve_out is not None:
        head = {"model": job.model, "runtime": outcome.runtime, "threads": n_threads_of(job)}
        write_json_file(job.curve_out, head | {"curve": outcome.curve})
