"""The contract of a tokenizer; the runtimes implement it by the model's own vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back. Its methods may be called from any thread while the model is loaded."""

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a sequence, for chat templates; empty where there is none."""

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a sequence, for chat templates; empty where there is none."""

    @property
    def infill_ids(self) -> Mapping[str, int]:
        """Ids of the tokens for infilling, as far as there are any, by role.

        "pre", "suf" and "mid" stand before the text before the gap, before the text after it, and where the model is to
        write; "rep" and "sep" before the names of a repository and of a file, and "pad" fills up.
        """
        return {}

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that only a chat template, or who writes a whole prompt, may write.

        They are those of the types CONTROL and UNKNOWN, also where replies show them.
        """
        return ()

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special: Whether to add the tokens that the model expects around a text, such as BOS.
            parse_special: Whether to read spelled-out control tokens ("<|im_end|>") as such: for chat templates, never
                for users' text.
            most: Where the text takes more tokens, return only those of its beginning, but more than `most`, so that
                the rest need not be tokenized; None for all.
        """

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens that `text` takes, found without tokenizing it; 0 is always right.

        Prompts that can't fit are refused by this bound, as tokenizing a long text takes much time and memory. So it
        must never exceed the number of ids that `encode` returns, whatever its flags.
        """

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text, none for a control token; a character may span tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation (end of text, of turn, of message)."""


def added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer adds before a text, such as BOS, and behind it."""
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special=False)
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []
