"""Several ways to evaluate tokens on a session, all of which must give a row the same bits."""

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.runtime import Runtime

Tokens = NDArray[np.int32]
Bits = NDArray[np.uint32]


def bits(logits: NDArray[np.float32]) -> Bits:
    """Return a copy of the rows as the bits they are; what is no number is never equal to anything."""
    assert np.isfinite(logits).all(), "logits hold what is no number"
    return logits.view(np.uint32).copy()


def extend(session: Session, tokens: Tokens, sizes: tuple[int, ...] = ()) -> Bits:
    """Evaluate a chain after what is cached, in chunks of these sizes and then the rest; return all its rows."""
    borders = [0, *(int(end) for end in np.cumsum(sizes, dtype=int) if end < len(tokens)), len(tokens)]
    rows = [
        bits(session.forward(tokens[begin:end], n_past=session.n_cached, rows="all").logits)
        for begin, end in itertools.pairwise(borders)
        if end > begin
    ]
    return np.concatenate(rows)


def one_by_one(session: Session, tokens: Tokens) -> Bits:
    """Evaluate a chain in steps of one token; return all its rows."""
    return extend(session, tokens, (1,) * len(tokens))


def paths(parents: Tokens) -> list[list[int]]:
    """Return for every row of a tree the rows from the root to it.

    >>> paths(np.array([-1, 0, 0, 1]))
    [[0], [0, 1], [0, 2], [0, 1, 3]]
    """
    found: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else []), row])
    return found


def all_logits(
    runtime: Runtime, path: Path, kv_type: str = "f16", *, tokens: Tokens, n_threads: int = 1
) -> NDArray[np.float64]:
    """Return float64[n, n_vocab], the logits of all rows of a text, read in one forward."""
    n = max(64, 1 << (len(tokens) - 1).bit_length())
    with runtime.load(path, LoadOptions(n_ctx=n, n_threads=n_threads, max_rows=n, kv_type=kv_type)) as model:
        return model.session(n).forward(tokens, n_past=0, rows="all").logits.astype(np.float64)


def distance(found: NDArray[np.floating], expected: NDArray[np.floating], n_odd: int = 0) -> float:
    """Return the root mean square of the differences over that of the expected values around their mean.

    The n_odd rows that are farthest apart do not count.
    """
    exact = expected.astype(np.float64)
    squares = np.sort(np.square(found - exact).mean(-1))
    return float(np.sqrt(squares[: len(squares) - n_odd].mean() / exact.var()))
