"""How long the rest of a prompt takes to read: from the times so far, as attention takes longer at later positions."""

_LEAST_PART = 0.1  # of what is to be read: before, no growth is seen in the noise


class ReadingPace:
    """The pace at which a prompt is read.

    A token at position x takes a + b x seconds, fitted by least squares to the stretches between two reports, each
    weighted with its tokens; neither a nor b is negative.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._sums: tuple[float, ...] = (0.0,) * 5  # of w, w x, w y, w x², w x y; y is seconds a token

    def add(self, n_read: int, seconds: float) -> None:
        """Take a report: how many tokens of the prompt are read, and the time; later ones have more of both."""
        if self._first is None:
            self._first = self._last = (n_read, seconds)
            return
        n, took = n_read - self._last[0], seconds - self._last[1]
        if n > 0 and took > 0:
            x, y = (n_read + self._last[0]) / 2, took / n
            self._sums = tuple(a + b for a, b in zip(self._sums, (n, n * x, n * y, n * x * x, n * x * y), strict=True))
            self._last = (n_read, seconds)

    @property
    def per_s(self) -> float | None:
        """Tokens a second so far; None before the second report."""
        if self._first is None or self._last == self._first:
            return None
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])

    def left_s(self, n_all: int) -> float | None:
        """Return the seconds from the latest report to `n_all` tokens; None before the second report."""
        if self._first is None or self._last == self._first:
            return None
        n_last, (w, wx, wy, wxx, wxy) = self._last[0], self._sums
        x, y = wx / w, wy / w
        spread = wxx / w - x * x
        growth = (wxy / w - x * y) / spread if spread > 0 else 0.0
        if n_last - self._first[0] < _LEAST_PART * (n_all - self._first[0]):
            growth = 0.0
        growth = min(max(growth, 0.0), y / x if x > 0 else 0.0)
        middle = (n_last + n_all) / 2
        return max(0, n_all - n_last) * (y + growth * (middle - x))
