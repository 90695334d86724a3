"""What a drafter's p_accept is worth: observed acceptance by bins of what it said, forgetting slowly."""

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
_PRIOR = 6.0  # observations that a bin's first say is worth
_MEMORY = 250.0  # observations after which old ones count half
_MOST = 0.995


class Calibration:
    """P(node accepted | parent accepted) from the drafter's own estimate.

    A bin keeps the sum of the estimates and of the acceptances; an estimate is scaled by their ratio, so that the order
    within a bin stays.

    >>> calibration = Calibration()
    >>> for _ in range(94):
    ...     calibration.observe(0.5, False)
    >>> round(calibration.corrected(0.5), 3)
    0.03
    """

    __slots__ = ("_accepted", "_factors", "_said")

    def __init__(self) -> None:
        n = len(_EDGES) + 1
        self._said = [0.0] * n
        self._accepted = [0.0] * n
        self._factors = [1.0] * n

    def corrected(self, p: float) -> float:
        """Return the estimate corrected by what was observed; 0 to 0.995."""
        return min(_MOST, p * self._factors[_bin(p)])

    def observe(self, p: float, accepted: bool) -> None:
        """Take what became of a node whose parent was accepted, verified or not."""
        i = _bin(p)
        said, hits = self._said[i] + p, self._accepted[i] + accepted
        if said > _MEMORY * max(p, 0.05):
            said, hits = said / 2, hits / 2
        self._said[i], self._accepted[i] = said, hits
        prior = _PRIOR * max(p, 0.01)
        self._factors[i] = (hits + prior) / (said + prior)


def _bin(p: float) -> int:
    for i, edge in enumerate(_EDGES):
        if p < edge:
            return i
    return len(_EDGES)
