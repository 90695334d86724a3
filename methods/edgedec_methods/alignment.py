"""The tokens of a text's bytes in another tokenizer: they line up with the bytes exactly, while the text grows."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from edgedec.errors import EdgedecError
from edgedec.tokenizer import Tokenizer

_SETTLED = 8  # last tokens, which more text may change
_CONTEXT = 16  # tokens before those, encoded with them so that a word that begins before them is seen whole
_MAX_BYTES = 32_768  # of a longer text that is added at once, only so many last bytes are taken


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's tokens.

    Attributes:
        ends: The offset in the text's bytes at which each token ends.
        has_lead: Whether the first token begins with a space that is not in the text.
    """

    ids: list[int]
    ends: list[int]
    has_lead: bool


def encode_aligned(tokenizer: Tokenizer, data: bytes) -> Encoded | None:
    """Return the tokens of UTF-8 text; None where it is not UTF-8, or the tokens' bytes are not the text's.

    A space that the tokenizer puts before every text does not count as a byte of it.
    """
    try:
        ids = tokenizer.encode(data.decode(), add_special=False)
    except (UnicodeDecodeError, EdgedecError):
        return None
    pieces = [tokenizer.piece(token) for token in ids]
    joined = b"".join(pieces)
    n_added = int(len(joined) == len(data) + 1 and joined.startswith(b" "))
    if joined[n_added:] != data:
        return None
    return Encoded(ids, [end - n_added for end in accumulate(map(len, pieces))], bool(n_added))


def whole_characters(data: bytes) -> int:
    """Return how many bytes the whole characters take: all but those of a character that is cut short at the end.

    >>> whole_characters("aé".encode()), whole_characters("aé".encode()[:2])
    (3, 1)
    """
    for n in range(1, min(4, len(data) + 1)):
        byte = data[-n]
        if byte & 0xC0 != 0x80:
            is_cut = (byte >= 0xF0 and n < 4) or (byte >= 0xE0 and n < 3) or (byte >= 0xC0 and n < 2)
            return len(data) - n if is_cut else len(data)
    return len(data)


class Aligned:
    """A text in another tokenizer's tokens.

    The tokens' bytes are always the text's from `start` on, to its end but for a character that is cut short there.
    Text before a byte that is not UTF-8 is left out.

    Attributes:
        ends: The offset in the text at which each token ends.
        start: The offset in the text at which the first token begins.
        text: The text's bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.start = 0
        self.text = bytearray()

    @property
    def complete(self) -> bool:
        """Whether the tokens cover the text to its end."""
        return self._end(len(self.ids)) == len(self.text)

    def _end(self, n: int) -> int:
        """Return the offset at which the first n tokens end."""
        return self.ends[n - 1] if n else self.start

    def add(self, more: bytes) -> None:
        """Append bytes to the text; the last tokens are encoded again together with them."""
        self.text += more
        if len(more) > _MAX_BYTES:
            begin = len(self.text) - _MAX_BYTES
            self._restart(begin + next((i for i in range(4) if self.text[begin + i] & 0xC0 != 0x80), 0))
        elif not self._encode_end(self._character_start(len(self.ids) - _SETTLED - _CONTEXT)):
            self._restart(self.start)

    def _character_start(self, n: int) -> int:
        """Return the largest number of tokens, at most n, behind which a character begins."""
        while n > 0 and self._end(n) < len(self.text) and self.text[self._end(n)] & 0xC0 == 0x80:
            n -= 1
        return max(0, n)

    def _encode_end(self, n: int) -> bool:
        """Encode the text behind the first n tokens again; return whether the new tokens line up with it.

        Old tokens are kept up to the first place where an old and a new one end, if there is such a place.
        """
        begin = self._end(n)
        data = bytes(self.text[begin:])
        encoded = encode_aligned(self._tokenizer, data[: whole_characters(data)])
        if encoded is None:
            return False
        ends = [begin + end for end in encoded.ends]
        for n_kept in range(len(self.ids) - _SETTLED, n, -1):
            seam = bisect_left(ends, self._end(n_kept))
            if seam < len(ends) and ends[seam] == self._end(n_kept):
                self._replace(n_kept, encoded.ids[seam + 1 :], ends[seam + 1 :])
                return True
        if encoded.has_lead and n > 0:
            return False
        self._replace(n, encoded.ids, ends)
        return True

    def _replace(self, n_kept: int, ids: list[int], ends: list[int]) -> None:
        """Replace all but the first `n_kept` tokens."""
        self.ids[n_kept:] = ids
        self.ends[n_kept:] = ends

    def _restart(self, start: int) -> None:
        """Encode the text from an offset on, or from behind the last byte that is not UTF-8; drop all other tokens."""
        data = bytes(self.text[start:])
        data = data[: whole_characters(data)]
        while True:
            try:
                data.decode()
                break
            except UnicodeDecodeError as error:
                start, data = start + error.end, data[error.end :]
        encoded = encode_aligned(self._tokenizer, data) or Encoded([], [], has_lead=False)
        self.start = start if encoded.ids else start + len(data)
        self._replace(0, encoded.ids, [start + end for end in encoded.ends])


def continuation(tokenizer: Tokenizer, before: Sequence[int], data: bytes) -> Encoded | None:
    """Return the tokens of UTF-8 text that follows the tokens `before`; None where no tokens begin with the text.

    The text is encoded together with the tokens before it. Where a token would span the border, the text is encoded by
    itself; where it would then begin with a space of the tokenizer's own, it is encoded after a line's end.
    """
    head = b"".join(tokenizer.piece(token) for token in before)
    n_cut = next((i for i in range(min(4, len(head))) if head[i] & 0xC0 != 0x80), 0)
    for context in (head[n_cut:], b"", b"\n"):
        encoded = encode_aligned(tokenizer, context + data)
        if encoded is None or (not context and encoded.has_lead):
            continue
        borders = [0, *encoded.ends]
        if len(context) in borders:
            n = borders.index(len(context))
            return Encoded(encoded.ids[n:], [end - len(context) for end in encoded.ends[n:]], has_lead=False)
    return None
