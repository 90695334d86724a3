"""Whether a single step has the bits of the same row among several: found by trying.

ONNX Runtime's kernels choose their way by the number of rows, differently by machine and release. Attention gets a
second row in a single step (feeds.py), which on the x86-64 machines tried makes that equal to rows of any number as far
as weights are packed; where it does not, the whole graph gets it. Where a kernel has yet another way for four rows,
say, edgedec_runtimes.shared.invariance finds that.
"""

from pathlib import Path

import numpy as np

from edgedec.model import Model
from edgedec.storage import probe_cache
from edgedec_runtimes.shared.invariance import KIND

_N_FEW = 3  # rows that take every way there is on the machines tried: in pairs, and one that is left over


def one_row_is_exact(model: Model, cache_dir: Path | None) -> bool:
    """Tell whether single steps have the bits of the same rows in one forward, as the model evaluates them now.

    Remembered in `cache_dir` by the model's fingerprint, which names export, release, device and machine; it takes
    about four forwards.
    """
    key = f"{model.card.fingerprint} one row"
    found = probe_cache.get(cache_dir, KIND, key)
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
    probe_cache.put(cache_dir, KIND, key, exact)
    return exact
