"""Where the next mark of a reply is, and where a call ends that came in part."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from edgedec_apps.call_bodies import ToolCall, Tools
from edgedec_apps.reply_marks import Mark

MOST_HEAD = 200
"""Most characters of a head, and of a call before its first bracket."""
_TAGS = re.compile(r"\s*(?:\Z|<(?:function|invoke)|[\w.:-]+>?\s*(?:<arg_key>|<parameter=|\Z))")
_TAG_ENDS = ("</function>", "</invoke>")
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds the first of some texts by `form`; `n_most` is the length of the longest."""

    texts: tuple[str, ...]
    form: re.Pattern[str]
    n_most: int

    def may_grow(self, text: str, match: re.Match[str]) -> bool:
        """Return whether what was found at the end of a text may be the beginning of a longer one of the texts."""
        rest = text[match.start() : match.start() + self.n_most]
        return any(each.startswith(rest) and len(each) > len(rest) for each in self.texts)


@cache
def _of_texts(texts: tuple[str, ...]) -> Finder:
    longest_first = sorted(texts, key=len, reverse=True)
    form = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return Finder(texts, form, max(map(len, texts), default=1))


def finder(texts: Iterable[str]) -> Finder:
    """Return what finds these texts."""
    return _of_texts(tuple(dict.fromkeys(texts)))


@cache
def _string_end(closing: str) -> Finder:
    """Return what finds the end of a string; a backslash takes the next character with it in a string of JSON."""
    escape = r"\\.|" if closing == '"' else ""
    return Finder((closing,), re.compile(escape + re.escape(closing), re.DOTALL), max(2, len(closing)))


class OpenCall:
    """A call whose mark came: finds where the call ends, as more of it comes.

    Args:
        mark: The call's mark.
        shown: The mark, and the head behind it, as they stood in the reply.
        head: The head.
        aborts: The marks that end the thought around the call, and so the call.
    """

    def __init__(self, mark: Mark, shown: str, head: str, aborts: Sequence[str]) -> None:
        self.shown = shown
        self._mark, self._head = mark, head
        self._begun = False
        self._plain: bool | None = None
        self._quotes = dict(mark.quotes)
        self._ends = {True: finder([*mark.closes, *aborts, *(() if mark.closes else mark.opens)])}
        brackets = () if mark.closes else _BRACKETS
        self._ends[False] = finder([*self._quotes, *mark.closes, *aborts, *brackets])

    def read(self, body: str, tools: Tools, *, cut: bool) -> list[ToolCall]:
        """Return the calls of a body; none where it is no call, or where it was `cut` and is empty or XML."""
        if self._mark.read is None or (cut and _TAGS.match(body) and not body.rstrip().endswith(_TAG_ENDS)):
            return []
        return self._mark.read(self._head, body, tools)

    def end(self, text: str, *, plain: bool) -> tuple[int, int] | None:
        """Return where the body ends and where what ends it does; None where that is to come, (0, 0) for no call.

        Args:
            text: The reply behind the mark, so far.
            plain: Whether strings are not looked at.
        """
        if not self._begun:
            start = text.lstrip()
            if not start:
                return None
            if self._mark.starts and start[0] not in self._mark.starts:
                return 0, 0
            self._begun = True
        if plain is not self._plain:
            self._plain, self._at, self._closing, self._depth = plain, 0, "", 0
        while True:
            find = _string_end(self._closing) if self._closing else self._ends[plain]
            match = find.form.search(text, self._at)
            at = len(text) if match is None else match.start()
            if not self._mark.closes and not self._depth and not plain and at > MOST_HEAD:
                return 0, 0
            if match is not None and find.may_grow(text, match):
                self._at = match.start()
                return None
            if match is None:
                self._at = max(self._at, len(text) - find.n_most + 1)
                return None
            self._at = match.end()
            if self._closing:
                self._closing = self._closing if match[0].startswith("\\") else ""
            elif match[0] in self._quotes and not plain:
                self._closing = self._quotes[match[0]]
            elif match[0] in self._mark.closes:
                return match.span()
            elif match[0] not in _BRACKETS:
                return match.start(), match.start()
            else:
                self._depth += _BRACKETS[match[0]]
                if self._depth <= 0:
                    return match.end(), match.end()
