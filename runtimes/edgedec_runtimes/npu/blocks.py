"""Cuts a forward into runs of graphs with a fixed number of rows, so that a row's bits don't depend on the cut.

A run of the graph of 8 rows takes positions 8 i to 8 i + 7, however many of them are new. Rows before the new ones are
evaluated again (from their tokens, to the same keys and values); rows behind them are padding that no row sees. So a
position is always the same row of the same block on the same cached tokens, in a single step as in a long draft. The
graph of 64 rows takes only 64 new positions that begin at a multiple of 64: prefills have such blocks, drafts do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edgedec_runtimes.npu.facts import ROWS

STEP_ROWS, PREFILL_ROWS = ROWS


@dataclass(frozen=True, slots=True)
class Block:
    """One run of a graph.

    Attributes:
        start: Position of the run's first row; the tokens before it are cached.
        n_rows: Rows of the graph.
        first: Position of the first new row.
        stop: Position after the last new row.
    """

    start: int
    n_rows: int
    first: int
    stop: int


def blocks(n_past: int, n: int) -> Iterator[Block]:
    """Yield the runs that evaluate n new rows after n_past cached tokens.

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
