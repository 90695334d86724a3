"""What a runtime's session asks of the trained draft head that follows its text, beside what drafting asks of it."""

from typing import Protocol

from edgedec.head_state import HeadState


class Follower(HeadState, Protocol):
    """The state of a draft head that a session keeps, forks, saves and restores together with its KV cache.

    Call its methods with the model's lock held.
    """

    def saved(self, n_tokens: int) -> bytes:
        """Return what the head knows of the first tokens of the text."""

    def restore(self, data: bytes, n_tokens: int) -> None:
        """Know what saved() returned for `n_tokens` tokens; where another head saved it, or b"", know nothing."""
