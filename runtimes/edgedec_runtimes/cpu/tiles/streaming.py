"""Models larger than the memory allowed: which parts of the weights stay, which are read from the tile file each time.

A part is what one stage of a forward reads (native/streaming.h). Those that stay are spread evenly over the layers, so
that the disk is read all the time a forward takes; what is read passes through a ring of three of the largest parts.

Then a token takes at least missing bytes / read rate of the disk, which `read_rate` measures: the prediction of a plan.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from edgedec.errors import RequestError, StorageError
from edgedec.memory_plan import MemoryTerm, format_bytes
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.network import EMBEDDING, OUTPUT, Network, Placed
from edgedec_runtimes.cpu.tiles.paged_file import PAGE_BYTES, PagedFile, page_buffer

QKV, ATTN_OUT, GATE_UP, DOWN, HEAD = range(5)
"""Stages, by the numbers of native/edgedec_cpu.h."""

_STAGE_OF = {2: QKV, 3: QKV, 4: QKV, 5: ATTN_OUT, 6: GATE_UP, 7: GATE_UP, 8: DOWN}
_RING_PARTS = 3
_PANEL_ROWS = 32
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What a stage of a forward reads of the tile file.

    Attributes:
        stage, layer: Which stage; 0 for the head's layer.
        row_begin, row_end: Rows of the head; else 0.
        offset, n_bytes: Where it lies in the file.
        stays: Whether it stays in memory.
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
        """What it takes in memory: the pages of the file that it touches."""
        return -(-(self.offset + self.n_bytes) // PAGE_BYTES) * PAGE_BYTES - self.offset // PAGE_BYTES * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How a model's weights share the memory allowed.

    Attributes:
        parts: All of them, in the order of a forward.
        ring_bytes: Memory that the streamed ones pass through.
    """

    parts: tuple[WeightPart, ...]
    ring_bytes: int

    @property
    def staying_bytes(self) -> int:
        """Memory of the parts that stay."""
        return sum(part.held_bytes for part in self.parts if part.stays)

    @property
    def missing_bytes(self) -> int:
        """What each forward through all layers reads."""
        return sum(part.n_bytes for part in self.parts if not part.stays)

    @property
    def resident_bytes(self) -> int:
        """Most bytes of weights that are in memory at a time."""
        return self.staying_bytes + self.ring_bytes

    def seconds_per_token(self, rate: float) -> float:
        """Return what reading takes of each token, in seconds, at `rate` bytes per second: no step can be faster."""
        return self.missing_bytes / rate

    def memory_term(self, rate: float, measured_on: str) -> MemoryTerm:
        """Return the line of the memory plan, with the prediction."""
        seconds = self.seconds_per_token(rate)
        detail = (
            f"{format_bytes(self.missing_bytes)} more are read for each token: {seconds:.3g} s at "
            f"{format_bytes(int(rate))}/s, measured on {measured_on}"
        )
        return MemoryTerm("weights (streamed)", self.resident_bytes, detail)


def plan_streaming(network: Network, offsets: Mapping[str, int], resident_bytes: int) -> StreamPlan:
    """Choose the parts that stay, so that at most `resident_bytes` of weights are in memory.

    Args:
        network: Shape and places.
        offsets: Where in the tile file each matrix's tiles begin.
        resident_bytes: Stays in memory at most.

    Raises:
        RequestError: It is less than what the streamed parts pass through.
    """
    parts = _layer_parts(network, offsets)
    largest = max(part.held_bytes for part in parts)
    parts += _head_parts(network, offsets, largest)
    ring_bytes = _RING_PARTS * max(part.held_bytes for part in parts)
    embedding = next(placed for placed in network.matrices if placed.which == EMBEDDING)
    # A row of the embedding matrix is read in its tile, beside the ring.
    rest = resident_bytes - ring_bytes - _tile_bytes(embedding, 16) - 2 * PAGE_BYTES
    if rest < 0:
        raise RequestError(
            f"resident_bytes is {format_bytes(resident_bytes)}; what this model's weights pass through takes "
            f"{format_bytes(resident_bytes - rest)}: allow at least that"
        )
    stays = spread([part.held_bytes for part in parts], rest)
    return StreamPlan(tuple(replace(part, stays=s) for part, s in zip(parts, stays, strict=True)), ring_bytes)


def spread(sizes: Sequence[int], budget: int) -> list[bool]:
    """Choose items of at most `budget` in all, evenly along the way, then what still fits, the largest first.

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
    """Return the parts of the layers; a part reaches from the first of its matrices to the last."""
    ranges: dict[tuple[int, int], tuple[int, int]] = {}
    for placed in network.matrices:
        if placed.which in _STAGE_OF:
            key = placed.layer, _STAGE_OF[placed.which]
            begin = offsets[placed.tensor.name]
            end = begin + _tile_bytes(placed, placed.tensor.shape[1])
            known = ranges.get(key, (begin, end))
            ranges[key] = min(begin, known[0]), max(end, known[1])
    return [
        WeightPart(stage, layer, 0, 0, begin, end - begin) for (layer, stage), (begin, end) in sorted(ranges.items())
    ]


def _head_parts(network: Network, offsets: Mapping[str, int], most_bytes: int) -> list[WeightPart]:
    """Return the head in parts that are not larger than a layer's."""
    by_place = {placed.which: placed for placed in network.matrices}
    head = by_place.get(OUTPUT, by_place[EMBEDDING])
    panel_bytes, n_rows = _tile_bytes(head, _PANEL_ROWS), network.n_vocab
    step = max(1, most_bytes // panel_bytes) * _PANEL_ROWS
    start = offsets[head.tensor.name]
    return [
        WeightPart(
            HEAD,
            0,
            begin,
            min(begin + step, n_rows),
            start + begin // _PANEL_ROWS * panel_bytes,
            _tile_bytes(head, min(step, n_rows - begin)),
        )
        for begin in range(0, n_rows, step)
    ]


def _tile_bytes(placed: Placed, n_rows: int) -> int:
    return int(native().ec_tile_bytes(placed.tensor.type, n_rows, placed.tensor.shape[0]))


def read_rate(path: Path, *, most_bytes: int = 64 << 20, most_s: float = 0.5) -> float:
    """Measure how fast the middle of a file is read from its storage, around the system's cache, in bytes per second.

    At most `most_bytes` are read, in order, for `most_s` seconds or a little more.

    Raises:
        StorageError: The file can't be read, or is empty.
    """
    with PagedFile(path) as file:
        n_bytes = min(most_bytes, file.n_bytes)
        start = (file.n_bytes - n_bytes) // 2
        file.forget(start, n_bytes)
        out = page_buffer(_READ_BYTES + PAGE_BYTES)
        out[::PAGE_BYTES] = 1  # so that its pages are there
        done, began = 0, perf_counter()
        while done < n_bytes and (done == 0 or perf_counter() - began < most_s):
            step = min(_READ_BYTES, n_bytes - done)
            file.read(start + done, step, out)
            done += step
        return max(1, done) / max(1e-9, perf_counter() - began)


def remembered_rate(path: Path) -> float:
    """Return read_rate, measured once in this process for a file as it is (StorageError when it can't be)."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; check the disk") from error
    key = os.fspath(path), found.st_size, found.st_mtime_ns
    if key not in _rates:
        _rates[key] = read_rate(path)
    return _rates[key]


_rates: dict[tuple[str, int, int], float] = {}
