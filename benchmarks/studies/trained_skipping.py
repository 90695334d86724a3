"""Simulate LoRA-Drop's schedule: layers that run at some positions only, without and with fitted corrections.

    python benchmarks/studies/trained_skipping.py smollm2-135m

In LoRA-Drop (Rajabzadeh et al. 2026, arXiv:2601.02569) droppable layers run at every c-th position. In between, such a
layer returns something of the last position where it ran, and a low-rank map of its input corrects that. The paper
trains the maps with the whole model; here each is fitted by least squares, layer after layer, towards the full model's
states. Keys and values of droppable layers are made at every position, which is better for what later positions see;
the paper leaves them out to save memory.

First single layers: how much of what a layer adds each stand-in leaves unexplained, on text that nothing was fitted
on. Then schedules, against the full model. All of it is teacher-forced on the cpu runtime, so a second run gives the
same figures. Ends with one line of JSON.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.drafters.suffix.common import common_text
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import LayerSet, Model, Session
from edgedec.tokenizer import added_around
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.evaluation.evaluate import (
    DEFAULT_TEXT,
    Distribution,
    cut_windows,
    divergence,
    read_row,
)
from edgedec_models.folders import cache_folder
from edgedec_runtimes.cpu.runtime import Cpu

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Reuse = Literal["nothing", "state", "update"]
REUSES: tuple[Reuse, ...] = ("nothing", "state", "update")

RIDGE = 0.1
"""Of a fit, times the mean square of a feature and the number of rows."""
_NO_ROWS: I32 = np.empty(0, np.int32)
_ROWS = 64  # of logits at a time
_OF_FOUR = {75: (1, 2, 3), 50: (1, 3), 25: (2,)}  # which of each four layers may be dropped, by per cent


@dataclass(frozen=True, slots=True)
class Schedule:
    """When droppable layers run, and what they return when they don't.

    Attributes:
        droppable: Layers, without the first.
        cycle: They run at positions that are multiples of this.
        n_prompt: And at so many leading positions.
        reuse: What stands in for one: its input ("nothing"), its output at the last position where it ran ("state", as
            in LoRA-Drop's code), or its input and what it added to its input there ("update").
    """

    droppable: tuple[int, ...]
    cycle: int
    n_prompt: int
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class LowRank:
    """A map of low rank: f64[n_in, rank] down, f64[rank, n_out] up."""

    down: F64
    up: F64


@dataclass(slots=True)
class Tally:
    """What was found at each position.

    Attributes:
        kl: KL(full model || this), in nats.
        same: Whether both take the same token for the most probable one.
        dropped: Whether droppable layers did not run there.
    """

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the mean KL, and the share of the same most probable token: over all positions, over those dropped."""
        same = np.array(self.same)
        return {
            "kl": float(np.mean(self.kl)),
            "top1": float(same.mean()),
            "top1_dropped": float(same[np.array(self.dropped)].mean()),
        }


def last_run(n: int, schedule: Schedule) -> NDArray[np.intp]:
    """Return for each of n positions the last one, itself included, where the droppable layers run.

    >>> last_run(8, Schedule((1,), 3, 2, "update")).tolist()
    [0, 1, 1, 3, 3, 3, 6, 6]
    """
    positions = np.arange(n)
    runs = (positions < schedule.n_prompt) | (positions % schedule.cycle == 0)
    return np.maximum.accumulate(np.where(runs, positions, 0))


def features(x: F32) -> F64:
    """Return what a correction is a map of: f32[n, n_embd] states over their root mean square, and a 1 beside them."""
    wide = x.astype(np.float64)
    size = np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + 1e-12)
    return np.concatenate([wide / size, np.ones((len(x), 1))], axis=1)


def fit_low_rank(x: F64, y: F64, rank: int, ridge: float = 0.0) -> LowRank:
    """Fit the map of at most that rank from f64[n, n_in] to f64[n, n_out] with the least squared error.

    Reduced-rank regression (Izenman 1975), ridged (Mukherjee and Zhu 2011): the least-squares map, projected on the
    directions in which what it predicts varies most.

    Args:
        ridge: Times the mean square of a feature and n, added to the diagonal.

    Raises:
        numpy.linalg.LinAlgError: The features are dependent, and there is no ridge.
    """
    gram = x.T @ x
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    whole = np.linalg.solve(gram, x.T @ y)
    _, directions = np.linalg.eigh(whole.T @ gram @ whole)
    up = directions[:, ::-1][:, :rank].T
    return LowRank(whole @ up.T, up)


