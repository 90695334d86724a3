"""T(n): what one forward over n rows costs, as measured."""

from bisect import bisect_left
from statistics import median

_REMEMBERED = 33


class CostCurve:
    """Median seconds of a forward by number of rows, from the real steps of this process.

    The curve may be jagged. A number of rows that was never measured is bounded by the next measured one above it,
    as the missing rows could be padded.

    >>> curve = CostCurve()
    >>> for n_rows, seconds in [(1, 0.010), (1, 0.012), (1, 0.050), (8, 0.030)]:
    ...     curve.observe(n_rows, seconds)
    >>> curve.seconds(1), curve.seconds(5), curve.seconds(9)
    (0.012, 0.03, None)
    """

    def __init__(self) -> None:
        self._samples: dict[int, list[float]] = {}

    def observe(self, n_rows: int, seconds: float) -> None:
        """Take the measured time of one forward; only the latest few of each n are remembered."""
        samples = self._samples.setdefault(n_rows, [])
        samples.append(seconds)
        del samples[:-_REMEMBERED]

    def seconds(self, n_rows: int) -> float | None:
        """Return the expected time of a forward over `n_rows` rows, or None above all that was measured."""
        measured = sorted(self._samples)
        index = bisect_left(measured, n_rows)
        return median(self._samples[measured[index]]) if index < len(measured) else None

    def table(self) -> dict[int, float]:
        """Return the measured points, by rising n."""
        return {n_rows: median(self._samples[n_rows]) for n_rows in sorted(self._samples)}
