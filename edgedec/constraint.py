"""What may follow a text that keeps to a grammar, and each path of a draft."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_FORBIDDEN = np.float32(-np.inf)


class GrammarState(Protocol):
    """A text's place in a grammar. Goes forth and back; what is allowed depends on the tokens taken alone."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; more may follow."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], the tokens that may follow; end tokens where the text may end.

        Raises:
            RequestError: None may follow, or finding out takes more than the limits allow.
        """

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow; may be fewer than there are."""

    def advance(self, token_id: int) -> bool:
        """Take a token; False, with nothing changed, where the grammar has no place for it."""

    def back(self, n_tokens: int) -> None:
        """Take back the latest tokens."""

    def close(self) -> None:
        """Free the memory of this place; calling it again does nothing."""


class Constraint:
    """The grammar of one generation: what may follow the text so far, and each path of a draft.

    Attributes:
        note: What a person should know of how the text came about; may be empty.
    """

    note = ""

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._ahead: list[int] = []  # tokens that the state holds beyond the text
        self._n_left: int | None = None

    def begin(self, n_tokens: int) -> None:
        """Learn how many tokens the text may have, before the first; without it, as many as it likes.

        Raises:
            RequestError: They are too few.
        """
        self._n_left = n_tokens

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow, or nothing has room."""
        return self._n_left == 0 or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        self._go(())
        return self._state.is_complete

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; more may follow."""
        self._go(())
        return self._state.may_end

    def masked(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return f32[n_vocab], the logits with -inf for every token that may not follow the text and `path`.

        Args:
            logits: f32[n_vocab], of the row of the path's last token; not changed.
            path: Tokens of a draft, which stand only if they are allowed themselves.

        Raises:
            RequestError: No token may follow, or finding out takes more than the limits allow.
        """
        allowed = self._state.allowed() if self._go(path) else np.zeros(0, np.bool_)
        n = min(len(allowed), len(logits))
        masked = np.full_like(logits, _FORBIDDEN)  # rows may be longer than the vocabulary
        np.copyto(masked[:n], logits[:n], where=allowed[:n])
        return masked

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Tell whether a token has a place after the text and `path`; some tokenizations that are never drawn have."""
        return self._go((*path, token_id))

    def forced(self) -> tuple[int, ...]:
        """Return tokens that are certain to follow the text; may be fewer than there are."""
        self._go(())
        return tuple(self._state.forced())

    def commit(self, token_id: int) -> int:
        """Take the token that was chosen for the text, or another one in its place, and return the one taken."""
        if self._n_left is not None:
            self._n_left -= 1
        if not self._ahead:
            self._state.advance(token_id)
        elif self._ahead[0] == token_id:
            del self._ahead[0]
        else:
            self._go((token_id,))
            self._ahead.clear()
        return token_id

    def close(self) -> None:
        """Free the memory of the grammar's place; the constraint is of no use afterwards."""
        self._state.close()

    def _go(self, path: Sequence[int]) -> bool:
        """Stand after the text and a path; False, somewhere on the way, where the grammar has no place for it."""
        common = 0
        while common < min(len(path), len(self._ahead)) and path[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._state.back(len(self._ahead) - common)
            del self._ahead[common:]
        for token_id in path[common:]:
            if not self._state.advance(token_id):
                return False
            self._ahead.append(token_id)
        return True
