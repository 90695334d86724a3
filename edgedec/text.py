"""From tokens' bytes to text: whole characters only, and nothing at or after a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text as they come.

    A character may span tokens and a stop string may span many: text is given out only when it can no longer
    become part of either. Bytes that are not UTF-8 become U+FFFD.

    >>> stream = TextStream(stop=["END"])
    >>> stream.feed("hé".encode()[:2]), stream.feed("hé".encode()[2:]), stream.feed(b" E"), stream.feed(b"N!")
    ('h', 'é', ' ', 'EN!')
    >>> stream.feed(b"xEN"), stream.feed(b"DING"), stream.stopped
    ('x', '', 'END')
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, data: bytes) -> str:
        """Take the bytes of a token and return the text that is now certain."""
        text = self._decoder.decode(data)
        return self._release(text) if self._stop else text

    def finish(self) -> str:
        """Return what was held back; the text is over."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            start, _, self.stopped = min(found)
            self._held = ""
            return text[:start]
        n_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
