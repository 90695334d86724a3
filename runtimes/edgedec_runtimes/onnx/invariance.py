"""How many rows of a chain are bit-equal to single steps: measured, as ONNX Runtime does not say.

Its kernels choose their way by the number of rows, differently by machine and release. Attention gets a second row in a
single step (feeds.py), which on the x86-64 machines tried makes that equal to rows of any number as far as weights are
packed; where it does not, the whole graph gets it. Where a kernel has yet another way for four rows, say, the answer is
smaller.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgedec.remembered import recall, remember

if TYPE_CHECKING:
    from edgedec_runtimes.onnx.model import OnnxModel

_N_PREFIX = 40
_N_MAX = 16
_N_FEW = 3  # rows that take every way there is on the machines tried: in pairs, and one that is left over


def measured_invariance(model: "OnnxModel", cache_dir: Path | None) -> int:
    """Return the largest n, at most 16, for which the rows of a chain equal single steps, and the step after them.

    Remembered in `cache_dir` by the model's fingerprint, which names export, release, device and machine.
    """
    key = f"{model.card.fingerprint} {_N_MAX}"
    found = recall(cache_dir, "invariance", key)
    if type(found) is int and 1 <= found <= _N_MAX:
        return found
    result = _probe(model)
    remember(cache_dir, "invariance", key, result)
    return result


def one_row_is_exact(model: "OnnxModel", cache_dir: Path | None) -> bool:
    """Tell whether single steps have the bits of the same rows in one forward, as the model evaluates them now.

    Remembered like the above; it takes about four forwards.
    """
    key = f"{model.card.fingerprint} one row"
    found = recall(cache_dir, "invariance", key)
    if type(found) is bool:
        return found
    tokens = np.random.default_rng(0).integers(0, model.card.n_vocab, _N_FEW).astype(np.int32)
    session = model.session(_N_FEW)
    try:
        rows = session.forward(tokens, n_past=0, rows="all").logits.copy()
        steps = [session.forward(tokens[i : i + 1], n_past=i).logits.copy() for i in range(_N_FEW)]
    finally:
        session.close()
    exact = np.array_equal(rows, np.concatenate(steps))
    remember(cache_dir, "invariance", key, exact)
    return exact


def _probe(model: "OnnxModel") -> int:
    rng = np.random.default_rng(0)
    n_tokens = _N_PREFIX + _N_MAX + 1
    tokens = rng.integers(0, model.card.n_vocab, n_tokens).astype(np.int32)
    session = model.session(n_tokens)
    try:
        session.forward(tokens[:_N_PREFIX], n_past=0)
        steps = np.stack(
            [session.forward(tokens[i : i + 1], n_past=i).logits[0].copy() for i in range(_N_PREFIX, n_tokens)]
        )
        for n in range(2, _N_MAX + 1):
            end = _N_PREFIX + n
            rows = session.forward(tokens[_N_PREFIX:end], n_past=_N_PREFIX, rows="all").logits
            if not np.array_equal(rows, steps[:n]):
                return n - 1
            after = session.forward(tokens[end : end + 1], n_past=end).logits[0]
            if not np.array_equal(after, steps[n]):
                return n - 1
        return _N_MAX
    finally:
        session.close()
