"""edgedec eval: evaluate a model's settings on a text, and report what each costs in quality and brings in speed."""

import hashlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgedec.errors import CancelledError, RequestError, counted
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.progress import CancelToken, stage
from edgedec.storage.cache_files import cache_folder
from edgedec.tokenizer import added_around
from edgedec_apps.bench.provenance import versions
from edgedec_apps.bench.table import columns, shown
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.output_files import report, require_writable
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line
from edgedec_apps.evaluation.eval_job import EvalJob
from edgedec_apps.evaluation.evaluate import (
    DEFAULT_TEXT,
    N_ROWS,
    Figures,
    Lane,
    Reading,
    cut_windows,
    evaluate,
)
from edgedec_apps.evaluation.plot import points, text_plot, write_plot
from edgedec_apps.evaluation.settings import (
    DEFAULT_KV_TYPE,
    RunSetting,
    combine,
    layers_text,
    open_lanes,
    parse_layers,
    setting_name,
)
from edgedec_apps.plots import require_picture
from edgedec_apps.texts import read_text
from edgedec_runtimes.layer_skip.choose import require_speedup
from edgedec_runtimes.layer_skip.layer_sets import left_out
from edgedec_runtimes.shared.cpu_count import usable_cores

SAME = "same"
_HEADINGS = ("setting", "bytes", "ppl", "KL mean", "KL p99", "same top-1", "tok/s")
_MOST_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an evaluation found.

    Attributes:
        settings: The baseline, then the settings that the options name.
        lanes: The lane of each setting.
        first: The place in `settings` of the first setting that the options name.
        n_tokens: Tokens of the text.
        n_windows: Windows of the text; an interrupted evaluation has not finished all of them.
        reading: The figures, over the windows that were finished.
    """

    settings: tuple[RunSetting, ...]
    lanes: tuple[Lane, ...]
    first: int
    n_tokens: int
    n_windows: int
    reading: Reading


def run_eval(job: EvalJob) -> None:
    """Evaluate, and report; an interrupted evaluation reports the windows that were finished.

    Raises:
        RequestError: An option is out of range, the text is too short or not UTF-8, or the vocabularies differ.
        RuntimeUnavailableError: A picture is to be drawn, and matplotlib is not installed.
        StorageError: The text can't be read, or a file can't be written.
        CancelledError: The evaluation was interrupted.
    """
    _check(job)
    text = read_text(job.text or DEFAULT_TEXT)
    outcome = interruptible(lambda cancel: _evaluate(job, text, cancel))
    if outcome.reading.n_windows:
        _report(job, text, outcome)
    if outcome.reading.n_windows < outcome.n_windows:
        finished = "interrupted" if outcome.reading.n_windows else "interrupted before a window was finished"
        raise CancelledError(finished)


def _check(job: EvalJob) -> None:
    """Raise an error where an option is out of range or a file could not be written, before anything is loaded."""
    if not 2 <= job.window <= _MOST_WINDOW:
        raise RequestError(f"--window is {job.window}; it must be from 2 to {_MOST_WINDOW}")
    if job.max_tokens is not None and job.max_tokens < 2:
        raise RequestError(f"--max-tokens is {job.max_tokens}; a prediction takes at least 2")
    for speedup in job.layer_skip or ():
        require_speedup(speedup)
    for text in job.layers or ():
        parse_layers(text)
    if job.plot_text and job.as_json:
        raise RequestError("--plot-text and --json both print; leave one out, or use --plot FILE.svg")
    require_picture(job.plot)
    require_writable(job.json_out)


def _evaluate(job: EvalJob, text: str, cancel: CancelToken) -> Outcome:
    root = cache_folder()
    with ExitStack() as stack:
        on_progress = stack.enter_context(ProgressLine(f"measuring {job.model}", quiet=job.quiet))
        options = LoadOptions(
            max_rows=N_ROWS,
            n_threads=job.threads,
            cache_dir=root,
            on_progress=on_progress,
            cancel=cancel,
        )
        with stage(on_progress, "choosing a runtime"):
            settings, first = _settings(job, options, ResolveOptions(root, job.offline, on_progress, cancel))
        with stage(on_progress, "load", settings[0].path.name):
            lanes, model = open_lanes(settings, options, job.window, stack)
        token_ids = model.tokenizer.encode(text, add_special=False)[: job.max_tokens]
        windows = cut_windows(token_ids, added_around(model.tokenizer)[0], job.window)
        reading = evaluate(lanes, windows, cancel, on_progress=on_progress)
        return Outcome(tuple(settings), tuple(lanes), first, len(token_ids), len(windows), reading)


def _settings(job: EvalJob, options: LoadOptions, resolving: ResolveOptions) -> tuple[list[RunSetting], int]:
    """Return the baseline and the settings that the options name, and the place of the first of the latter."""
    path = resolve(job.model, resolving)
    kv_types, layers = job.kv_type or [DEFAULT_KV_TYPE], [parse_layers(text) for text in job.layers or ()]
    choosing = replace(options, kv_type=kv_types[0])
    skips_layers = any(layers) or bool(job.layer_skip)
    if skips_layers:  # the cpu runtime, the first in the order, can skip layers; a faster runtime may not
        choosing = replace(choosing, cache_dir=None)
    choice = choose_runtime(path, job.runtime, choosing, measure=not skips_layers)
    here = RunSetting(job.model, path, choice.runtime.name)
    other = here if job.against == SAME else replace(here, model=job.against, path=resolve(job.against, resolving))
    runs_other = other.path == path or choice.runtime.accepts(other.path) is None
    runtime = job.against_runtime or (here.runtime if runs_other else "auto")
    chosen = choose_runtime(other.path, runtime, replace(options, kv_type=DEFAULT_KV_TYPE))
    baseline = replace(other, runtime=chosen.runtime.name)
    combined = combine(here, kv_types, layers or ([] if job.layer_skip else [None]), job.layer_skip or ())
    settings = list(dict.fromkeys([baseline, *combined]))
    return settings, settings.index(combined[0])


def _document(job: EvalJob, text: str, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of an evaluation; its top level has the figures of the first setting that options name."""
    rows = [_figures(job, *row) for row in zip(outcome.settings, outcome.lanes, outcome.reading.figures, strict=True)]
    return {
        **rows[outcome.first],
        "baseline": rows[0],
        "rows": rows,
        "text": None if job.text is None else str(job.text),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "n_tokens": outcome.n_tokens,
        "n_windows": outcome.reading.n_windows,
        "interrupted": outcome.reading.n_windows < outcome.n_windows,
        "versions": versions(),
    }


