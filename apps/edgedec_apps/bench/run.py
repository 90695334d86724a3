"""edgedec bench: measure how fast a model decodes with drafts and without, on prompts of several kinds.

Prompt lookup is Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), in the binding as
LlamaPromptLookupDecoding with its defaults: n-grams of up to 2 tokens, drafts of up to 10.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from edgedec.api.engine import Engine
from edgedec.errors import CancelledError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.gguf.model_info import describe
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.system import forget_peak, peak_held_bytes
from edgedec.model import LayerSet, writes_texts
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sampling import SamplingParams
from edgedec.storage.cache_files import cache_folder
from edgedec.tokenizer import Tokenizer
from edgedec_apps.bench.job import BenchJob
from edgedec_apps.bench.measure import Run, Runner, RunOptions, Trial, engine_runner, engine_runners, measure, warm_up
from edgedec_apps.bench.plot import write_plot
from edgedec_apps.bench.prompts import (
    DEFAULT_PROMPTS,
    BenchPrompt,
    BenchRequest,
    grouped,
    one_of_each,
    prepare,
    read_prompts,
)
from edgedec_apps.bench.provenance import versions
from edgedec_apps.bench.recorder import Recorder, record_text
from edgedec_apps.bench.summary import summarize, totals
from edgedec_apps.bench.table import lines, table
from edgedec_apps.cli.draft_options import drafting_of, require_no_rule
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.opening import keep_learned, open_model
from edgedec_apps.cli.output_files import report, require_writable, write_file, write_json_file
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.machine_speed import memory_bandwidth
from edgedec_apps.plots import require_picture
from edgedec_runtimes.llamacpp.library import chosen, llama
from edgedec_runtimes.llamacpp.trial import repack_complaint
from edgedec_runtimes.shared.cpu_count import usable_cores

CPU = "cpu"
_OTHERS = ("llamacpp", CPU)
_FIRST_TABLE_S = 60.0  # after the command began to load the model


@dataclass(slots=True)
class Outcome:
    """What a benchmark measured so far; an interrupted one has less.

    Attributes:
        runtime: Name of the runtime.
        trials: The trials that are complete.
        interrupted: Whether the benchmark was cancelled before the last trial.
        curve: Seconds of a forward by its number of tokens.
        peak_bytes: The most memory that the process held, before llama.cpp was loaded beside it; None if unknown.
        lookup_reason: Why llama.cpp's prompt lookup was not measured; None where it was.
    """

    runtime: str = ""
    trials: list[Trial] = field(default_factory=list)
    interrupted: bool = True
    curve: dict[int, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    lookup_reason: str | None = None


def run_bench(job: BenchJob) -> None:
    """Measure, and report; a benchmark that ends early, for whatever reason, reports the trials that are complete.

    Raises:
        RequestError: An option is out of range, or the file of prompts is damaged.
        CancelledError: The benchmark was interrupted.
        RuntimeUnavailableError: What --against or --plot needs is not installed.
        EdgedecError: As edgedec.load.
    """
    options = RunOptions(job.max_tokens, job.temperature, job.top_p, job.warm_store)
    _check(job, options)
    prompts = read_prompts(job.prompts or DEFAULT_PROMPTS, job.per_task)
    outcome = Outcome()
    try:
        interruptible(lambda cancel: _measure(job, options, prompts, outcome, cancel))
    finally:
        if outcome.trials:
            _report(job, outcome)
    if outcome.interrupted:
        raise CancelledError("interrupted" if outcome.trials else "interrupted before a prompt was measured")


def _check(job: BenchJob, options: RunOptions) -> None:
    """Raise an error where an option is out of range or a file could not be written, before anything is loaded."""
    SamplingParams(**options.sampling(0))
    if job.max_tokens < 2:
        raise RequestError(f"--max-tokens is {job.max_tokens}; a speed needs at least 2")
    if job.per_task is not None and job.per_task < 1:
        raise RequestError(f"--per-task is {job.per_task}; it must be at least 1")
    if job.against is not None and job.against not in _OTHERS:
        raise RequestError(f"--against is {one_line(job.against)!r}; it must be {' or '.join(_OTHERS)}")
    if job.load.prompt_cache is not None:
        raise RequestError("every run of a benchmark starts without a prompt cache; leave --prompt-cache out")
    drafting = drafting_of(job.load.draft_option)
    require_no_rule(drafting)
    if drafting.store is not None:
        raise RequestError("a benchmark starts without earlier texts; leave --draft-option store out")
    require_picture(job.plot)
    if job.against == "llamacpp":
        chosen()
    require_writable(job.output.json_out, job.rows, job.curve_out)


def _measure(
    job: BenchJob, options: RunOptions, prompts: list[BenchPrompt], outcome: Outcome, cancel: CancelToken
) -> None:
    """Load the model, and llama.cpp where it is to be compared, run every prompt, and record drafts for --rows."""
    line, shown_s = ProgressLine(f"measuring {job.model}", quiet=job.output.quiet), monotonic()
    forget_peak()

    def keep(trials: list[Trial]) -> None:
        nonlocal shown_s
        outcome.trials = trials
        if not job.output.quiet and monotonic() - shown_s >= _FIRST_TABLE_S:
            shown_s = inf
            line.stop()
            for each in table(summarize(trials)):
                say(each)

    with line as on_progress, ExitStack() as stack:
        engine = stack.enter_context(open_model(job.model, job.load, job.output, cancel))
        if not writes_texts(engine.model):
            raise RequestError(f"{job.model!r} embeds or ranks texts, and bench measures how fast a model writes them")
        requests = one_of_each(prepare(engine, prompts, job.max_tokens))
        outcome.runtime = engine.card.runtime
        runners = engine_runners(engine, options)
        if not warm_up(requests, runners, cancel, on_progress=on_progress):
            return
        if job.against is not None:
            outcome.peak_bytes = peak_held_bytes(engine.processes)
            others, outcome.lookup_reason = _open_others(job, options, engine, requests, stack, cancel)
            if not warm_up(requests, others, cancel, on_progress=on_progress):
                return
            runners |= others
        measure(requests, runners, cancel, on_progress=on_progress, on_trial=keep)
        outcome.interrupted = cancel.cancelled
        outcome.curve = engine.pool.slots[0].curve.table()
        if job.rows is not None and not outcome.interrupted:
            resolving = ResolveOptions(cache_folder(), job.load.offline)
            path = resolve(job.model, resolving)
            name = drafting_of(job.load.draft_option).model
            drafts = None if name is None else resolve(name, resolving, "draft_model")
            rows = record(engine, requests, options, path, on_progress=on_progress)
            written = (json.dumps(row) + "\n" for row in chain([head_of(job.model, path, drafts)], rows))
            write_file(job.rows, "".join(written).encode("ascii"))
        if job.against is None:
            outcome.peak_bytes = peak_held_bytes(engine.processes)
        keep_learned(job.model, engine)


def _open_others(
    job: BenchJob,
    options: RunOptions,
    engine: Engine,
    requests: list[BenchRequest],
    stack: ExitStack,
    cancel: CancelToken,
) -> tuple[dict[str, Runner], str | None]:
    """Return the runners to compare with, and why llama.cpp's prompt lookup is not one of them; `stack` closes all.

    They get the same file, options, number of threads and token ids, but no memory cap; llama.cpp writes plainly. The
    cpu runtime drafts, as what a GPU has to beat.
    """
    n_threads = job.load.threads or usable_cores()
    if job.against == CPU:
        load = replace(job.load, runtime=CPU, memory=None, device=None, gpu_layers=None)
        other = stack.enter_context(open_model(job.model, load, job.output, cancel))
        return {CPU: engine_runner(other, options, draft=True)}, None
    load = replace(job.load, runtime="llamacpp", draft="off", threads=n_threads, memory=None, method=None)
    other = stack.enter_context(open_model(job.model, load, job.output, cancel))
    runners = {LLAMACPP: engine_runner(other, options, draft=False)}
    if job.temperature:
        return runners, "at a temperature it would draw other tokens"
    lookup = open_lookup(
        resolve(job.model, ResolveOptions(cache_folder(), job.load.offline)),
        requests,
        engine.tokenizer,
        max_tokens=job.max_tokens,
        n_threads=n_threads,
        n_vocab=engine.card.n_vocab,
    )
    if isinstance(lookup, str):
        return runners, lookup
    run, close = lookup
    stack.callback(close)
    return runners | {LOOKUP: run}, None


def _document(job: BenchJob, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of a benchmark."""
    drafting = drafting_of(job.load.draft_option)
    bandwidth = memory_bandwidth(measure=job.load.memory is None)  # which takes memory
    return {
        "model": job.model,
        "runtime": outcome.runtime,
        "draft": job.load.draft,
        "draft_model": drafting.model,
        "draft_numerics": drafting.numerics,
        "threads": job.load.threads or usable_cores(),
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "top_p": job.top_p,
        "warm_store": job.warm_store,
        "interrupted": outcome.interrupted,
        **summarize(outcome.trials),
        "against": {} if job.against is None else {job.against: _against(outcome)},
        "curve": {n: 1000 * seconds for n, seconds in outcome.curve.items()},
        "bandwidth_gb_s": None if bandwidth is None else bandwidth / 1e9,
        "peak_rss_bytes": outcome.peak_bytes,
        "versions": versions(),
    }


