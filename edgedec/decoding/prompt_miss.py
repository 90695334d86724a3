"""Why a prompt is read again though most of its text was kept: where it differs, and how much is equal behind that.

Nothing behind a difference is exact: keys and values depend on all text before them, and on their positions. Reading
a share of the rows again (CacheBlend, Yao et al. 2025, arXiv:2405.16444) would be another text, so it is not done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgedec.errors import counted
from edgedec.sequence import n_common

_LEAST = 256  # tokens behind the difference that both texts have; else there is nothing to tell
_RUN = 32  # tokens that are compared together
_BEFORE, _MOST = 12, 40  # characters of an excerpt: before the difference, and in all


@dataclass(frozen=True, slots=True)
class PromptMiss:
    """Where a prompt leaves the kept one, of which it has much behind that, too.

    Attributes:
        counts: A sentence with numbers of tokens alone, which a log may show.
        places: Both texts where they differ, at most 40 characters of each.
    """

    counts: str
    places: str


def miss_of(
    held: Sequence[int], prompt: Sequence[int], n_reused: int, piece: Callable[[int], bytes]
) -> PromptMiss | None:
    """Return why most of a prompt is read again; None where the texts have little in common behind a difference.

    Args:
        held: The tokens that were kept.
        prompt: The prompt's tokens. A negative number stands for a row of a picture.
        n_reused: How many of its tokens are not read again.
        piece: Returns the bytes of a token.
    """
    n = n_common(held, prompt, len(prompt))
    if n_reused > n or min(len(held), len(prompt)) - n < _LEAST:
        return None
    before, behind = tuple(held[n:]), tuple(prompt[n:])
    runs = {hash(behind[i : i + _RUN]) for i in range(len(behind) - _RUN + 1)}
    starts = range(0, len(before) - _RUN + 1, _RUN)
    n_again = min(_RUN * sum(hash(before[i : i + _RUN]) in runs for i in starts), len(behind))
    if n_again < _LEAST:
        return None
    first = counted(n, "token")
    counts = (
        f"the prompt has the first {first} of the kept one; about {n_again} behind a difference are the same, and read "
        "again, as keys and values depend on the text before"
    )
    return PromptMiss(counts, f"they differ at {_excerpt(held, n, piece)} and at {_excerpt(prompt, n, piece)}")


def _excerpt(ids: Sequence[int], place: int, piece: Callable[[int], bytes]) -> str:
    """Return the text around a token, what can't be printed escaped."""

    def text(begin: int, end: int) -> str:
        return b"".join(piece(token_id) for token_id in ids[begin:end] if token_id >= 0).decode("utf-8", "replace")

    before = text(max(place - _BEFORE, 0), place)[-_BEFORE:]
    return repr(before + text(place, place + _MOST)[: _MOST - len(before)])
