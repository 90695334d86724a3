"""A text in a model's tokens with the order of its suffixes: eight bytes a token, read from a mapped file."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SortedText:
    """A text whose suffixes are sorted, so that every place of a context is found by bisection.

    Attributes:
        tokens: int32[n], the token ids; -1 ends each file, the last one, too.
        order: int32[n], the places of the text, sorted by the tokens from there on, of which the first 64 count.
    """

    tokens: NDArray[np.int32]
    order: NDArray[np.int32]
