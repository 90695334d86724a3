"""The cost of one session's rows in forwards that it shares with others."""

from threading import Lock

from edgedec.cost_curve import CostCurve
from edgedec.sessions.batching import BatchedSession


class JoinedCurve(CostCurve):
    """T(n) as one of several sessions sees it: what its n rows cost on top of those that the others bring.

    Forwards are noted with all their rows in the curve that the sessions have in common.

    Attributes:
        others: Sequences besides this one in the latest forward; each gains a token by the next one too, and brings a
            row. What they draft is not counted on either side: a draft that every other one takes for granted would
            look cheap to all of them, and be made for ever.
    """

    def __init__(self, common: CostCurve, session: BatchedSession, lock: Lock) -> None:
        super().__init__()
        self.trials = common.trials
        self._common = common
        self._session = session
        self._lock = lock
        self._n_others = 0

    def observe(self, n_rows: int, seconds: float, n_past: int = 0, keep_s: float | None = None) -> None:
        """Take a step of `n_rows` own rows; what its forward took in all is the session's to say."""
        shared = self._session.shared
        self._n_others = shared.n_items - 1
        self.others = float(self._n_others)
        with self._lock:
            self._common.observe(shared.n_rows, shared.seconds, n_past, keep_s)
            self.latest_s = self._common.latest_s
            self.keep_s = self._common.keep_s

    def seconds(self, n_rows: int, n_past: int = 0) -> float | None:
        """Return the expected time of a forward with `n_rows` own rows, None where nothing was measured."""
        with self._lock:
            return self._common.seconds(self._n_others + n_rows, n_past)

    def is_unknown(self, n_rows: int) -> bool:
        """Tell whether no forward of as many own rows, with those of the others, was ever timed."""
        with self._lock:
            return self._common.is_unknown(self._n_others + n_rows)

    def up_to(self, n_rows: int, n_past: int = 0) -> list[float]:
        """Return the seconds of forwards with 1 to `n_rows` own rows."""
        with self._lock:
            return self._common.up_to(self._n_others + n_rows, n_past)[self._n_others :]

    def table(self) -> dict[int, float]:
        """Return what was measured, by the rows of all."""
        with self._lock:
            return self._common.table()
