"""Finds out by trying whether a single step has the bits of the same row among several.

ONNX Runtime's kernels choose an algorithm by the number of rows, differently by machine and release. In a single step
attention gets a second row (feeds.py). On the x86-64 machines that were tried, a single step is then equal to rows of
any number where weights are packed; where it is not, the whole graph gets the second row. A kernel that differs again
for four rows, say, is found by edgedec_runtimes.shared.invariance.
"""

from pathlib import Path

import numpy as np

from edgedec.model import LayerSet, Model
from edgedec.sessions.cost_probe import as_prompt
from edgedec.storage import probe_cache
from edgedec_runtimes.shared.invariance import KIND

_N_FEW = 3  # rows that use every algorithm on the machines that were tried: a pair, and one row that is left over


def one_row_is_exact(model: Model, cache_dir: Path | None) -> bool:
    """Return whether single steps have the bits of the same rows in one forward, as the model evaluates them now.

    The answer takes four forwards, of three layers where layers can be left out: the first and two in the middle, as
    mixes of weight types give more bits to the first layers and to every third one. It is kept in `cache_dir` by the
    model's fingerprint, which names export, release, device and machine.
    """
    key = f"{model.card.fingerprint} one row"
    stored = probe_cache.get(cache_dir, KIND, key)
    if type(stored) is bool:
        return stored
    tokens = np.random.default_rng(0).integers(0, model.card.n_vocab, _N_FEW).astype(np.int32)
    n, few = model.card.n_layer, None
    if model.capabilities.layers:
        few = LayerSet.of(n, sorted({0, n // 2, min(n // 2 + 1, n - 1)}))
    prompt = as_prompt(tokens, model.tokenizer)
    before = 0 if prompt is tokens else _N_FEW  # an encoder reads a prompt first
    session = model.session(before + _N_FEW)
    try:
        if before:
            session.forward(prompt, n_past=0)
        rows = session.forward(tokens, n_past=before, rows="all", layers=few).logits.copy()
        steps = [session.forward(tokens[i : i + 1], n_past=before + i, layers=few).logits.copy() for i in range(_N_FEW)]
    finally:
        session.close()
    exact = np.array_equal(rows, np.concatenate(steps))
    probe_cache.put(cache_dir, KIND, key, exact)
    return exact
