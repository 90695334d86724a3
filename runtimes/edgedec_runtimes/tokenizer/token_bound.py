"""A lower bound for the number of tokens of a text, from its bytes, without tokenizing it.

A byte is of one of five kinds: white space, letter, digit, punctuation, beyond ASCII. For each kind there is a largest
number of such bytes in one token of the vocabulary. A text's bytes of a kind divided by that number are a lower bound,
and the largest of the five bounds is taken. Tokenizing a text can take a hundred times its memory; the bound takes some
100 kB.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

_WHITE_SPACE, _LETTERS, _DIGITS, _PUNCTUATION, _BEYOND_ASCII, _NOT_COUNTED = range(6)
_N_KINDS = 5  # that are counted
_BLOCK_CHARACTERS = 1 << 14
_BLOCK_TOKENS = 1 << 12


def _kinds() -> NDArray[np.uint8]:
    kinds = np.full(256, _PUNCTUATION, np.uint8)
    kinds[:33] = _WHITE_SPACE
    kinds[128:] = _BEYOND_ASCII
    for characters, kind in (("0123456789", _DIGITS), ("abcdefghijklmnopqrstuvwxyz", _LETTERS)):
        for character in characters + characters.upper():
            kinds[ord(character)] = kind
    return kinds


_KINDS = _kinds()


class TokenBound:
    """The bound for one vocabulary.

    Args:
        token_bytes: The bytes of text that each token can stand for; a token may be given several times.
        dropped_bytes: Bytes that the tokenizer may drop from a text, so that they are in none of its tokens.
    """

    def __init__(self, token_bytes: Iterable[bytes], dropped_bytes: bytes = b"") -> None:
        self._most = np.ones(_N_KINDS, np.int64)  # 1: a token of a single byte, which byte fallback has
        tokens = iter(token_bytes)
        while block := list(islice(tokens, _BLOCK_TOKENS)):
            self._most = np.maximum(self._most, _most_of_kinds(block))
        self._kinds = _KINDS.copy()
        self._kinds[list(dropped_bytes)] = _NOT_COUNTED

    def least_tokens(self, text: str) -> int:
        """Return the bound for a text.

        >>> TokenBound([b"a", b"aaaa", b"  "]).least_tokens("aaaaa b")
        2
        """
        counts = np.zeros(_N_KINDS, np.int64)
        for block in _blocks(text):
            counts += np.bincount(self._kinds[np.frombuffer(block, np.uint8)], minlength=_N_KINDS + 1)[:_N_KINDS]
        return int((-(-counts // self._most)).max())


def _most_of_kinds(tokens: list[bytes]) -> NDArray[np.int64]:
    """Return int64[kinds], the most bytes of each kind in one of the tokens."""
    kinds = _KINDS[np.frombuffer(b"".join(tokens), np.uint8)]
    ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
    most = np.zeros(_N_KINDS, np.int64)
    for kind in range(_N_KINDS):
        before = np.concatenate([[0], np.cumsum(kinds == kind)])
        most[kind] = np.diff(before[ends], prepend=0).max()
    return most


def _blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _BLOCK_CHARACTERS):
        yield text[start : start + _BLOCK_CHARACTERS].encode("utf-8", "surrogatepass")
