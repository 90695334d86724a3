"""edgedec tune-skip: search for the half-layers that a model can do without, compare the set, and keep it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.draft_constants import GAIN
from edgedec.drafters.suffix.common import common_text
from edgedec.errors import RequestError, counted
from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.load_options import N_DRAFT_MAX, LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.model import LayerSet, Model, Session
from edgedec.progress import CancelToken, OnProgress, Progress, stage
from edgedec.sessions.cost_probe import cost_curve
from edgedec.storage.cache_files import cache_folder
from edgedec.tokenizer import added_around
from edgedec_apps.bench.table import columns
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.output_files import report, require_writable
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line
from edgedec_apps.evaluation.eval_job import TuneJob
from edgedec_apps.evaluation.layer_judge import SKIPPED_ROWS, Judge
from edgedec_apps.evaluation.layer_score import Score
from edgedec_apps.evaluation.layer_search import FoundSet, first_layers, late_layers, n_searched, search
from edgedec_apps.texts import read_text
from edgedec_runtimes.layer_skip.choose import choose_layers, require_layer_skip
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, evenly_spaced, keep_tuned_set, left_out

_SEARCHED, _BLOCK = 64, 256  # tokens of a window to search on, and of a held-out one
_HALVES = ("attn", "mlp")
_HEADINGS = ("set", "bytes read", "left out", "same top-1", "KL mean", "overlap")


Windows = list[NDArray[np.int32]]
"""Stretches of a text: int32[_SEARCHED] each to search on, or int32[_BLOCK] each to compare on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Attributes:
        search: The result of the search.
        seconds: Duration of the search.
        scores: The set that was found, and the sets that it is compared with, by name, with scores on held-out text.
        tuned: The set that is kept.
        gain: The speed of decoding with drafts of the set, as a multiple of plain decoding's, promised by the measured
            cost curve; None for a lossy set.
        options: The options of `edgedec run` that use a lossy set; else empty.
    """

    search: FoundSet
    seconds: float
    scores: dict[str, tuple[LayerSet, Score]]
    tuned: TunedSet
    gain: float | None
    options: str = ""


def run_tune_skip(job: TuneJob) -> None:
    """Search for a set, compare it with others, keep it and report.

    Raises:
        RequestError: An option is out of range, the text is too short, or there is nothing to leave out.
        CapabilityError: The runtime can't leave out layers.
        StorageError: The set can't be kept.
        CancelledError: The search was interrupted; nothing is kept.
    """
    if not 0 < job.seconds < 1e6:
        raise RequestError(f"--seconds is {job.seconds}; it must be above 0")
    if not 0 < job.least < 1:
        raise RequestError(f"--least is {job.least}; it is a share of the bytes, between 0 and 1")
    if job.positions < 1:
        raise RequestError(f"--positions is {job.positions}; it must be at least 1")
    require_writable(job.json_out)
    sizes, outcome = interruptible(lambda cancel: _tune(job, cancel))
    report(_document(job, sizes, outcome), lines, as_json=job.as_json, json_out=job.json_out)


def _tune(job: TuneJob, cancel: CancelToken) -> tuple[LayerBytes, Outcome]:
    """Load the model, search, compare and keep the set; return the sizes of the model's layers and the outcome."""
    root = cache_folder()
    with ExitStack() as stack:
        on_progress = stack.enter_context(ProgressLine(quiet=job.quiet))
        options = LoadOptions(
            n_ctx=2 * _BLOCK,
            max_rows=_SEARCHED,
            n_threads=job.threads,
            cache_dir=root,
            on_progress=on_progress,
            cancel=cancel,
        )
        path = resolve(job.model, ResolveOptions(root, job.offline, on_progress, cancel))
        with stage(on_progress, "load", path.name):
            sizes = layer_bytes(path)
            runtime = choose_runtime(path, job.runtime, options).runtime
            model = stack.enter_context(runtime.load(path, options))
        session = model.session(2 * _BLOCK)
        stack.enter_context(cancel.calling(session.cancel))
        searched, held_out = _cut_text(job, model, n_searched(sizes.total), root)
        with _judging(session, searched, cancel, lossy=job.lossy) as judge:
            chosen, seconds = _search(job, judge, sizes, on_progress)
        with _judging(session, held_out, cancel, lossy=job.lossy) as judge:
            scores = _compare(judge, sizes, chosen.layers, on_progress)
        score = scores["found"][1]
        with stage(on_progress, "measuring", "what a token through the set costs"):
            cost = part_cost(session, chosen.layers)
        tuned = TunedSet(chosen.layers, sizes.share(chosen.layers), cost, score.agreement, score.n_positions)
        gain = None if job.lossy else tuned.promised_gain(cost_curve(session, options), N_DRAFT_MAX)
        keep_tuned_set(root, model.card, tuned, lossy=job.lossy)
        return sizes, Outcome(chosen, seconds, scores, tuned, gain, _options(path, sizes, tuned) if job.lossy else "")


