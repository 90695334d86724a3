"""How many rows of a forward are bit-equal to single steps: measured, where a library does not say.

Its kernels for one row and for several differ by weight type, micro-architecture, release and shape, so the answer
differs by model: every n on some types, n <= 3 on others.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Model
from edgedec.remembered import recall, remember

KIND = "invariance"
"""What answers are remembered as, each by a key of its own."""

N_MAX = 16
N_PREFIX = 40
"""Tokens before the rows compared."""


def measured_invariance(model: Model, cache_dir: Path | None, *, n_prefix: int = N_PREFIX) -> int:
    """Return the largest n (at most 16, and at most the rows loaded for) whose rows equal single steps, and the step
    after them, also where other rows were evaluated and left behind.

    Remembered in `cache_dir` by the model's fingerprint, which names file, release, machine and options.
    """
    n_max = min(N_MAX, model.capabilities.max_rows)
    if n_max == 1 or not model.capabilities.rollback:
        return 1
    found = _known(model.card.fingerprint, n_max, cache_dir, n_prefix)
    if found is not None:
        return found
    result = _probe(model, n_max, n_prefix)
    remember(cache_dir, KIND, _key(model.card.fingerprint, n_max, n_prefix), result)
    return result


def will_probe(fingerprint: str, max_rows: int, cache_dir: Path | None) -> bool:
    """Tell whether a model that is loaded for so many rows would be measured, as nothing is remembered of it."""
    n_max = min(N_MAX, max_rows)
    return n_max > 1 and _known(fingerprint, n_max, cache_dir, N_PREFIX) is None


def _known(fingerprint: str, n_max: int, cache_dir: Path | None, n_prefix: int) -> int | None:
    found = recall(cache_dir, KIND, _key(fingerprint, n_max, n_prefix))
    return found if type(found) is int and 1 <= found <= n_max else None


def _key(fingerprint: str, n_max: int, n_prefix: int) -> str:
    return f"{fingerprint} {n_max} after others" + (f" {n_prefix}" if n_prefix != N_PREFIX else "")


def _probe(model: Model, n_max: int, n_prefix: int) -> int:
    """Compare forwards of n rows, and the single step after each, with n + 1 single steps of a session that only went
    forward; before the first of them it goes back from other rows, as behind a draft that was rejected.
    """
    rng = np.random.default_rng(0)
    n_tokens = n_prefix + n_max + 1
    tokens = rng.integers(0, model.card.n_vocab, n_tokens).astype(np.int32)
    session = model.session(n_tokens)
    try:
        session.forward(tokens[:n_prefix], n_past=0)
        steps = [_digest(session.forward(tokens[i : i + 1], n_past=i).logits[0]) for i in range(n_prefix, n_tokens)]
        session.forward(tokens[-n_max:][::-1], n_past=n_prefix)
        for n in range(2, n_max + 1):
            end = n_prefix + n
            rows = session.forward(tokens[n_prefix:end], n_past=n_prefix, rows="all").logits
            if [_digest(row) for row in rows] != steps[:n]:
                return n - 1
            after = session.forward(tokens[end : end + 1], n_past=end).logits[0]
            if _digest(after) != steps[n]:
                return n - 1
        return n_max
    finally:
        session.close()


def _digest(row: NDArray[np.float32]) -> bytes:
    """Return what stands for a row's bits: rows of a large vocabulary are more than a memory plan has room for."""
    return hashlib.sha256(row.tobytes()).digest()
