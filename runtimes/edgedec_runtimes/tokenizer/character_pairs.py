"""Byte-pair encoding over characters, as in Gemma 4: U+2581 stands for a space, and bytes for what is no token."""

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from edgedec.gguf.file import GGUF
from edgedec_runtimes.tokenizer.merging import merge
from edgedec_runtimes.tokenizer.metadata import Vocabulary, read_merges
from edgedec_runtimes.tokenizer.spm import SPACE, SpacedTokens
from edgedec_runtimes.tokenizer.string_table import StringTable

_N_REMEMBERED_PAIRS = 2**13
_SPACE_BYTES = SPACE.encode()


class CharacterPairs(SpacedTokens):
    """Encodes the text between special tokens by byte-pair encoding over characters.

    Args:
        gguf: The model, for its merges.
        vocabulary: The model's tokens.
    """

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._merges = read_merges(gguf)
        self._remembered_rank = lru_cache(_N_REMEMBERED_PAIRS)(self._rank)
        self._bytes = [self._tokens.find(b"<0x%02X>" % byte) for byte in range(256)]
        # No merge joins a space to a character before it that is not one of these, so a text can be cut there.
        joined = "".join(map(re.escape, _before_spaces(self._merges)))
        self._words = re.compile(f"\n+|[^\n]+?(?=\n|\\Z|(?<![{SPACE}{joined}]){SPACE})")

    def words(self, text: str, *, after_special: bool) -> Iterator[str]:
        """Yield the parts of a text that can be encoded each by itself; `after_special` does not matter here."""
        return (match[0] for match in self._words.finditer(text.replace(" ", SPACE)))

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word."""
        if word.startswith("\n"):
            whole = self._tokens.find(word.encode())
            if whole >= 0:
                return (whole,)
        ids: list[int] = []
        for symbol in merge([character.encode() for character in word], self._remembered_rank):
            token_id = self._tokens.find(symbol)
            ids += [token_id] if token_id >= 0 else (self._bytes[byte] for byte in symbol if self._bytes[byte] >= 0)
        return tuple(ids)

    def _rank(self, left: bytes, right: bytes) -> int | None:
        rank = self._merges.find(left + b" " + right)
        return rank if rank >= 0 else None

    def dropped_bytes(self) -> bytes:
        """Return the bytes without a token, which encoding drops."""
        return bytes(byte for byte in range(256) if self._bytes[byte] < 0)


def _before_spaces(merges: StringTable) -> list[str]:
    """Return the characters to which some merge joins a space behind them, in order."""
    blob = np.frombuffer(merges.blob, np.uint8)
    first, second, third = _SPACE_BYTES
    gaps = np.flatnonzero(
        (blob[:-3] == ord(" ")) & (blob[1:-2] == first) & (blob[2:-1] == second) & (blob[3:] == third)
    )
    ends = {merges.blob[max(0, at - 4) : at] for at in gaps.tolist()}
    return sorted({end.decode(errors="replace")[-1] for end in ends if end})
