"""What decides about drafts: the interface of a policy, and the simplest one, a drafter that is always asked."""

from collections.abc import Mapping
from time import monotonic
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Drafter, DrafterNeeds, Verification
from edgedec.errors import PluginError
from edgedec.model import Session
from edgedec.stats import DecodeStats

_DEADLINE_S = 1.0


class Proposer(Protocol):
    """Says before each step what to verify, and learns from what came of it; never raises for a drafter's fault."""

    @property
    def needs(self) -> DrafterNeeds:
        """What its drafters ask of the target."""

    def propose(self, stats: DecodeStats, n_past: int, n_max: int) -> Draft:
        """Return at most `n_max` nodes to verify after `n_past` cached tokens and the last one; often none."""

    def learn(
        self,
        stats: DecodeStats,
        draft: Draft,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Take the outcome of a step, drafted or plain."""


class Pinned:
    """One drafter, asked before every step for as many nodes as allowed, whatever that costs.

    Attributes:
        drafter: The drafter; None once it has failed.
        n_max: Most nodes of a draft.
    """

    def __init__(self, drafter: Drafter, n_max: int, session: Session) -> None:
        self.drafter: Drafter | None = drafter
        self.n_max = n_max
        self._session = session

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter asks of the target."""
        return self.drafter.needs if self.drafter else DrafterNeeds()

    def propose(self, stats: DecodeStats, n_past: int, n_max: int) -> Draft:
        """Ask the drafter."""
        n_max = min(n_max, self.n_max)
        if self.drafter is None or n_max < 1:
            return EMPTY_DRAFT
        try:
            return asked(self.drafter, self._session, n_max, monotonic() + _DEADLINE_S)
        except Exception as error:
            self._drop(stats, error)
            return EMPTY_DRAFT

    def learn(
        self,
        stats: DecodeStats,
        draft: Draft,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Tell the drafter."""
        if self.drafter is None:
            return
        try:
            self.drafter.accept(verification, hidden)
        except Exception as error:
            self._drop(stats, error)

    def _drop(self, stats: DecodeStats, error: Exception) -> None:
        """Go on without a drafter that failed: a drafter never changes the text, so it never ends it either."""
        self.drafter = None
        stats.add_reason(f"drafting off: the drafter failed ({described(error)})")


def asked(drafter: Drafter, session: Session, n_max: int, deadline_s: float, *, any_shape: bool = False) -> Draft:
    """Return a drafter's proposal, checked.

    Args:
        drafter: Whom to ask.
        session: The target's.
        n_max: Most nodes; what comes beyond them is cut off.
        deadline_s: When it is due, on the monotonic clock.
        any_shape: Take a tree where the runtime verifies only chains, for a caller that chooses a chain of it.

    Raises:
        PluginError, CapabilityError: It is no draft, or one that the runtime can't verify.
        Exception: Whatever the drafter raises.
    """
    draft = drafter.draft(n_max, deadline_s)
    if not isinstance(draft, Draft):
        raise PluginError(f"draft() returned a {type(draft).__name__}; it must return an edgedec Draft")
    kinds = [type(array) for array in (draft.tokens, draft.parents, draft.p_accept)]
    if kinds != [np.ndarray] * 3:  # a masked array passes every comparison and still holds what is no number
        names = ", ".join(kind.__name__ for kind in kinds)
        raise PluginError(f"a draft's tokens, parents and p_accept must be plain numpy arrays, found {names}")
    draft = draft.truncated(n_max)
    draft.check(session.model.card.n_vocab)
    if not any_shape and not draft.is_chain:
        session.model.capabilities.require("trees", session.model.card.runtime)
    return draft


def described(error: BaseException) -> str:
    """Return an error's kind and message, whatever its own __str__ does."""
    try:
        message = str(error)
    except Exception:
        message = "its message can't be shown"
    return f"{type(error).__name__}: {message}"