def _options(path: Path, sizes: LayerBytes, tuned: TunedSet) -> str:
    """Return the options of `edgedec run` that use a lossy set, with a round speed-up where the method takes it."""
    speedups = [floor(parts / tuned.share) / parts for parts in (1000, 100, 20)]
    for speedup in speedups:
        if choose_layers(sizes, speedup, tuned).layers is tuned.layers:
            with suppress(RequestError):
                require_layer_skip(path, speedup, force=False)
                return f"--method layer-skip:{speedup:g}"
    return f"--method layer-skip:{speedups[0]:g},force=yes"


@contextmanager
def _judging(session: Session, windows: Windows, cancel: CancelToken, *, lossy: bool) -> Iterator[Judge]:
    """Yield a judge of sets on some windows; a cancel stops it."""
    check = partial(cancel.check, "searching for half-layers")
    with closing(Judge(session, windows, check, as_drafts=not lossy)) as judge, cancel.calling(judge.cancel):
        yield judge


def _search(job: TuneJob, judge: Judge, sizes: LayerBytes, on_progress: OnProgress) -> tuple[FoundSet, float]:
    """Return what the search found, and its seconds (RequestError where no half-layer can be left out)."""
    started = monotonic()
    phase = f"searching, at most {job.seconds:.0f} s:"
    on_progress(Progress(phase, 0, None, "sets"))
    chosen = search(
        judge,
        sizes,
        least_saved=job.least,
        is_over=lambda: monotonic() - started > job.seconds,
        on_scored=lambda n: on_progress(Progress(phase, n, None, "sets")),
    )
    seconds = monotonic() - started
    if not left_out(chosen.layers):
        raise RequestError(
            f"nothing to leave out was found in {seconds:.0f} s in {counted(sizes.n_layer, 'layer')}; "
            "allow more --seconds, or take a deeper model"
        )
    return chosen, seconds


def _compare(
    judge: Judge, sizes: LayerBytes, chosen: LayerSet, on_progress: OnProgress
) -> dict[str, tuple[LayerSet, Score]]:
    """Return the set that was found and others of as many bytes, by name, with their scores on held-out text."""
    scores: dict[str, tuple[LayerSet, Score]] = {}
    compared = {"found": chosen, **rivals(sizes, sizes.share(chosen))}
    for n, (name, layers) in enumerate(compared.items()):
        on_progress(Progress("comparing", n, len(compared), "sets"))
        scores[name] = (layers, judge.score(layers))
    on_progress(Progress("comparing", len(compared), len(compared), "sets"))
    return scores


def rivals(sizes: LayerBytes, share: float) -> dict[str, LayerSet]:
    """Return other sets, of whole layers, that read about a share of a token's bytes, by name."""
    n = sizes.n_layer

    def nearest(sets: Sequence[LayerSet]) -> LayerSet:
        return min(sets, key=lambda layers: abs(sizes.share(layers) - share))

    return {
        "evenly spaced": nearest([evenly_spaced(n, n_out) for n_out in range(n - 1)]),
        "late": nearest([late_layers(n, n_out) for n_out in range(n - 1)]),
        "early exit": nearest([first_layers(n, n_run) for n_run in range(1, n + 1)]),
    }


