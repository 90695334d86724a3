"""Byte-level byte-pair encoding, as in GPT-2: the bytes of a word are merged in the order of a list of pairs."""

from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np

from edgedec.gguf.file import GGUF
from edgedec_runtimes.tokenizer.merging import merge
from edgedec_runtimes.tokenizer.metadata import Vocabulary, damaged, read_merges
from edgedec_runtimes.tokenizer.pretokenizers import PreTokenizer

_N_REMEMBERED_PAIRS = 2**13


class BytePairs:
    """Encodes the text between special tokens by byte-pair encoding.

    Args:
        gguf: The model, for its merges.
        vocabulary: The model's tokens.
        pre_tokenizer: Cuts a text into words.
    """

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer) -> None:
        self._tokens = vocabulary.tokens
        self._merges = read_merges(gguf)
        self._pre_tokenizer = pre_tokenizer
        self._remembered_rank = lru_cache(_N_REMEMBERED_PAIRS)(self._rank)
        _check_utf8(gguf, vocabulary)

    def words(self, text: str, *, after_special: bool) -> Iterator[str]:
        """Yield the words of a text, each of which is encoded by itself; `after_special` does not matter here."""
        return self._pre_tokenizer.split(text)

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word."""
        letters = _letters()
        symbols = [letters[byte] for byte in word.encode()]
        if self._pre_tokenizer.ignore_merges:
            whole = self._tokens.find(b"".join(symbols))
            if whole >= 0:
                return (whole,)
        ids: list[int] = []
        for symbol in merge(symbols, self._remembered_rank):
            token_id = self._tokens.find(symbol)
            # As in llama.cpp, a symbol that is no token becomes the tokens of its bytes; bytes without one are dropped.
            ids += [token_id] if token_id >= 0 else filter(_exists, (self._tokens.find(bytes([b])) for b in symbol))
        return tuple(ids)

    def _rank(self, left: bytes, right: bytes) -> int | None:
        rank = self._merges.find(left + b" " + right)
        return rank if rank >= 0 else None

    def piece(self, token: bytes) -> bytes:
        """Return the bytes of text that a normal token stands for."""
        numbers = _numbers()
        text = token.decode()
        try:
            return bytes([numbers[letter] for letter in text])
        except KeyError:
            # This is how llama.cpp spells out a token that is no byte-level text.
            return b"".join(
                bytes([numbers[letter]])
                if letter in numbers
                else b"[UNK_BYTE_0x" + letter.encode().hex().encode() + token + b"]"
                for letter in text
            )

    def token_bytes(self) -> Iterator[bytes]:
        """Yield for each token the bytes that it can stand for in a text."""
        return (self.piece(self._tokens[i]) for i in range(self._tokens.n))

    def dropped_bytes(self) -> bytes | None:
        """Return the bytes that encoding drops, as they have no token; None where it may drop merged pairs, too."""
        merges = (self._merges[i].partition(b" ") for i in range(self._merges.n))
        if any(self._tokens.find(left + right) < 0 for left, _, right in merges):
            return None
        return bytes(byte for byte, letter in enumerate(_letters()) if self._tokens.find(letter) < 0)


def _exists(token_id: int) -> bool:
    return token_id >= 0


@cache
def _letters() -> tuple[bytes, ...]:
    """Return the letter (UTF-8) for each byte: the byte itself where it prints, else the next letter from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printing else next(others)).encode() for byte in range(256))


@cache
def _numbers() -> dict[str, int]:
    return {letter.decode(): byte for byte, letter in enumerate(_letters())}


def _check_utf8(gguf: GGUF, vocabulary: Vocabulary) -> None:
    """Refuse a vocabulary with a token that is no UTF-8, as all byte-level tokens are."""
    tokens = vocabulary.tokens
    first_bytes = np.frombuffer(tokens.blob, np.uint8)[tokens.starts[:-1]]
    valid = not ((first_bytes & 0xC0) == 0x80).any()
    try:
        tokens.blob.decode()
    except UnicodeDecodeError:
        valid = False
    if valid:
        return
    for number in range(tokens.n):
        try:
            tokens[number].decode()
        except UnicodeDecodeError as error:
            raise damaged(gguf, f"token {number} is {tokens[number][:40]!r}, which is no UTF-8") from error
