"""A session whose forwards are interrupted in the middle, as by Ctrl-C."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Forward, Session


class Stopped:
    """A session whose forwards of more than a token are interrupted in the middle, as often as it is told to.

    Attributes:
        n_times: How often yet.
    """

    def __init__(self, inner: Session) -> None:
        self._inner, self.n_times = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, tokens: NDArray[np.int32], *, n_past: int, **options: Any) -> Forward:
        """Evaluate half of the tokens and raise, or all of them."""
        if self.n_times and len(tokens) > 1:
            self.n_times -= 1
            self._inner.forward(tokens[: len(tokens) // 2], n_past=n_past)
            raise KeyboardInterrupt
        return self._inner.forward(tokens, n_past=n_past, **options)
