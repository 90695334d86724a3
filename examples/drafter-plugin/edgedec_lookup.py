"""Prompt lookup: propose the tokens behind the last earlier place where the text's last few tokens stand.

Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Mapping, Sequence
from time import monotonic

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds

LONGEST_MATCH = 4


class Lookup:
    """A drafter, made for one generation: it proposes tokens, and learns the outcome of every step."""

    needs = DrafterNeeds()

    def __init__(self, context: DraftContext) -> None:
        self._ids: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        self._ids = list(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        for n in range(LONGEST_MATCH, 0, -1):
            for end in range(len(self._ids) - 1, n - 1, -1):
                if self._ids[end - n : end] == self._ids[-n:]:
                    return Draft.chain(self._ids[end : end + n_max], p_accept=n / (n + 1))
            if monotonic() > deadline_s:
                break
        return EMPTY_DRAFT

    def learn(self, verification: Verification, hidden: Mapping[int, object]) -> None:
        self._ids.extend(verification.token_ids)

    def memory_bytes(self) -> int:
        return 40 * len(self._ids)  # a pointer and a Python int for each token
