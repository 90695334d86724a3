"""Find the ranges of activations by running the float graph on a text, on the CPU.

A range goes from the smallest to the largest value seen: with 16 bits, clipping rare large values would cost more than
it gains, because attention relies on a few huge values (Sun et al. 2024, arXiv:2402.17762).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.tokenizer import Tokenizer
from edgedec_export.npu.graph import Plan
from edgedec_runtimes.npu.facts import PARTS, ROWS, Facts
from edgedec_runtimes.npu.inputs import rotation, shapes, visible
from edgedec_runtimes.onnx.library import load_library, session_options
from edgedec_runtimes.shared.cpu_count import usable_cores

F32 = NDArray[np.float32]

_ROWS = ROWS[-1]
_HIDDEN = np.float32(-1e30)
_NEGLIGIBLE = 20.0
"""A thousand scores that are this far below the largest of their row have no weight in attention that 16 bits show."""

_MARGIN = 1.05
_USUAL_MARGIN, _FAR = 4.0, 8.0


@dataclass(slots=True)
class Statistics:
    """What the calibration has seen.

    Attributes:
        ranges: Smallest and largest value of each activation; for masked scores, of the largest score of each row.
        channels: Smallest and largest value of each channel of keys and values, float32[2, n_head_kv, head_dim], by the
            name of the graph's output.
        usual: By layer, the magnitude that 999 of 1,000 products of the feed-forward block stay below.
    """

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    channels: dict[str, F32] = field(default_factory=dict)
    usual: dict[int, float] = field(default_factory=dict)

    def see(self, name: str, values: F32) -> None:
        """Widen an activation's range to include these values."""
        lowest, highest = self.ranges.get(name, (np.inf, -np.inf))
        self.ranges[name] = min(lowest, float(values.min())), max(highest, float(values.max()))