def through_first(session: Session, tokens: I32) -> F32:
    """Return f32[n, n_embd], the states after layer 0 of a text int32[n]."""
    layers = LayerSet.of(session.model.card.n_layer, [0])
    return session.forward(tokens, n_past=0, layers=layers, rows=_NO_ROWS, taps=(0,)).hidden[0].copy()


def through(session: Session, layer: int, x: F32) -> F32:
    """Return f32[n, n_embd], the states after one layer, from those before it at all positions of a text."""
    layers = LayerSet.of(session.model.card.n_layer, [layer])
    forward = session.forward(hidden=x, n_past=0, resume_after=layer - 1, layers=layers, rows=_NO_ROWS, taps=(layer,))
    return forward.hidden[layer].copy()


def all_states(session: Session, tokens: I32) -> F32:
    """Return f32[n_layer, n, n_embd], the full model's states after each layer."""
    taps = tuple(range(session.model.card.n_layer))
    forward = session.forward(tokens, n_past=0, rows=_NO_ROWS, taps=taps)
    return np.stack([forward.hidden[layer] for layer in taps])


def stand_in(x: F32, ran: F32, last: NDArray[np.intp], reuse: Reuse) -> F32:
    """Return what stands in for a layer, from f32[n, n_embd] states before it and, where it ran, after it."""
    if reuse == "nothing":
        return x
    if reuse == "state":
        return ran[last]
    update: F32 = x + (ran[last] - x[last])
    return update


def dropped_states(schedule: Schedule, x: F32, ran: F32, correction: LowRank | None) -> F32:
    """Return f32[n, n_embd], the states after a droppable layer (arguments as stand_in())."""
    last = last_run(len(x), schedule)
    out = stand_in(x, ran, last, schedule.reuse)
    if correction is not None:
        out = out + (features(x) @ correction.down @ correction.up).astype(np.float32)
    return np.where((last == np.arange(len(x)))[:, None], ran, out)


def scheduled_states(session: Session, tokens: I32, schedule: Schedule, corrections: Mapping[int, LowRank]) -> F32:
    """Return f32[n, n_embd], the states after the last layer under a schedule, corrected where there is a map."""
    x = through_first(session, tokens)
    for layer in range(1, session.model.card.n_layer):
        ran = through(session, layer, x)
        x = dropped_states(schedule, x, ran, corrections.get(layer)) if layer in schedule.droppable else ran
    return x


def missing(schedule: Schedule, x: F32, ran: F32, truth: F32) -> tuple[F64, F64]:
    """Return features f64[k, n_embd + 1] and f64[k, n_embd], what a layer's stand-in lacks, where the layer is dropped.

    Args:
        x: f32[n, n_embd], states before the layer.
        ran: After it, where it runs.
        truth: What should come out of it.
    """
    last = last_run(len(x), schedule)
    rows = last != np.arange(len(x))
    return features(x[rows]), (truth - stand_in(x, ran, last, schedule.reuse))[rows].astype(np.float64)


def _together(pairs: Sequence[tuple[F64, F64]]) -> tuple[F64, F64]:
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def fit_corrections(
    session: Session, texts: Sequence[I32], truths: Sequence[F32], schedule: Schedule, rank: int, ridge: float = RIDGE
) -> dict[int, LowRank]:
    """Fit the correction of each droppable layer, the first to the last, towards the full model's states.

    A layer's input is what the layers before it leave, corrected as they are then: a correction sees what it will see.

    Args:
        texts: int32[n] each.
        truths: Their all_states().
    """
    found: dict[int, LowRank] = {}
    states = [through_first(session, tokens) for tokens in texts]
    for layer in range(1, session.model.card.n_layer):
        ran = [through(session, layer, x) for x in states]
        if layer not in schedule.droppable:
            states = ran
            continue
        pairs = [missing(schedule, x, y, t[layer]) for x, y, t in zip(states, ran, truths, strict=True)]
        found[layer] = fit_low_rank(*_together(pairs), rank, ridge)
        states = [dropped_states(schedule, x, y, found[layer]) for x, y in zip(states, ran, strict=True)]
    return found


