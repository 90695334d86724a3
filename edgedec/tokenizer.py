"""What a tokenizer is. Implementations belong to the runtimes and are the model's own."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Pure: may be called from any thread while the model is loaded."""

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a sequence, or an empty string; chat templates ask for it."""

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a sequence, or an empty string; chat templates ask for it."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`.

        `add_special` puts the tokens around it that the model expects (such as BOS); `parse_special` reads
        spelled-out control tokens ("<|im_end|>") as such, which is for chat templates, not for users' text. With `most`
        the rest of a text that takes more tokens need not be looked at: more than `most` ids are returned, of its
        beginning.
        """

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` takes at the least, found without tokenizing it; 0 says nothing.

        Prompts that can't fit are refused by it, as to tokenize a long text takes much time and memory. So it must
        never be more than `encode` returns, whatever its flags.
        """

    def piece(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none. A character may span tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation (end of text, of turn, of message)."""
