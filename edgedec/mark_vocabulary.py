"""What the tokens of a vocabulary say, as far as some marks are concerned, such as </think> or <tool_call>."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgedec.tokenizer import Tokenizer

Mask = NDArray[np.bool_]


class MarkVocabulary:
    """Finds marks in a text that comes token by token; made once for a model and its marks.

    Behind a mark the next token begins anew: a token that completes a mark and says more than white space is ruled out.

    Args:
        marks: The texts that are looked for.
        controls: A text with all control tokens that are read as what they are spelled, those of the marks among them.

    Attributes:
        anything: bool[n_vocab], every token.
        thinking: bool[n_vocab], every token but those that end a text.
        blank: bool[n_vocab], the tokens of white space.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str], controls: str) -> None:
        self._tokenizer = tokenizer
        self._marks = tuple(mark.encode() for mark in marks)
        self._n_tail = max(map(len, self._marks), default=1) - 1
        written = [text for text in tokenizer.control_texts if text and text in controls]
        self._controls = {self.ids_of(text)[0]: text.encode() for text in written}
        n_vocab, ends = tokenizer.n_vocab, {mark[-1] for mark in self._marks}
        self.anything, self.thinking = np.ones(n_vocab, np.bool_), np.ones(n_vocab, np.bool_)
        self.blank = np.zeros(n_vocab, np.bool_)
        self._goes_on: list[tuple[int, bytes]] = []  # tokens in which something follows the last byte of a mark
        for i in range(n_vocab):
            text = self.text(i)
            if tokenizer.is_end(i):
                self.thinking[i] = False
            elif text.isspace():
                self.blank[i] = True
            elif not ends.isdisjoint(text[:-1]):
                self._goes_on.append((i, text))
        self._completing = lru_cache(64)(self._completing_with_more)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text in which control tokens may be spelled out."""
        return tuple(self._tokenizer.encode(text, add_special=False, parse_special=True))

    def text(self, token_id: int) -> bytes:
        """Return the bytes of a token, those of a mark too where it is a control token."""
        return self._controls.get(token_id) or self._tokenizer.piece(token_id)

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends a text."""
        return not self.thinking[token_id]

    def tail(self, text: bytes) -> bytes:
        """Return as much of a text's end as may begin a mark."""
        return text[max(0, len(text) - self._n_tail) :]

    def partition(self, text: bytes) -> tuple[bytes | None, bytes]:
        """Return the first mark of a text, and what stands behind it; None and b"" where there is no mark."""
        places = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if not places:
            return None, b""
        at, mark = min(places)
        return mark, text[at + len(mark) :]

    def ruled_out(self, tail: bytes) -> list[int]:
        """Return the tokens that may not follow a text with this end: they complete a mark and say more behind it."""
        rests = ((mark, mark[n:]) for mark in self._marks for n in range(len(mark)) if tail.endswith(mark[:n]))
        return [i for mark, rest in rests for i in self._completing(mark, rest)]

    def _completing_with_more(self, mark: bytes, rest: bytes) -> list[int]:
        """Return the tokens that complete a mark, of which `rest` is missing, and say more behind it."""
        parts = ((i, text.partition(rest)) for i, text in self._goes_on)
        return [i for i, (before, _, more) in parts if more.strip() and (not before or rest == mark)]


def without(mask: Mask, token_ids: Sequence[int]) -> Mask:
    """Return a copy of a mask in which these tokens are ruled out; the mask itself where there are no tokens."""
    if not token_ids:
        return mask
    rest = mask.copy()
    rest[list(token_ids)] = False
    return rest
