"""A session whose forwards are interrupted in the middle, as by Ctrl-C."""

from dataclasses import replace

from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.progress import OnProgress
from edgedec.sessions.outer_session import OuterSession


class Stopped(OuterSession):
    """A session whose forwards of more than a token are interrupted in the middle, as often as it is told to.

    Attributes:
        n_times: How often yet.
    """

    def __init__(self, inner: Session) -> None:
        super().__init__(inner)
        self.n_times = 0

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate half of the tokens and raise, or all of them."""
        tokens = item.groups[0].tokens
        if self.n_times and tokens is not None and len(tokens) > 1:
            self.n_times -= 1
            super().evaluate(replace(item, groups=(RowGroup(tokens[: len(tokens) // 2]),), rows="last", taps=()))
            raise KeyboardInterrupt
        return super().evaluate(item, on_progress)
