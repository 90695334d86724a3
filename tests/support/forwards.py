"""Forwards of one session, and how far logits are from others."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.runtime import Runtime


def evaluated(session: Session, n_past: int, *groups: RowGroup, **wanted: Any) -> Forward:
    """Evaluate groups of rows behind `n_past` cached tokens; `wanted` are further fields of ForwardItem."""
    return session.evaluate(ForwardItem(session, n_past, groups, **wanted))


def all_logits(
    runtime: Runtime, path: Path, tokens: NDArray[np.int32], *, kv_type: str = "f16", **wanted: Any
) -> NDArray[np.float32]:
    """Load a model and return its logits behind all tokens of a text; `wanted` are further arguments of forward()."""
    with runtime.load(path, LoadOptions(n_ctx=64, n_threads=1, max_rows=64, kv_type=kv_type)) as model:
        return model.session(64).forward(tokens, n_past=0, rows="all", **wanted).logits.copy()


def distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the root mean square of the differences divided by the spread of the expected values."""
    expected = expected.astype(np.float64)
    return float(np.sqrt(np.square(found - expected).mean() / expected.var()))