def _against(outcome: Outcome) -> dict[str, Any]:
    measured = outcome.trials[0].runs.keys()

    def speeds(trials: list[Trial]) -> dict[str, float | None]:
        lookup = totals(trials, LOOKUP).tok_s if LOOKUP in measured else None
        return {"tok_s": totals(trials, CPU if CPU in measured else LLAMACPP).tok_s, "lookup_tok_s": lookup}

    tasks = grouped(outcome.trials, lambda trial: trial.request.task)
    by_task = {task: speeds(trials) for task, trials in tasks.items()}
    return speeds(outcome.trials) | {"tasks": by_task, "lookup_reason": outcome.lookup_reason}


def _report(job: BenchJob, outcome: Outcome) -> None:
    document = _document(job, outcome)
    report(document, lines, as_json=job.output.as_json, json_out=job.output.json_out)
    if job.curve_out is not None:
        head = {key: document[key] for key in ("model", "runtime", "threads")}
        write_json_file(job.curve_out, head | {"curve": outcome.curve})
    if job.plot is not None:
        write_plot(job.plot, document)


_KIND = "edgedec drafts 1"


def head_of(model: str, path: Path, draft_model: Path | None = None) -> dict[str, Any]:
    """Return the first line of a file of recorded drafts, for the files of the model and the draft model."""
    drafts = None if draft_model is None else _size(draft_model)
    return {"kind": _KIND, "model": model, **_size(path), "draft_model": drafts}


