"""How a forward is cut into runs of graphs with a fixed number of rows, such that a row's bits don't depend on the cut.

A graph of 8 rows takes positions 8 i to 8 i + 7, whichever of them are asked for: rows before them are evaluated again
(from their tokens, to the same keys and values), rows behind them are padding that nothing sees. So a position always
is the same row of the same block on the same cached tokens, in a single step as in a long draft. Only a whole piece of
64 positions, aligned to 64, that one forward covers is taken by the graph of 64 rows: prefills are, drafts are not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edgedec_runtimes.npu.facts import ROWS

STEP_ROWS, PREFILL_ROWS = ROWS


@dataclass(frozen=True, slots=True)
class Block:
    """One run of a graph.

    Attributes:
        start: Position of its first row; the tokens before it are cached.
        n_rows: Rows of the graph.
        first: Position of the first row that is new.
        stop: Position behind the last row that is new.
    """

    start: int
    n_rows: int
    first: int
    stop: int


def blocks(n_past: int, n: int) -> Iterator[Block]:
    """Yield the runs for n new rows on n_past cached tokens.

    >>> [(b.start, b.n_rows, b.first, b.stop) for b in blocks(6, 3)]
    [(0, 8, 6, 8), (8, 8, 8, 9)]
    >>> [(b.start, b.n_rows, b.first, b.stop) for b in blocks(62, 68)]
    [(56, 8, 62, 64), (64, 64, 64, 128), (128, 8, 128, 130)]
    """
    at, end = n_past, n_past + n
    while at < end:
        if at % PREFILL_ROWS == 0 and at + PREFILL_ROWS <= end:
            block = Block(at, PREFILL_ROWS, at, at + PREFILL_ROWS)
        else:
            start = at - at % STEP_ROWS
            block = Block(start, STEP_ROWS, at, min(start + STEP_ROWS, end))
        yield block
        at = block.stop
