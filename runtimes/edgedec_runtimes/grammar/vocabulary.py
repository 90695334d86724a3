"""A model's vocabulary as llguidance wants it: the bytes of every token, the end tokens, and a way to encode."""

from collections.abc import Callable
from typing import Any

from edgedec.errors import EdgedecError
from edgedec.tokenizer import Tokenizer

_MOST_CHARACTERS = 4000
_SPECIAL = b"\xff"  # no UTF-8 text holds it; what llguidance puts before the name of a special token


class Vocabulary:
    """What llguidance asks of a tokenizer (its TokenizerWrapper, by attributes).

    Tokens without bytes (control tokens) are never allowed, and end tokens where the grammar may end only.

    Attributes:
        tokens: The bytes of every token.
        end_ids: The end tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_first: Callable[[str], list[int]] | None = None
        is_end, piece, ids = tokenizer.is_end, tokenizer.piece, range(tokenizer.n_vocab)
        self.end_ids = [i for i in ids if is_end(i)]
        self.tokens = [piece(i) for i in ids]
        for i in self.end_ids:  # no text, whatever its bytes
            self.tokens[i] = _SPECIAL + f"<end {i}>".encode()
        self.eos_token_id = self.end_ids[0] if self.end_ids else None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that stands within another one.

        Encoded by itself, a text may get a space put before it; after a line end it does not. Where neither way spells
        the text, the longest tokens are taken from the left.
        """
        text = text[:_MOST_CHARACTERS]
        data = text.encode()
        for before in ("", "\n"):
            ids = self._encode(before + text)
            pieces = [self._tokenizer.piece(i) for i in ids]
            if before and pieces[:1] == [before.encode()]:
                ids, pieces = ids[1:], pieces[1:]
            if b"".join(pieces) == data:
                return ids
        return self._longest_first(text) if self._longest_first is not None else []

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special=False)
        except EdgedecError:  # by a tokenizer that only decodes
            return []

    def built(self, trie: Any) -> None:
        """Take what llguidance made of the tokens, and let go of ours."""
        self._longest_first = trie.greedy_tokenize
        self.tokens = []
