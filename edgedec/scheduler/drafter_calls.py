"""A call of a drafter: its draft, checked, or its error in words."""

import numpy as np

from edgedec.draft import Draft, Drafter
from edgedec.errors import PluginError


def ask(drafter: Drafter, n_vocab: int, n_max: int, deadline_s: float) -> Draft:
    """Return the first `n_max` nodes of what a drafter proposes now, checked.

    Args:
        drafter: The drafter.
        n_vocab: Size of the target's vocabulary.
        n_max: Most nodes; further nodes are cut off.
        deadline_s: When the draft is due, on the monotonic clock.

    Raises:
        PluginError: What came back is no draft.
        Exception: Whatever the drafter raises.
    """
    draft = drafter.draft(n_max, deadline_s)
    if not isinstance(draft, Draft):
        raise PluginError(f"draft() returned a {type(draft).__name__}; it must return an edgedec Draft")
    kinds = type(draft.tokens), type(draft.parents), type(draft.p_accept)
    if kinds != _KINDS:  # a masked array passes every comparison, and can still hold what is no number
        names = ", ".join(kind.__name__ for kind in kinds)
        raise PluginError(f"a draft's tokens, parents and p_accept must be plain numpy arrays, found {names}")
    if len(draft.tokens) > n_max:
        draft = draft.truncated(n_max)
    draft.check(n_vocab)
    return draft


_KINDS = (np.ndarray, np.ndarray, np.ndarray)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message, also where its own __str__ fails."""
    try:
        message = str(error)
    except Exception:
        message = "its message can't be shown"
    return f"{type(error).__name__}: {message}"
