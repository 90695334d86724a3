"""A model's vocabulary in the form that llguidance takes: the bytes of every token, the end tokens, an encoder."""

from collections.abc import Callable
from typing import Any

from edgedec.errors import EdgedecError
from edgedec.tokenizer import Tokenizer

_MOST_CHARACTERS = 4000
_SPECIAL = b"\xff"  # what llguidance writes before the name of a special token; no UTF-8 text holds it


class Vocabulary:
    """A tokenizer with the attributes of llguidance's TokenizerWrapper.

    A token without bytes (a control token) is never allowed; an end token only where the grammar may end.

    Attributes:
        tokens: The bytes of every token, by id.
        end_ids: The ids of the end tokens.
        eos_token_id: The first of them; None where there is none.
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
        for i in self.end_ids:  # an end token is no text, whatever its bytes are
            self.tokens[i] = _SPECIAL + f"<end {i}>".encode()
        self.eos_token_id = self.end_ids[0] if self.end_ids else None

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text that stands inside of another text.

        Some tokenizers put a space before a text that is encoded by itself, but not after a line end: both ways are
        tried. Where neither gives tokens that spell the text, the longest tokens are taken from left to right.
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
        except EdgedecError:  # the tokenizer only decodes
            return []

    def replace_tokens(self, trie: Any) -> None:
        """Take over the trie that llguidance built from the tokens, and free the list of tokens."""
        self._longest_first = trie.greedy_tokenize
        self.tokens = []

    def let_go(self) -> None:
        """Drop the trie, which holds this object in turn: Python does not see such a circle, and would keep both."""
        self._longest_first = None
