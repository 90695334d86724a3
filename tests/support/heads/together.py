"""Chains of several texts, which a head drafts in one call."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.head_state import ChainRules, DraftCall, DraftedChain, HeadState
from edgedec.model import Session


def drafted_together(
    sessions: Sequence[tuple[Session, int]], token_ids: NDArray[np.int32], rules: ChainRules
) -> list[DraftedChain]:
    """Return the chains behind texts of which the sessions hold so many of `token_ids`, drafted together."""
    calls: list[DraftCall] = []
    threads = ThreadPoolExecutor(len(sessions))
    all_there = Barrier(len(sessions), action=lambda: calls[0].answer(calls[1:]))

    def joined(call: DraftCall) -> SharedForward:
        calls.append(call)
        all_there.wait(30)
        return SharedForward(0.0, len(calls), len(calls))

    with threads:
        found = [
            threads.submit(_head_of(session).seen_by(joined=joined).chain, n, int(token_ids[n]), rules)
            for session, n in sessions
        ]
        return [future.result(30) for future in found]


def _head_of(session: Session) -> HeadState:
    assert session.draft_head is not None
    return session.draft_head
