"""Models larger than the memory allowed: which parts of the weights stay in memory, and which each forward reads anew.

A part is what one stage of a forward reads (native/weights/streaming.h). The parts that stay are spread evenly over
the layers, so that the disk is busy for all of a forward. The other parts pass through a ring of memory, as large as
three of the largest parts.

Experts of a mixture are no parts: a token reads a few of them. They have slots of memory, which hold the experts that
were used most of late (native/forward/expert_store.h). Where the model has experts, all parts stay if there is room,
and slots take the rest of the memory.

A memory plan predicts what a token takes (`StreamPlan.seconds_per_token`), from how fast the disk and memory are read
(read_rates.py).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.memory_plan import MemoryTerm, format_bytes
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.native_tables import NAMES, NUMBERS
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.tensor_places import (
    EMBEDDING,
    GATES_AND_UPS,
    OUTPUT,
    PER_LAYER_PROJECTION,
    PER_LAYER_ROWS,
    Placed,
)
from edgedec_runtimes.cpu.tiles.paged_file import PAGE_BYTES
from edgedec_runtimes.cpu.tiles.read_rates import Pace, memory_rate, remembered_rate

QKV, ATTN_OUT, GATE_UP, DOWN, OUTPUT_ROWS = (NUMBERS[name] for name in NAMES["stages"])
"""The stages of a forward that read weights."""

_MATRICES_OF = {
    QKV: ("Q", "K", "V", "MIX", "MIX_GATE", "MIX_ALPHA", "MIX_BETA"),
    ATTN_OUT: ("ATTN_OUT", "MIX_OUT"),
    GATE_UP: ("GATE", "UP", "ROUTER", "SHARED_ROUTER"),
    DOWN: ("DOWN", "PER_LAYER_GATE", "PER_LAYER_OUT"),
}
_STAGE_OF = {NUMBERS[f"EC_{name}"]: stage for stage, names in _MATRICES_OF.items() for name in names}
_OF_EXPERTS = tuple(NUMBERS[f"EC_{name}_EXPERTS"] for name in ("GATE", "UP", "DOWN"))
_RING_PARTS = 3
_PANEL_ROWS, _TILE_ROWS = 32, 16
MEASURED_BYTES = 64 << 20
"""Memory that is taken to measure how fast it is read, where there is so much."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The bytes of the tile file that one stage of a forward reads.

    Attributes:
        stage, layer: The stage and its layer; that of the output matrix is 0.
        row_begin, row_end: The rows of the output matrix that the part holds; 0 in other parts.
        offset, n_bytes: The part's place in the file.
        stays: Whether the part stays in memory.
    """

    stage: int
    layer: int
    row_begin: int
    row_end: int
    offset: int
    n_bytes: int
    stays: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for the part: all pages of the file that it touches."""
        return -(-(self.offset + self.n_bytes) // PAGE_BYTES) * PAGE_BYTES - self.offset // PAGE_BYTES * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """The memory for experts, and what reading them takes.

    Attributes:
        n: How many experts are in memory at a time.
        slot_bytes: Memory of one of them.
        n_expert: All experts of all layers.
        token_bytes: Bytes of the experts that a token goes through.
        read_bytes: Bytes that are read at a time, on average: one matrix of an expert.
        down_bytes: The bytes of token_bytes that are multiplied last, when all experts of a layer have been read.
        n_missing: How many such matrices a layer reads for a token, about, where all experts are chosen alike.
    """

    n: int
    slot_bytes: int
    n_expert: int
    token_bytes: int
    read_bytes: int
    down_bytes: int
    n_missing: int

    @property
    def missing_bytes(self) -> int:
        """Bytes of experts that a token reads on average where all are chosen alike; with favourites it reads fewer."""
        return self.token_bytes - self.token_bytes * self.n // self.n_expert


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How a model's weights share the memory allowed.

    Attributes:
        parts: All parts of the weights, in the order of a forward.
        ring_bytes: The memory that streamed parts pass through.
        experts: The memory for experts; None for a model without.
        kept_bytes: Memory for matrices that are in no part, as every forward reads them before the first layer.
    """

    parts: tuple[WeightPart, ...]
    ring_bytes: int
    experts: ExpertSlots | None = None
    kept_bytes: int = 0

    @property
    def staying_bytes(self) -> int:
        """Bytes of memory for the parts that stay."""
        return sum(part.held_bytes for part in self.parts if part.stays)

    @property
    def missing_bytes(self) -> int:
        """Bytes that a forward of one token through all layers reads; with experts, on average."""
        of_experts = 0 if self.experts is None else self.experts.missing_bytes
        return sum(part.n_bytes for part in self.parts if not part.stays) + of_experts

    @property
    def resident_bytes(self) -> int:
        """Most bytes of weights that are in memory at a time."""
        of_experts = 0 if self.experts is None else self.experts.n * self.experts.slot_bytes
        return self.staying_bytes + self.ring_bytes + self.kept_bytes + of_experts

    def pace(self, path: Path, n_threads: int, most_bytes: int, cache_dir: Path | None = None) -> Pace:
        """Return how fast the parts or experts of a file, and memory, are read; measured once in this process.

        At most `most_bytes` of memory are taken to measure how fast memory is read; `cache_dir` keeps readings.
        """
        pieces = (0, 1) if self.experts is None else (self.experts.read_bytes, self.experts.n_missing)
        disk = remembered_rate(path, *pieces, cache_dir=cache_dir)
        return Pace(disk, self.memory_rate(n_threads, most_bytes, cache_dir))

    def memory_rate(self, n_threads: int, most_bytes: int = MEASURED_BYTES, cache_dir: Path | None = None) -> float:
        """Return how fast memory is read, measured with no more memory than the weights take (read_rates.py)."""
        return memory_rate(n_threads, min(MEASURED_BYTES, self.resident_bytes, most_bytes), cache_dir)

    def seconds_per_token(self, pace: Pace) -> float:
        """Return the seconds that a token is expected to take, of which computing is as long as memory is read.

        Parts are read ahead, beside all that is computed. Experts are known when a layer's rows have chosen them: they
        are read beside the products of gates and ups, and nothing is read while the other weights are multiplied.
        """
        of_parts = sum(part.n_bytes for part in self.parts) + self.kept_bytes
        missing = sum(part.n_bytes for part in self.parts if not part.stays)
        seconds = max(missing / pace.disk, of_parts / pace.memory)
        if self.experts is None:
            return seconds
        down_s, all_s = self.experts.down_bytes / pace.memory, self.experts.token_bytes / pace.memory
        return seconds + max(self.experts.missing_bytes / pace.disk, all_s - down_s) + down_s

    def memory_term(self, pace: Pace, measured_on: str) -> MemoryTerm:
        """Return the weights' line of the memory plan, with the seconds that a token is expected to take.

        Args:
            pace: How fast the weights are read.
            measured_on: What the disk's rate was measured on, for a person.
        """
        seconds = self.seconds_per_token(pace)
        missing = f"{format_bytes(self.missing_bytes)} more are read for each token"
        if self.experts is not None:
            missing = f"about {missing} where it chooses all experts alike, and less where it has favourites"
        if not math.isfinite(pace.disk):  # of a model that is not here
            detail = f"{missing}; its disk was not measured"
            return MemoryTerm("weights (streamed)", self.resident_bytes, detail, slowdown=math.inf)
        rates = f"{format_bytes(int(pace.disk))}/s from the disk"
        if math.isfinite(pace.memory):
            rates = f"{format_bytes(int(pace.memory))}/s from memory and {rates}"
        detail = f"{missing}: {seconds:.3g} s with {rates}, measured on {measured_on}"
        n_all = sum(part.n_bytes for part in self.parts) + self.kept_bytes
        n_all += 0 if self.experts is None else self.experts.token_bytes
        slowdown = max(1.0, seconds * pace.memory / n_all)
        return MemoryTerm("weights (streamed)", self.resident_bytes, detail, slowdown=slowdown)


def plan_streaming(network: Network, offsets: Mapping[str, int], resident_bytes: int) -> StreamPlan:
    """Choose the parts that stay, so that at most `resident_bytes` of weights are in memory.

    Args:
        network: The network's shape and the places of its matrices.
        offsets: The byte of the tile file at which each matrix's tiles begin, by name.
        resident_bytes: The most bytes of weights in memory at a time.

    Raises:
        RequestError: `resident_bytes` is less than the streamed parts pass through.
    """
    parts = _layer_parts(network, offsets)
    parts += _output_parts(network, offsets, max(part.held_bytes for part in parts))
    sizes, kept_bytes = [part.held_bytes for part in parts], _kept_bytes(network)
    rest = resident_bytes - kept_bytes - _row_bytes(network)
    experts, expert_bytes = None, 0
    if network.n_expert:
        experts = _slots(network, network.n_expert_used)
        expert_bytes = experts.n * experts.slot_bytes
        if rest >= sum(sizes) + expert_bytes:
            n_slots = min((rest - sum(sizes)) // experts.slot_bytes, experts.n_expert)
            staying = tuple(replace(part, stays=True) for part in parts)
            return StreamPlan(staying, 0, _slots(network, n_slots), kept_bytes)
    ring_bytes = _RING_PARTS * max(sizes)
    rest -= ring_bytes + expert_bytes
    if rest < 0:
        raise RequestError(
            f"resident_bytes is {format_bytes(resident_bytes)}; what this model's weights pass through takes "
            f"{format_bytes(resident_bytes - rest)}: allow at least that"
        )
    chosen = tuple(replace(part, stays=stays) for part, stays in zip(parts, spread(sizes, rest), strict=True))
    return StreamPlan(chosen, ring_bytes, experts, kept_bytes)


def _kept_bytes(network: Network) -> int:
    """Return the bytes of memory for matrices that are in no part, in whole pages."""
    sizes = [_tile_bytes(p, p.tensor.shape[1]) for p in network.matrices if p.which == PER_LAYER_PROJECTION]
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES for size in sizes)


def _row_bytes(network: Network) -> int:
    """Return the bytes of memory for the tiles of a token's rows: of the embedding matrix, and one for each layer."""
    rows = {EMBEDDING: _TILE_ROWS, PER_LAYER_ROWS: network.n_layer + 2 * _TILE_ROWS}
    tables = [(placed, rows[placed.which]) for placed in network.matrices if placed.which in rows]
    return sum(_tile_bytes(placed, n_rows) + 2 * PAGE_BYTES for placed, n_rows in tables)


def _slots(network: Network, n: int) -> ExpertSlots:
    """Return the memory for n experts. A slot has room for the largest matrices of any layer, in whole pages."""
    sizes: dict[int, list[int]] = {which: [] for which in _OF_EXPERTS}
    for placed in network.matrices:
        if placed.which in sizes:
            both = placed.tensor.name.endswith(GATES_AND_UPS)
            n_bytes = _tile_bytes(placed, placed.tensor.shape[1] // network.n_expert // (1 + both))
            for which in _OF_EXPERTS[:2] if both else (placed.which,):
                sizes[which].append(n_bytes)
    sizes = {which: slot_sizes for which, slot_sizes in sizes.items() if slot_sizes}  # experts may have no gates
    slot_bytes = sum(-(-max(slot_sizes) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES for slot_sizes in sizes.values())
    token_bytes = network.n_expert_used * sum(map(sum, sizes.values()))
    n_layer = len(sizes[_OF_EXPERTS[-1]])
    read_bytes = token_bytes // (network.n_expert_used * n_layer * len(sizes))
    down_bytes = network.n_expert_used * sum(sizes[_OF_EXPERTS[-1]])
    n_expert = network.n_expert * n_layer
    n_missing = max(1, round(network.n_expert_used * len(sizes) * (1 - n / n_expert)))
    return ExpertSlots(n, slot_bytes, n_expert, token_bytes, read_bytes, down_bytes, n_missing)


def spread(sizes: Sequence[int], budget: int) -> list[bool]:
    """Return which items to choose, of sizes that sum to at most `budget`.

    Items are chosen evenly along the list; then those that still fit, the largest first.

    >>> spread([4, 4, 4, 4, 4, 4], 13)
    [False, True, False, True, False, True]
    """
    share, credit, used = min(1.0, budget / max(1, sum(sizes))), 0.0, 0
    chosen = []
    for size in sizes:
        credit += size * share
        chosen.append(credit >= size * 0.999 and used + size <= budget)
        if chosen[-1]:
            credit, used = credit - size, used + size
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not chosen[i] and used + sizes[i] <= budget:
            chosen[i], used = True, used + sizes[i]
    return chosen


def _layer_parts(network: Network, offsets: Mapping[str, int]) -> list[WeightPart]:
    """Return the parts of the layers. A part reaches from the first to the last of its matrices in the file."""
    ranges: dict[tuple[int, int], tuple[int, int]] = {}
    for placed in network.matrices:
        if placed.which in _STAGE_OF:
            key = placed.layer, _STAGE_OF[placed.which]
            begin = offsets[placed.tensor.name]
            end = begin + _tile_bytes(placed, placed.tensor.shape[1])
            part = ranges.get(key, (begin, end))
            ranges[key] = min(begin, part[0]), max(end, part[1])
    for layer, stage in itertools.product(range(network.n_layer), range(OUTPUT_ROWS)):  # some have no matrix
        ranges.setdefault((layer, stage), (0, 0))
    return [
        WeightPart(stage, layer, 0, 0, begin, end - begin) for (layer, stage), (begin, end) in sorted(ranges.items())
    ]


def _output_parts(network: Network, offsets: Mapping[str, int], most_bytes: int) -> list[WeightPart]:
    """Return the parts of the output matrix, each of at most about `most_bytes`."""
    by_place = {placed.which: placed for placed in network.matrices}
    output = by_place.get(OUTPUT, by_place[EMBEDDING])
    panel_bytes, n_rows = _tile_bytes(output, _PANEL_ROWS), network.n_vocab
    step = max(1, most_bytes // panel_bytes) * _PANEL_ROWS
    start = offsets[output.tensor.name]
    return [
        WeightPart(
            OUTPUT_ROWS,
            0,
            begin,
            min(begin + step, n_rows),
            start + begin // _PANEL_ROWS * panel_bytes,
            _tile_bytes(output, min(step, n_rows - begin)),
        )
        for begin in range(0, n_rows, step)
    ]


def _tile_bytes(placed: Placed, n_rows: int) -> int:
    return int(native().ec_tile_bytes(placed.tensor.type, n_rows, placed.tensor.shape[0]))
