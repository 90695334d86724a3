"""The cost of one session's rows in forwards that it shares with others."""

from threading import Lock

from edgedec.cost_curve import CostCurve
from edgedec.model import Session


class JoinedCurve(CostCurve):
    """T(n) for one of several sessions: the seconds of a forward with n rows of this session and one of each other.

    The curve that the sessions have in common notes every forward with all of its rows.

    Attributes:
        others: Sequences besides this one in the latest forward. Each of them is expected to bring one row to the next
            forward and to gain one token by it. Their drafts are not counted, neither as rows nor as tokens: a draft
            that all others take for granted would look cheap to each of them, and would be made for ever.
    """

    def __init__(self, common: CostCurve, session: Session, lock: Lock) -> None:
        super().__init__()
        self.trials = common.trials
        self._common = common
        self._session = session
        self._lock = lock
        self._n_others = 0

    def observe(self, n_rows: int, seconds: float, n_past: int = 0, keep_s: float | None = None) -> None:
        """Take a step with `n_rows` own rows; the rows and seconds of the whole forward are read from the session."""
        shared = self._session.shared
        assert shared is not None, "a joined curve is made for sessions whose forwards are shared"
        self._n_others = shared.n_items - 1
        self.others = float(self._n_others)
        with self._lock:
            self._common.observe(shared.n_rows, shared.seconds, n_past, keep_s)
            self.latest_s = self._common.latest_s
            self.keep_s = self._common.keep_s

    def seconds(self, n_rows: int, n_past: int = 0) -> float | None:
        """Return the expected seconds of a forward with `n_rows` own rows, None where nothing was measured."""
        with self._lock:
            return self._common.seconds(self._n_others + n_rows, n_past)

    def is_unknown(self, n_rows: int) -> bool:
        """Tell whether no forward with `n_rows` own rows or more, and the rows of the others, was ever timed."""
        with self._lock:
            return self._common.is_unknown(self._n_others + n_rows)

    def up_to(self, n_rows: int, n_past: int = 0) -> list[float]:
        """Return the seconds of forwards with 1 to `n_rows` own rows."""
        with self._lock:
            return self._common.up_to(self._n_others + n_rows, n_past)[self._n_others :]

    def table(self) -> dict[int, float]:
        """Return the seconds that were measured, by the number of all rows of a forward."""
        with self._lock:
            return self._common.table()