def _cut_text(job: TuneJob, model: Model, n_tokens: int, root: Path) -> tuple[Windows, Windows]:
    """Return windows of a text, in an order drawn by the seed: `n_tokens` to search on, the next held out."""
    leading = added_around(model.tokenizer)[0]
    if job.text is None:
        ids = list(common_text(model.tokenizer, root, model.card.fingerprint).token_ids)
    else:
        ids = model.tokenizer.encode(read_text(job.text), add_special=False)
    n_own = _BLOCK - len(leading)
    blocks = [[*leading, *ids[start : start + n_own]] for start in range(0, len(ids) - n_own + 1, n_own)]
    if len(blocks) < 2:
        name = job.text or "the default text, which this model's tokenizer may not fit,"
        raise RequestError(
            f"{name} has {counted(len(ids), 'token')}; a search takes at least {2 * n_own}; give a longer --text"
        )
    n_windows = min(max(1, n_tokens // _SEARCHED), len(blocks) // 2)
    n_held_out = -(-job.positions // (_BLOCK - SKIPPED_ROWS))
    order = np.random.default_rng(job.seed).permutation(len(blocks)).tolist()
    searched = [np.array(blocks[place][:_SEARCHED], np.int32) for place in order[:n_windows]]
    return searched, [np.array(blocks[place], np.int32) for place in order[n_windows:][:n_held_out]]


def _document(job: TuneJob, sizes: LayerBytes, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of a search."""
    chosen, tuned = outcome.search, outcome.tuned
    return {
        "model": job.model,
        "runtime": job.runtime,
        "seed": job.seed,
        "lossy": job.lossy,
        "n_layer": sizes.n_layer,
        "left_out": {
            name: [layer for layer, half in left_out(tuned.layers) if half == i] for i, name in enumerate(_HALVES)
        },
        "share": tuned.share,
        "cost": tuned.cost,
        "promised_speedup": outcome.gain,
        "auto": outcome.gain is not None and outcome.gain >= GAIN,
        "options": outcome.options,
        "search": {
            "n_scored": chosen.n_scored,
            "seconds": outcome.seconds,
            "ended_by_limit": chosen.ended,
            "agreement": chosen.score.agreement,
            "n_positions": chosen.score.n_positions,
        },
        "sets": {
            name: {
                "share": sizes.share(layers),
                "n_attn_out": sum(half == 0 for _, half in left_out(layers)),
                "n_mlp_out": sum(half == 1 for _, half in left_out(layers)),
                "top1": score.agreement,
                "kl_mean": score.kl,
                "overlap": score.overlap,
                "n_positions": score.n_positions,
            }
            for name, (layers, score) in outcome.scores.items()
        },
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Return the report for a person: a table of sets, what the set leaves out, and whether it pays on this machine."""
    run, n_layer = document["search"], document["n_layer"]
    n_positions = document["sets"]["found"]["n_positions"]
    rows = [
        (
            name,
            f"{100 * row['share']:.1f} %",
            f"{row['n_attn_out']} attn, {row['n_mlp_out']} mlp of {n_layer}",
            f"{100 * row['top1']:.1f} %",
            f"{row['kl_mean']:.3g}",
            f"{row['overlap']:.3f}",
        )
        for name, row in document["sets"].items()
    ]
    attention, feed_forward = (", ".join(map(str, document["left_out"][half])) or "no layer" for half in _HALVES)
    notes = [
        f"left out: attention of {attention}; feed-forward of {feed_forward}",
        f"a token through the set takes {document['cost']:.2f} of the time of a whole one; {_use(document)}",
    ]
    if run["ended_by_limit"]:
        notes.append("--seconds ended the search: another run may find another set; allow more for the same set again")
    head = (
        f"{document['model']} · {counted(run['n_scored'], 'set')} scored "
        f"on {counted(run['n_positions'], 'position')} in {run['seconds']:.0f} s · "
        f"compared on {counted(n_positions, 'other')}"
    )
    return [one_line(line) for line in [head, "", *columns([_HEADINGS, *rows]), "", *notes]]


def _use(document: dict[str, Any]) -> str:
    """Return how the set is used, or what speed its drafts promise."""
    if document["lossy"]:
        best = min(document["sets"], key=lambda name: document["sets"][name]["kl_mean"])
        nearest = "" if best == "found" else f", but {best} layers are nearer to the whole model"
        return f"{document['options']} uses it{nearest}"
    verdict = "auto drafts with it" if document["auto"] else "too little for auto; --draft skip uses it anyway"
    return f"drafts with it promise {document['promised_speedup']:.2f} times plain decoding's speed: {verdict}"


_N_PAST = 32
_TURNS = 9  # measurements of each of two forwards that are compared


def part_cost(session: Session, layers: LayerSet) -> float:
    """Return the time of one token through some half-layers, in times of a token through all layers.

    Both times are the least of several forwards, which take turns. What the session holds is lost.

    Raises:
        CapabilityError: The runtime can't leave out layers.
    """
    n_past = min(_N_PAST, session.n_ctx - 1)
    tokens = np.arange(n_past + 1, dtype=np.int32) % session.model.card.n_vocab
    if n_past:
        session.forward(tokens[:-1], n_past=0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for into, subset in zip(seconds, (None, layers), strict=True):
            started = perf_counter()
            session.forward(tokens[-1:], n_past=n_past, layers=subset)
            into.append(perf_counter() - started)
    return min(seconds[1]) / max(min(seconds[0]), 1e-9)