def unexplained(schedule: Schedule, layer: int, rank: int, fitted: Sequence[F32], judged: Sequence[F32]) -> float:
    """Return the squared error of a layer's stand-in in the full model, as a share of what the layer adds, squared.

    Args:
        rank: Of the correction, 0 for none.
        fitted: all_states() of the texts that the correction is fitted on.
        judged: all_states() of the texts that the error is taken on.
    """

    def pairs(some: Schedule, truths: Sequence[F32]) -> tuple[F64, F64]:
        return _together([missing(some, t[layer - 1], t[layer], t[layer]) for t in truths])

    x, error = pairs(schedule, judged)
    added = pairs(replace(schedule, reuse="nothing"), judged)[1]
    if rank:
        found = fit_low_rank(*pairs(schedule, fitted), rank, RIDGE)
        error = error - x @ found.down @ found.up
    return float((error**2).sum() / (added**2).sum())


def distributions(session: Session, states: F32) -> Iterator[Distribution]:
    """Yield what each of f32[n, n_embd] states after the last layer predicts."""
    last = session.model.card.n_layer - 1
    for start in range(0, len(states), _ROWS):
        for row in session.forward(
            hidden=states[start : start + _ROWS], n_past=0, resume_after=last, rows="all"
        ).logits:
            found = read_row(row)
            assert found is not None, "logits are finite"
            yield found


Setting = tuple[Schedule, Mapping[int, LowRank]]


def judge_settings(session: Session, texts: Sequence[I32], settings: Mapping[str, Setting]) -> dict[str, Tally]:
    """Compare settings with the full model at all positions of texts int32[n] behind the prompt."""
    found = {name: Tally() for name in settings}
    for tokens in texts:
        truth = all_states(session, tokens)[-1]
        base: dict[int, list[Distribution]] = {}
        for name, (schedule, corrections) in settings.items():
            first, tally = schedule.n_prompt, found[name]
            if first not in base:
                base[first] = list(distributions(session, truth[first:]))
            states = scheduled_states(session, tokens, schedule, corrections)
            for p, q in zip(base[first], distributions(session, states[first:]), strict=True):
                tally.kl.append(divergence(p, q))
                tally.same.append(p.best == q.best)
            tally.dropped += (last_run(len(tokens), schedule) != np.arange(len(tokens)))[first:].tolist()
    return found


def mean_share(path: Path, schedule: Schedule, rank: int) -> float:
    """Return the share of a whole token's bytes that a step behind the prompt reads on the average.

    A dropped layer reads its first norm and the matrices of keys and values, and a correction of halves (rank 0: none).
    """
    sizes, tensors = layer_bytes(path), read_gguf(path).tensors
    saved = 0
    for layer in schedule.droppable:
        still_read = tuple(f"blk.{layer}.attn_{name}." for name in ("norm", "k", "v", "k_norm"))
        kept = [tensor.n_bytes for name, tensor in tensors.items() if name.startswith(still_read)]
        n_embd = tensors[f"blk.{layer}.attn_k.weight"].shape[0]
        saved += int(sizes.halves[layer].sum()) - sum(kept) - 2 * rank * (2 * n_embd + 1)
    return 1 - (schedule.cycle - 1) / schedule.cycle * saved / sizes.total


def droppable_layers(n_layer: int, per_cent: int) -> tuple[int, ...]:
    """Return evenly spread droppable layers; 75 % are those of LoRA-Drop's code: all but every fourth.

    >>> droppable_layers(9, 75), droppable_layers(9, 50), droppable_layers(9, 25)
    ((1, 2, 3, 5, 6, 7), (1, 3, 5, 7), (2, 6))
    """
    return tuple(layer for layer in range(1, n_layer) if layer % 4 in _OF_FOUR[per_cent])


@dataclass(frozen=True, slots=True)
class Texts:
    """Windows int32[n]: those that are fitted or searched on, and those that are judged on."""

    trained: list[I32]
    judged: list[I32]


