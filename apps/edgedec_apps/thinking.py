"""What a model thinks before it answers: the part of a reply between <think> and </think>, whole or as it comes.

Only a reply that begins with <think>, or whose prompt ends with it, has such a part; a tag elsewhere is text. White
space around both parts is dropped.
"""

from edgedec_apps.overlaps import n_overlap

OPEN, CLOSE = "<think>", "</think>"

Split = tuple[str, str]
"""What was thought, and the answer."""


def split_thinking(text: str, *, opened: bool = False) -> Split:
    """Return what was thought in a reply, and the answer; `opened` says that the reply's prompt ends with <think>.

    >>> split_thinking("<think>\\nTwo and two.\\n</think>\\n\\nFour."), split_thinking("Four.")
    (('Two and two.', 'Four.'), ('', 'Four.'))
    """
    stream = ThinkingStream(opened=opened)
    thought, answer = stream.feed(text)
    more_thought, more_answer = stream.finish()
    return thought + more_thought, answer + more_answer


class ThinkingStream:
    """Splits a reply that arrives in pieces: the results of the pieces add up to split_thinking of the whole.

    Args:
        opened: Whether the prompt ends with <think>, so that the reply begins with what is thought.

    Attributes:
        thinks: Whether the text so far ends in what is thought.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self.thinks = opened
        self._begins = not opened  # the reply may still begin with <think>
        self._bare = opened  # nothing but white space came since the last tag
        self._held = ""

    def feed(self, text: str) -> Split:
        """Take the next piece; return what was thought, and what is answered, as far as that is certain."""
        self._held += text
        if self._begins:
            start = self._held.lstrip()
            if OPEN.startswith(start) and start != OPEN:
                return "", ""
            self._begins = False
            if start.startswith(OPEN):
                self.thinks = self._bare = True
                self._held = start[len(OPEN) :]
        thought = ""
        if self.thinks:
            thought, found, after = self._held.partition(CLOSE)
            if not found:
                return self._shown(self._certain(thought)), ""
            thought = self._shown(thought.rstrip())
            self.thinks, self._bare, self._held = False, True, after
        answer, self._held = self._held, ""
        return thought, self._shown(answer)

    def finish(self) -> Split:
        """Return the rest of the reply, which has ended."""
        held, self._held = self._held, ""
        rest = self._shown(held.rstrip() if self.thinks else held)
        return (rest, "") if self.thinks else ("", rest)

    def _certain(self, text: str) -> str:
        """Return what of `text` is neither white space at its end nor the beginning of a tag; hold the rest back."""
        n = len(text[: len(text) - n_overlap(text, CLOSE)].rstrip())
        self._held = text[n:]
        return text[:n]

    def _shown(self, text: str) -> str:
        """Return a text without the white space that follows a tag."""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text