def _figures(job: EvalJob, setting: RunSetting, lane: Lane, figures: Figures) -> dict[str, Any]:
    settings = {
        "model": setting.model,
        "runtime": setting.runtime,
        "kv_type": setting.kv_type,
        "layers": layers_text(setting.layers),
        "layer_skip": setting.layer_skip,
        "window": job.window,
        "threads": job.threads or usable_cores(),
    }
    halves = [] if lane.layers is None else [list(half) for half in left_out(lane.layers)]
    return {**asdict(figures), "share": lane.share, "left_out": halves, "settings": settings}


def _report(job: EvalJob, text: str, outcome: Outcome) -> None:
    document = _document(job, text, outcome)
    drawn = points(document["rows"])

    def all_lines(document: dict[str, Any]) -> list[str]:
        return _lines(document) + (["", *text_plot(drawn)] if job.plot_text else [])

    report(document, all_lines, as_json=job.as_json, json_out=job.json_out)
    if job.plot is not None:
        write_plot(job.plot, drawn, _heading(document))


def _lines(document: dict[str, Any]) -> list[str]:
    """Return the report for a person: a heading, a table of the settings, and what its columns mean."""
    settings, baseline = document["settings"], document["baseline"]["settings"]
    rows = [_row(row, baseline=index == 0) for index, row in enumerate(document["rows"])]
    notes = ["KL: divergence from the baseline, in nats; tok/s: tokens decoded one at a time at the windows' ends"]
    if any(row["settings"]["layer_skip"] is not None for row in document["rows"]):
        notes.append("skip X: LOSSY, layers are left out until a token reads 1/X of the bytes")
    if any(baseline[key] != settings[key] for key in ("model", "runtime")):
        notes.append(f"the baseline is {baseline['model']} on {baseline['runtime']}")
    return [one_line(line) for line in [_heading(document), "", *columns([_HEADINGS, *rows]), "", *notes]]


def _heading(document: dict[str, Any]) -> str:
    settings, n_windows = document["settings"], document["n_windows"]
    parts = [
        str(settings["model"]),
        str(settings["runtime"]),
        str(document["text"] or "the default text"),
        f"{counted(document['rows'][0]['n_positions'], 'prediction')} in {counted(n_windows, 'window')} "
        f"of at most {settings['window']} tokens",
        counted(settings["threads"], "thread"),
    ]
    return " · ".join([*parts, *(["INTERRUPTED"] if document["interrupted"] else [])])


def _row(row: dict[str, Any], *, baseline: bool) -> tuple[str, ...]:
    settings = row["settings"]
    name = setting_name(settings["kv_type"], settings["layers"], settings["layer_skip"])
    return (
        f"{name} (baseline)" if baseline else name,
        f"{100 * row['share']:.1f} %",
        shown(row["ppl"], ".3f"),
        shown(row["kl_mean"], ".3g"),
        shown(row["kl_p99"], ".3g"),
        f"{100 * row['top1']:.2f} %",
        shown(row["tok_s"], ".1f"),
    )
