"""From tokens' bytes to text: whole characters only, and nothing at or after a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text, token by token.

    A character and a stop string may span several tokens: text is returned only when it can no longer become part of
    either. Bytes that are not UTF-8 become U+FFFD.

    Attributes:
        stopped: The stop string that ended the text; None while there is none.

    >>> stream = TextStream(stop=["END"])
    >>> stream.feed("hé".encode()[:2]), stream.feed("hé".encode()[2:]), stream.feed(b" E"), stream.feed(b"N!")
    ('h', 'é', ' ', 'EN!')
    >>> stream.feed(b"xEN"), stream.feed(b"DING"), stream.stopped
    ('x', '', 'END')
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = _StopStrings(stop) if stop else None
        self._place = 0
        self._held = ""
        self.stopped: str | None = None

    def feed(self, data: bytes) -> str:
        """Take the bytes of a token and return the text that has become certain."""
        text = self._decoder.decode(data)
        return text if self._stops is None else self._release(text, self._stops)

    def finish(self) -> str:
        """End the text and return what was held back."""
        text = self._decoder.decode(b"", final=True)
        if self._stops is not None:
            text = self._release(text, self._stops)
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str, stops: "_StopStrings") -> str:
        if self.stopped is not None:
            return ""
        text, place = self._held + new, self._place
        for end, character in enumerate(new, len(self._held) + 1):
            place = stops.step(place, character)
            if n := stops.n_matched[place]:
                self.stopped, self._held = text[end - n : end], ""
                return text[: end - n]
        self._place = place
        n_certain = len(text) - stops.depth[place]
        self._held = text[n_certain:]
        return text[:n_certain]


class _StopStrings:
    """Finds the first of several strings in one pass, however many there are (Aho and Corasick 1975, CACM 18:6).

    A place stands for the longest end of the text that is the beginning of one of the strings; place 0 for no such end.

    Attributes:
        depth: By place, the length of that end.
        n_matched: By place, the length of the longest string that ends there; 0 where none does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # by place, the place of the next shorter such end
        self.depth, self.n_matched = [0], [0]
        for string in strings:
            self._add(string)
        row = list(self._next[0].values())
        while row:
            row = [following for place in row for following in self._link(place)]

    def step(self, place: int, character: str) -> int:
        """Return the place after one more character."""
        while place and character not in self._next[place]:
            place = self._shorter[place]
        return self._next[place].get(character, 0)

    def _add(self, string: str) -> None:
        place = 0
        for character in string:
            if character not in self._next[place]:
                self._next[place][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[place] + 1)
                self.n_matched.append(0)
            place = self._next[place][character]
        self.n_matched[place] = len(string)

    def _link(self, place: int) -> list[int]:
        """Find the shorter ends of the places that follow `place`, whose own is known, and return these places."""
        for character, following in self._next[place].items():
            shorter = self.step(self._shorter[place], character)
            self._shorter[following] = shorter
            self.n_matched[following] = self.n_matched[following] or self.n_matched[shorter]
        return list(self._next[place].values())
