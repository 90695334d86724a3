"""The cost of one session's rows in forwards that it shares with others."""

from threading import Lock

from edgedec.cost_curve import Cost, CostCurve, SharedForward, StepSeconds
from edgedec.draft_constants import NEWEST


class JoinedCurve(CostCurve):
    """T(n) for one of several sessions, with the session's part of what the drafts of all cost.

    A forward has one row of each session, and the rows of drafts. Each session decides as if the others verified drafts
    like its own, as far as they did lately, and pays its part of what all drafts cost together. If a session took the
    others' drafts for granted, its own would look cheap, and would be made for ever; if it expected none, each of four
    sessions would use the same few rows that cost next to nothing.

    The curve that the sessions have in common notes every forward with all of its rows.

    Attributes:
        others: Sequences besides this one in the latest forward. Each of them is expected to gain one token by the next
            one; what it gains by its drafts pays for these.
    """

    def __init__(self, common: CostCurve, lock: Lock) -> None:
        super().__init__()
        self.trials = common.trials
        self._common = common
        self._lock = lock
        self._n_others = 0
        self._drafted = self._drafted_by_others = 1.0  # mean rows of drafts in a forward: own ones, each other's

    def beside(self) -> "JoinedCurve":
        """Return the curve of another session, whose forwards are shared with this one's."""
        return JoinedCurve(self._common, self._lock)

    def observe(self, n_rows: int, seconds: float, n_past: int = 0, keep_s: float | None = None) -> None:
        """Take a step with `n_rows` own rows; the rows and seconds of the whole forward are those of `shared`."""
        shared = self.shared or SharedForward(seconds, n_rows)
        self._look()
        if self._n_others:
            n_drafted = max(0, shared.n_rows - n_rows - self._n_others) / self._n_others
            self._drafted += NEWEST * (n_rows - 1 - self._drafted)
            self._drafted_by_others += NEWEST * (n_drafted - self._drafted_by_others)
        with self._lock:
            if shared is not self._common.joined or keep_s is not None:  # else another session has noted it
                self._common.joined = shared
                self._common.observe(shared.n_rows, shared.seconds, n_past, keep_s)
            assert self._common.latest_s is not None, "the forward was just observed"
            self.latest_s = self._common.latest_s + self._all_beside_s(n_rows - 1)
            self.keep_s = self._common.keep_s

    def _look(self) -> None:
        """Count who else was in the session's latest forward."""
        self.n_texts = 1 if self.shared is None else self.shared.n_items
        self._n_others = self.n_texts - 1
        self.others = float(self._n_others)

    def cost(self, n_past: int = 0) -> Cost:
        """Return the seconds of a step by the nodes of the session's own draft; see CostCurve.cost."""
        self._look()  # behind a prompt nothing is observed yet
        n_others, common = self._n_others, self._common.cost(n_past)
        n_alike = 1 + n_others * min(1.0, self._drafted_by_others / max(self._drafted, 1e-9))

        def find_out(some: range) -> list[float]:
            with self._lock:
                plain = common(n_others)
                more = [(common(n_others + round(n * n_alike)) - plain) / n_alike if n else 0.0 for n in some]
            beside_s = self._all_beside_s(some.start)
            return [plain + more_s + beside_s for more_s in more]

        return StepSeconds(
            find_out
        ).__getitem__  # so that nothing changes in a step while other sessions observe theirs

    def _all_beside_s(self, n_nodes: int) -> float:
        """Return what all sessions together take beside a forward, as their threads share one interpreter."""
        return self.beside_s[n_nodes > 0] + self._n_others * self.beside_s[0]

    def seconds(self, n_rows: int, n_past: int = 0) -> float | None:
        """Return the expected seconds of a forward with `n_rows` own rows, None where nothing was measured."""
        with self._lock:
            is_known = self._common.seconds(1, n_past) is not None
        return self.cost(n_past)(n_rows - 1) if is_known else None

    def is_unknown(self, n_rows: int) -> bool:
        """Tell whether no forward with `n_rows` own rows or more, and the rows of the others, was ever timed."""
        with self._lock:
            return self._common.is_unknown(self._n_others + n_rows)

    def growth(self, n_rows: int) -> float:
        """Return how many times as long as one row `n_rows` rows take, those of all sessions counted."""
        with self._lock:
            return self._common.growth(n_rows)

    def table(self) -> dict[int, float]:
        """Return the seconds that were measured, by the number of all rows of a forward."""
        with self._lock:
            return self._common.table()


def curve_of_fork(curve: CostCurve) -> JoinedCurve:
    """Return the curve of a fork of one session, whose rows are in one forward with those of other forks.

    `curve` is that of the session that was forked, which may share forwards itself.
    """
    return curve.beside() if isinstance(curve, JoinedCurve) else JoinedCurve(curve, Lock())
