"""SentencePiece: two neighbours that together are a token are merged, those with the best score first."""

import re
from collections.abc import Iterator

import numpy as np

from edgedec.gguf.file import GGUF
from edgedec_runtimes.tokenizer.merging import merge
from edgedec_runtimes.tokenizer.metadata import Vocabulary, byte_token, flag, read_scores
from edgedec_runtimes.tokenizer.string_table import StringTable

SPACE = "\u2581"  # what SentencePiece writes for a space
_SPACE_BYTES = SPACE.encode()


class SpacedTokens:
    """A vocabulary whose tokens have U+2581 in the place of a space."""

    _tokens: StringTable

    def piece(self, token: bytes) -> bytes:
        """Return the bytes of text that a normal token stands for."""
        return token.replace(_SPACE_BYTES, b" ")

    def token_bytes(self) -> Iterator[bytes]:
        """Yield the bytes that each token can stand for in a text, with spaces and with U+2581 in their place."""
        for i in range(self._tokens.n):
            yield self._tokens[i]
            yield self.piece(self._tokens[i])


class SentencePieces(SpacedTokens):
    """Encodes the text between special tokens by SentencePiece."""

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        # The best score has rank 0; equal scores have equal ranks. A memoryview is faster to read element by element.
        ranks = np.unique(-read_scores(gguf, self._tokens.n), return_inverse=True)[1]
        self._ranks = ranks.astype(np.int32).data
        self._space_first = flag(gguf, "add_space_prefix", default=True)
        self._bytes = [byte_token(self._tokens, byte) for byte in range(256)]
        # Only after these characters a space is inside of a token: before other spaces no merge joins anything.
        joined = "".join(re.escape(character) for character in _before_spaces(self._tokens))
        self._border = re.compile(f"(?<![{SPACE}{joined}])(?={SPACE})")

    def words(self, text: str, *, after_special: bool) -> Iterator[str]:
        """Yield the parts of a text that can be encoded each by itself.

        Args:
            text: The text between two special tokens.
            after_special: Whether it follows a special token or is the beginning of the whole text.
        """
        text = (" " + text if after_special and self._space_first else text).replace(" ", SPACE)
        start = 0
        for border in self._border.finditer(text):
            if border.start() > start:
                yield text[start : border.start()]
                start = border.start()
        if start < len(text):
            yield text[start:]

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word."""
        ids: list[int] = []
        for symbol in merge([character.encode() for character in word], self._rank):
            token_id = self._tokens.find(symbol)
            ids += [token_id] if token_id >= 0 else [self._bytes[byte] for byte in symbol]
        return tuple(ids)

    def _rank(self, left: bytes, right: bytes) -> int | None:
        token_id = self._tokens.find(left + right)
        return self._ranks[token_id] if token_id >= 0 else None

    def dropped_bytes(self) -> bytes:
        """Return the bytes that encoding drops: none, as a symbol that is no token becomes byte tokens."""
        return b""


def _before_spaces(tokens: StringTable) -> set[str]:
    """Return the characters that come right before a space within some token."""
    blob = np.frombuffer(tokens.blob, np.uint8)
    first, second, third = _SPACE_BYTES
    spaces = np.flatnonzero((blob[:-2] == first) & (blob[1:-1] == second) & (blob[2:] == third))
    # Spaces at the beginning of a token or after another space do not count.
    follows = np.zeros(len(blob) + 3, np.bool_)
    follows[tokens.starts] = True
    follows[spaces + 3] = True
    inner = spaces[~follows[spaces]].tolist()
    return {tokens.blob[max(0, at - 4) : at].decode(errors="replace")[-1] for at in inner}
