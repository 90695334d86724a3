"""How many rows of a forward are bit-equal to single steps: measured, as llama.cpp does not say.

Its kernels for one row and for several differ by weight type, micro-architecture and shape, so the answer differs by
model: every n on some types, n <= 3 on others.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edgedec_runtimes.llamacpp.model import LlamaCppModel

_N_PREFIX = 40
_N_MAX = 16


def measured_invariance(model: "LlamaCppModel", cache_dir: Path | None) -> int:
    """Return the largest n (at most 16, and at most the rows loaded for) whose rows equal single steps.

    Remembered in `cache_dir` by the model's fingerprint, which names file, release and options.
    """
    n_max = min(_N_MAX, model.capabilities.max_rows)
    if n_max == 1 or not model.capabilities.rollback:
        return 1
    key = hashlib.sha256(f"{model.card.fingerprint} {n_max}".encode()).hexdigest()[:32]
    remembered = None if cache_dir is None else cache_dir / "probes" / f"invariance-{key}.json"
    if remembered is not None:
        try:
            found = json.loads(remembered.read_text(encoding="utf-8"))["batch_invariant"]
            if isinstance(found, int) and 1 <= found <= n_max:
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: measure again
    result = _probe(model, n_max)
    if remembered is not None:
        _remember(remembered, result)
    return result


def _remember(path: Path, result: int) -> None:
    """Write the answer; without a writable cache it is measured again next time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"batch_invariant": result}), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def _probe(model: "LlamaCppModel", n_max: int) -> int:
    """Compare forwards of n rows, and the single step after each, with n + 1 single steps."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.card.n_vocab, _N_PREFIX + n_max + 1).astype(np.int32)
    session = model.session(_N_PREFIX + n_max + 1)
    try:
        session.forward(tokens[:_N_PREFIX], n_past=0)
        steps = np.stack(
            [
                session.forward(tokens[i : i + 1], n_past=i).logits[0].copy()
                for i in range(_N_PREFIX, _N_PREFIX + n_max + 1)
            ]
        )
        for n in range(2, n_max + 1):
            end = _N_PREFIX + n
            rows = session.forward(tokens[_N_PREFIX:end], n_past=_N_PREFIX, rows="all").logits
            if not np.array_equal(rows, steps[:n]):
                return n - 1
            after = session.forward(tokens[end : end + 1], n_past=end).logits[0]
            if not np.array_equal(after, steps[n]):
                return n - 1
        return n_max
    finally:
        session.close()
