"""A tokenizer whose vocabulary lies in the child."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.errors import RequestError

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The facts of a tokenizer that do not depend on a text; see edgedec.tokenizer.Tokenizer."""

    n_vocab: int
    bos_token: str
    eos_token: str
    infill_ids: Mapping[str, int]
    control_texts: tuple[str, ...]


class ChildTokenizer:
    """Implements edgedec.tokenizer.Tokenizer; what single tokens stand for is fetched in blocks, and kept."""

    def __init__(self, facts: Vocabulary, ask: Callable[..., Any]) -> None:
        """`ask` calls a method in the child, by its name."""
        self.n_vocab, self.infill_ids, self.control_texts = facts.n_vocab, facts.infill_ids, facts.control_texts
        self.bos_token, self.eos_token = facts.bos_token, facts.eos_token
        self._ask = ask
        self._blocks: dict[int, tuple[list[bytes], list[bool]]] = {}

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`; see edgedec.tokenizer.Tokenizer."""
        ids: list[int] = self._ask("encode", text, add_special, parse_special, most)
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`."""
        return int(self._ask("least_tokens", text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, with U+FFFD where the bytes are not UTF-8."""
        return str(self._ask("decode", list(token_ids)))

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text (RequestError outside the vocabulary)."""
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(f"token {token_id} is outside the vocabulary of {self.n_vocab}")
        return self._block(token_id)[0][token_id % _BLOCK]

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a generation."""
        return 0 <= token_id < self.n_vocab and self._block(token_id)[1][token_id % _BLOCK]

    def _block(self, token_id: int) -> tuple[list[bytes], list[bool]]:
        index = token_id // _BLOCK
        if index not in self._blocks:
            start = index * _BLOCK
            self._blocks[index] = self._ask("tokens", start, min(start + _BLOCK, self.n_vocab))
        return self._blocks[index]