def read_texts(model: Model, n_window: int, n_trained: int, n_judged: int) -> Texts:
    """Cut windows: the calibration text and the drafters' common text to train on, `edgedec eval`'s text to judge."""
    tokenizer, leading = model.tokenizer, added_around(model.tokenizer)[0]
    calibration = files("edgedec_export").joinpath("calibration_text.txt").read_text(encoding="utf-8")
    trained = tokenizer.encode(calibration, add_special=False)
    trained += common_text(tokenizer, None, model.card.fingerprint).token_ids
    judged = tokenizer.encode(DEFAULT_TEXT.read_text(encoding="utf-8"), add_special=False)
    windows = [cut_windows(ids, leading, n_window) for ids in (trained, judged)]
    whole = [[window for window in some if len(window) == n_window] for some in windows]
    return Texts(whole[0][:n_trained], whole[1][:n_judged])


def study_layers(model: Model, args: argparse.Namespace, fitted: list[F32], judged: list[F32]) -> list[dict[str, Any]]:
    """Return how much of what single layers add is left unexplained, by stand-in and rank of the correction."""
    rows = []
    for reuse in REUSES:
        for rank in (0, *args.ranks, model.card.n_embd):
            schedule = Schedule((), args.cycles[0], args.prompt, reuse)
            layers = droppable_layers(model.card.n_layer, 25)
            errors = {layer: unexplained(schedule, layer, rank, fitted, judged) for layer in layers}
            rows.append({"reuse": reuse, "rank": rank, "errors": errors, "mean": float(np.mean([*errors.values()]))})
            shown = ", ".join(f"{layer}: {error:.2f}" for layer, error in errors.items())
            print(f"{reuse}, rank {rank}: {rows[-1]['mean']:.3f} of what a layer adds ({shown})", flush=True)
    return rows


def study_schedules(
    session: Session, path: Path, args: argparse.Namespace, texts: Texts, truths: Sequence[F32]
) -> list[dict[str, Any]]:
    """Return figures for each cycle, set of droppable layers, stand-in and rank."""
    rows: list[dict[str, Any]] = []
    n_layer = session.model.card.n_layer
    for cycle in args.cycles:
        for droppable in [tuple(args.layers)] if args.layers else [droppable_layers(n_layer, p) for p in args.per_cent]:
            settings: dict[str, Setting] = {}
            for reuse in args.reuse:
                schedule = Schedule(droppable, cycle, args.prompt, reuse)
                for rank in (0, *args.ranks):
                    fitted = fit_corrections(session, texts.trained, truths, schedule, rank) if rank else {}
                    settings[f"{reuse}, rank {rank}"] = schedule, fitted
            for name, tally in judge_settings(session, texts.judged, settings).items():
                share = mean_share(path, settings[name][0], int(name.split()[-1]))
                figures = {"share": share, **tally.figures()}
                rows.append({"cycle": cycle, "layers": droppable, "setting": name, **figures})
                shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
                print(f"c {cycle}, {len(droppable)} layers, {name}: {shown}", flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--window", type=int, default=256, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=64, help="of these, the leading ones, not judged")
    parser.add_argument("--trained", type=int, default=20, help="texts that are fitted on")
    parser.add_argument("--judged", type=int, default=4, help="texts that are judged on")
    parser.add_argument("--cycles", type=int, nargs="+", default=[2, 4], help="single layers: the first of these")
    parser.add_argument("--per-cent", type=int, nargs="*", default=[75, 50, 25], choices=sorted(_OF_FOUR))
    parser.add_argument("--layers", type=int, nargs="*", help="droppable ones, in place of --per-cent")
    parser.add_argument("--reuse", nargs="+", default=["nothing", "update"], choices=REUSES, help="in schedules")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    options = LoadOptions(n_ctx=args.window, max_rows=_ROWS, n_threads=args.threads, cache_dir=cache_folder())
    with Cpu().load(path, options) as model:
        session = model.session(args.window)
        texts = read_texts(model, args.window, args.trained, args.judged)
        fitted, judged = ([all_states(session, tokens) for tokens in some] for some in (texts.trained, texts.judged))
        layers = study_layers(model, args, fitted, judged)
        schedules = study_schedules(session, path, args, texts, fitted)
    document = {"benchmark": "trained_skipping", **vars(args), "single_layers": layers, "schedules": schedules}
    print(json.dumps(document | provenance()))


if __name__ == "__main__":
    main()
