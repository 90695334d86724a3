"""A tokenizer of a few pieces."""

from collections.abc import Sequence


class Pieces:
    """A tokenizer of a few pieces, of which the first one ends a text."""

    control_texts = ()

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces, self.n_vocab = pieces, len(pieces)

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the longest pieces, one after another; white space of other kinds is left out."""
        ids = []
        while text := text.lstrip("\n"):
            ids.append(
                max((i for i, p in enumerate(self.pieces) if text.startswith(p)), key=lambda i: len(self.pieces[i]))
            )
            text = text[len(self.pieces[ids[-1]]) :]
        return ids

    def piece(self, token_id: int) -> bytes:
        """Return a piece."""
        return self.pieces[token_id].encode() if token_id else b""

    def is_end(self, token_id: int) -> bool:
        """Return whether a token is the first one."""
        return token_id == 0