def calibration_ids(tokenizer: Tokenizer, text: str, n_context: int) -> list[NDArray[np.int32]]:
    """Return a text as token ids, int32, in sequences whose lengths are multiples of the rows of a prefill.

    Raises:
        RequestError: The text has too few tokens.
    """
    bos = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special=False)
    n = n_context // _ROWS * _ROWS - len(bos)
    sequences = [np.array(bos + ids[i : i + n], np.int32) for i in range(0, len(ids), n)]
    cut = [sequence[: len(sequence) // _ROWS * _ROWS] for sequence in sequences]
    whole = [sequence for sequence in cut if len(sequence)]
    if not whole:
        raise RequestError(
            f"the calibration text has {len(ids)} tokens, expected at least {_ROWS}, better thousands; give a longer "
            "text, or none for the bundled one"
        )
    return whole


def calibrate(
    graph: Path,
    plan: Plan,
    facts: Facts,
    embedding: NDArray[np.float16],
    sequences: Sequence[NDArray[np.int32]],
    *,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Statistics:
    """Run the float graph on token ids and return what was seen.

    Args:
        graph: The float graph, with all results as outputs.
        plan: The operators of the graph.
        facts: Sizes of the graph.
        embedding: float16[n_vocab, n_embd].
        sequences: Token ids, each sequence a multiple of 64 long.
        on_progress: Called with the tokens that were evaluated.
        cancel: Stops between two forwards.

    Raises:
        CancelledError: `cancel` was cancelled.
    """
    context = max(len(sequence) for sequence in sequences)
    session = _open(graph, facts, context)
    names = [output.name for output in session.get_outputs()]
    statistics, done, total = Statistics(), 0, sum(map(len, sequences))
    for sequence in sequences:
        cache = _empty_cache(facts, context)
        for start in range(0, len(sequence), _ROWS):
            check_cancelled(cancel, "the calibration")
            hidden = embedding[sequence[start : start + _ROWS]].astype(np.float32) * np.float32(facts.embedding_scale)
            inputs = {"hidden": hidden, **_positions(facts, start, context), **cache}
            inputs["logit_rows"] = np.arange(_ROWS, dtype=np.int32)
            results = dict(zip(names, session.run(names, inputs), strict=True))
            _note(statistics, plan, facts, results)
            _extend(cache, facts, results, start)
            done += _ROWS
            report_progress(on_progress, "calibrate", done, total, "tokens")
    return statistics


def limits(seen: Statistics) -> dict[int, float]:
    """Return by layer a power of two that the usual products of the feed-forward block stay below.

    Only layers with products far beyond the usual ones are in the result.
    """
    by_name = {}
    for layer, usual in seen.usual.items():
        limit = _USUAL_MARGIN * usual
        if max(map(abs, seen.ranges[f"blk.{layer}.ffn_product"])) > _FAR * limit > 0:
            by_name[layer] = 2.0 ** math.ceil(math.log2(limit))
    return by_name


def ranges(plan: Plan, seen: Statistics, hidden: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Return the ranges that the quantized graph is made with, except those of masks (`qdq.quantizers`).

    Args:
        plan: The operators.
        seen: What the calibration saw.
        hidden: Smallest and largest value of the embeddings.
    """
    wider = {name: (lowest * _MARGIN, highest * _MARGIN) for name, (lowest, highest) in seen.ranges.items()}
    for name in plan.masked:
        lowest, highest = seen.ranges[name]
        wider[name] = min(lowest, 0.0) - _NEGLIGIBLE, max(highest, 0.0) * _MARGIN
    wider["hidden"] = hidden
    return wider | {name: (-1.0, 1.0) for name in plan.inputs if name.startswith(("cos", "sin"))}


def _open(graph: Path, facts: Facts, context: int) -> Any:
    ort = load_library()
    options = session_options(ort, usable_cores())
    for name, size in (facts.dimensions(_ROWS, context) | {"logit_rows": _ROWS}).items():
        options.add_free_dimension_override_by_name(name, size)
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _empty_cache(facts: Facts, context: int) -> dict[str, F32]:
    sizes = shapes(facts, _ROWS, context)
    names = [(f"past_{what}_{part}_{layer}", sizes[f"past_{what}"]) for layer, what in _layers(facts) for part in PARTS]
    return {name: np.zeros(shape, np.float32) for name, shape in names}


def _layers(facts: Facts) -> Iterator[tuple[int, str]]:
    yield from ((layer, what) for layer in range(facts.n_layer) for what in ("key", "value"))


def _positions(facts: Facts, start: int, context: int) -> dict[str, F32]:
    by_name = {}
    for suffix, frequencies in facts.frequencies.items():
        cos, sin = rotation(frequencies, start, _ROWS, facts.head_dim)
        by_name[f"cos{suffix}"], by_name[f"sin{suffix}"] = cos.astype(np.float32), sin.astype(np.float32)
        seen = visible(start, _ROWS, context, facts.sliding_window if suffix else 0)
        mask = np.where(seen, np.float32(0), _HIDDEN)
        by_name[f"mask{suffix}"] = np.tile(mask, (facts.n_groups, 1))
    return by_name


def _note(statistics: Statistics, plan: Plan, facts: Facts, results: dict[str, F32]) -> None:
    masked = set(plan.masked)
    for op in plan.ops:
        if not op.same:
            values = results[op.output]
            statistics.see(op.output, values.max(axis=-1) if op.output in masked else values)
    for layer in range(facts.n_layer):
        usual = float(np.quantile(np.abs(results[f"blk.{layer}.ffn_product"]), 0.999))
        statistics.usual[layer] = max(usual, statistics.usual.get(layer, 0.0))
    for layer, what in _layers(facts):
        name = f"new_{what}_high_{layer}"  # the whole value, as floats have no low part
        axis = 2 if what == "key" else 1
        seen = np.stack((results[name].min(axis=axis), results[name].max(axis=axis)))
        lowest, highest = statistics.channels.get(name, seen)
        statistics.channels[name] = np.stack((np.minimum(seen[0], lowest), np.maximum(seen[1], highest)))


def _extend(cache: dict[str, F32], facts: Facts, results: dict[str, F32], start: int) -> None:
    for layer, what in _layers(facts):
        past, new = cache[f"past_{what}_high_{layer}"], results[f"new_{what}_high_{layer}"]
        if what == "key":
            past[:, :, start : start + _ROWS] = new
        else:
            past[:, start : start + _ROWS] = new
