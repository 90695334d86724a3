"""Measures what a token through a part of the layers takes."""

from time import perf_counter

import numpy as np

from edgedec.model import LayerSet, Session

_N_PAST = 32
_TURNS = 9  # measurements of each of two forwards that are compared


def part_cost(session: Session, layers: LayerSet) -> float:
    """Return the time of one token through some half-layers, in times of a token through all layers.

    Both times are the least of several forwards, which take turns. What the session holds is lost.

    Raises:
        CapabilityError: The runtime can't leave out layers.
    """
    n_past = min(_N_PAST, session.n_ctx - 1)
    tokens = np.arange(n_past + 1, dtype=np.int32) % session.model.card.n_vocab
    if n_past:
        session.forward(tokens[:-1], n_past=0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for into, subset in zip(seconds, (None, layers), strict=True):
            started = perf_counter()
            session.forward(tokens[-1:], n_past=n_past, layers=subset)
            into.append(perf_counter() - started)
    return min(seconds[1]) / max(min(seconds[0]), 1e-9)
