"""WordPiece as in BERT: a word is cut into the longest tokens of the vocabulary, from left to right.

Devlin et al. 2018, arXiv:1810.04805. The ids are those of Hugging Face's tokenizers 0.23, with which such models are
trained and served; of characters that are newer than Unicode 8 that library does not know what they are. llama.cpp
leaves Hangul undecomposed, takes off spacing marks with the others, and has no limit for the length of a word.
"""

import re
import unicodedata
from collections.abc import Iterator

import numpy as np

from edgedec.gguf.file import GGUF
from edgedec_runtimes.tokenizer.metadata import Vocabulary, damaged, flag, named_token
from edgedec_runtimes.tokenizer.spm import SPACE, SpacedTokens

_MOST_CHARACTERS = 100  # of a word; a longer one is unknown
_CHUNK = re.compile(r"[^ \t\n\r]+")
_REMOVED = frozenset({"Cc", "Cf", "Co"})
_SPACES = frozenset({"Zs", "Zl", "Zp"})
# What BERT takes for a Chinese character, and reads as a word of its own.
_CHINESE = re.compile(
    "([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b81f"
    "\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f])"
)
_ASCII_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")


class WordPieces(SpacedTokens):
    """Encodes the text between special tokens by WordPiece.

    Args:
        gguf: The model, for the rules that its metadata names.
        vocabulary: The model's tokens: those that begin a word have a U+2581 in front.
    """

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        unknown = named_token(gguf, "unknown", self._tokens.n, default=100)
        if unknown is None:
            raise damaged(gguf, "it has no token for words that are not in its vocabulary")
        self._unknown = (unknown,)
        self._lowers = flag(gguf, "normalizer.lowercase", default=True)
        self._strips = flag(gguf, "normalizer.strip_accents", default=self._lowers)
        self._longest = int(np.diff(self._tokens.starts).max())  # in bytes, so at least as many as in characters

    def words(self, text: str, *, after_special: bool) -> Iterator[str]:
        """Yield the words of a text, each of which is encoded by itself; `after_special` does not matter here."""
        for chunk in _CHUNK.finditer(text):
            yield from self._normal(chunk[0]).split()

    def _normal(self, text: str) -> str:
        """Return a text as the vocabulary spells it, with spaces around punctuation and Chinese characters."""
        text = "".join(map(_cleaned, text))
        if text.isascii():
            text = _ASCII_PUNCTUATION.sub(r" \1 ", text)
        else:
            text = _CHINESE.sub(r" \1 ", text)
            if self._strips:
                text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
            text = "".join(f" {c} " if unicodedata.category(c)[0] == "P" else c for c in text)
            text = _ASCII_PUNCTUATION.sub(r" \1 ", text)
        # Python's lower() alone looks at the letters around a sigma.
        return text.replace("\u03a3", "\u03c3").lower() if self._lowers else text

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the token ids of a word."""
        ids: list[int] = []
        begin, n = 0, len(word)
        if n > _MOST_CHARACTERS or SPACE in word[1:]:  # a token within a word would be taken for one that begins one
            return self._unknown
        while begin < n:
            for end in range(min(n, begin + self._longest), begin, -1):
                token_id = self._tokens.find((word[begin:end] if begin else SPACE + word[:end]).encode())
                if token_id >= 0:
                    break
            else:
                return self._unknown
            ids.append(token_id)
            begin = end
        return tuple(ids)

    def dropped_bytes(self) -> None:
        """Return None, as any character of a text may be dropped, or be in a word that is unknown as a whole."""
        return


def _cleaned(character: str) -> str:
    """Return a character, a space for white space, "" for a control character, U+FFFD and the like."""
    if " " < character < "\x7f":
        return character
    kind = unicodedata.category(character)
    return " " if kind in _SPACES else "" if kind in _REMOVED or character == "\ufffd" else character
