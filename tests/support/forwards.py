"""Forwards of one session."""

from typing import Any

from edgedec.model import Forward, ForwardItem, RowGroup, Session


def evaluated(session: Session, n_past: int, *groups: RowGroup, **wanted: Any) -> Forward:
    """Evaluate groups of rows behind `n_past` cached tokens; `wanted` are further fields of ForwardItem."""
    return session.evaluate(ForwardItem(session, n_past, groups, **wanted))