def _size(path: Path) -> dict[str, int]:
    """Return the bytes of the weights that a forward reads, and the number of parameters that it computes with."""
    model = describe(read_gguf(path))
    return {"n_bytes": model.n_bytes, "n_params": model.n_params}


def record(
    engine: Engine,
    requests: Sequence[BenchRequest],
    options: RunOptions,
    path: Path,
    *,
    on_progress: OnProgress | None = None,
) -> Iterator[dict[str, Any]]:
    """Decode every prompt without drafts, and yield what the drafters propose after each token.

    Before each prompt the KV cache and the drafters' stores are emptied. `path` is the model's file, for the bytes of
    its layers.
    """
    share = _shares(path)
    for i, request in enumerate(requests):
        report_progress(on_progress, "recording drafts", i, len(requests), "prompts")
        other = int(request.token_ids[0] == 0)  # a text with another first token empties the KV cache
        engine.generate([other], max_tokens=1, temperature=0.0, draft=False)
        engine.forget()
        recorder = Recorder(share)
        recorded = record_text(engine, request.token_ids, recorder, **options.sampling(request.seed))
        yield {
            "id": request.id,
            "task": request.task,
            "n_prompt_tokens": len(request.token_ids),
            "tokens": list(recorded.token_ids),
            "proposals": [row.as_dict() for row in recorder.rows],
        }
    report_progress(on_progress, "recording drafts", len(requests), len(requests), "prompts")


def _shares(path: Path) -> Callable[[LayerSet], float]:
    """Return a function for the share of a token's bytes that a set reads; its first call reads the file."""
    sizes = cache(partial(layer_bytes, path))
    return lambda layers: sizes().share(layers)


LLAMACPP, LOOKUP = "llama.cpp", "llama.cpp, prompt lookup"
_CONTEXT_STEP = 256
_MOST_ROW_BYTES = 2 << 30


def open_lookup(
    path: Path, requests: Sequence[BenchRequest], tokenizer: Tokenizer, *, max_tokens: int, n_threads: int, n_vocab: int
) -> tuple[Runner, Callable[[], None]] | str:
    """Open a GGUF for greedy decoding with the binding's prompt lookup; return its runner and what closes it.

    Where that fails, the reason is returned as a text. The context has the length of the longest request, as the
    binding keeps a row of logits, f32[n_vocab], for each of its tokens.
    """
    longest = max(len(request.token_ids) for request in requests)
    n_ctx = -(-(longest + max_tokens + 16) // _CONTEXT_STEP) * _CONTEXT_STEP
    n_bytes = n_ctx * n_vocab * 4
    if n_bytes > _MOST_ROW_BYTES:
        return f"llama-cpp-python would keep {n_bytes / 1e6:.0f} MB of logits for {n_ctx} tokens of context"
    if (crash := repack_complaint()) is not None:
        return f"llama-cpp-python always rearranges weights, whose kernels can't be used here: {crash}"
    try:
        llama()  # checks the library's version, and redirects its log
        if chosen().package != "llama_cpp":
            return f"llama-cpp-python's prompt lookup does not run on the library of {chosen()}"
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        model = Llama(
            str(path),
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            draft_model=LlamaPromptLookupDecoding(),
            verbose=False,
        )
    except Exception as error:  # an optional library may raise any error
        return f"llama-cpp-python's prompt lookup does not open the model ({type(error).__name__}: {error})"
    return _lookup_runner(model, tokenizer, max_tokens), model.close


def _lookup_runner(model: Any, tokenizer: Tokenizer, max_tokens: int) -> Runner:
    def run(request: BenchRequest, cancel: CancelToken) -> Run | None:
        model.reset()  # so that no prefix of the run before is reused
        token_ids: list[int] = []
        first_token_s = 0.0
        started = perf_counter()
        stream = model.generate(list(request.token_ids), temp=0.0)
        for token_id in stream:
            first_token_s = first_token_s or perf_counter() - started
            if cancel.cancelled:
                return None
            if tokenizer.is_end(token_id):
                break
            token_ids.append(int(token_id))
            if len(token_ids) == max_tokens:
                break
        total_s = perf_counter() - started
        stream.close()
        return Run(tuple(token_ids), first_token_s, total_s)

    return run
