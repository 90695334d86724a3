"""Passages of documents: stretches of text with their place, and how well their words match a question."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.pdf_text import PAGE_BREAK

_K1, _B = 1.2, 0.75  # BM25's usual constants
_STEM = 5  # letters: longer words are looked for by their first ones, too, so that endings matter less
_FLOOR = 0.15  # of the best score: what matches less well is left out
_EVERY = 256  # passages between two reports
_BREAKS = re.compile(r"(\n\s*\n)|((?<=[.!?])\s|(?<=[。！？]))|(\n)|(\s)")  # the best places to cut come first
# Scripts without spaces between words: their words are pairs of characters.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"([{_UNSPACED}]+)|([^\W_{_UNSPACED}]+)")


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of a document.

    Attributes:
        document: The document's number among those that are searched.
        name: The document's name.
        text: The stretch, as it stands there.
        first: The number of its first line, or its page in a PDF; both count from 1.
        last: That of its last line, or its page.
        is_paged: Whether these are pages.
    """

    document: int
    name: str
    text: str
    first: int
    last: int
    is_paged: bool

    @property
    def place(self) -> str:
        """Where it stands, such as "page 12" or "lines 3-9"."""
        unit = "page" if self.is_paged else "line"
        return f"{unit} {self.first}" if self.first == self.last else f"{unit}s {self.first}-{self.last}"


def passages_of(documents: Sequence[Document], most: int) -> list[Passage]:
    """Return the passages of documents in their order, each of at most `most` characters of one page."""
    passages: list[Passage] = []
    for number, document in enumerate(documents):
        pages = document.text.split(PAGE_BREAK) if document.is_paged else [document.text]
        for page, text in enumerate(pages, 1):
            line = 1
            for piece in _pieces(text, most):
                n_lines = piece.count("\n")
                if piece.strip():
                    first = line + piece[: len(piece) - len(piece.lstrip())].count("\n")
                    last = line + piece.rstrip().count("\n")
                    place = (page, page) if document.is_paged else (first, last)
                    passages.append(Passage(number, document.name, piece, *place, document.is_paged))
                line += n_lines
    return passages


def _pieces(text: str, most: int) -> Iterator[str]:
    """Yield a text in pieces of at most `most` characters, which together are the text.

    A piece ends where a paragraph does, else where a sentence, a line or a word does, in its second half.
    """
    at = 0
    while len(text) - at > most:
        ends: dict[int, int] = {}
        for match in _BREAKS.finditer(text, at + most // 2, at + most):
            ends[match.lastindex or 0] = match.end()
        end = ends[min(ends)] if ends else at + most
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]


def words(text: str) -> list[str]:
    """Return the words of a text as a search compares them.

    >>> words("Die Brücken, 2x: naïve brücke")
    ['die', 'brücken', 'brück-', '2x', 'naïve', 'brücke', 'brück-']
    >>> words("東京都は")
    ['東京', '京都', '都は']
    """
    parts: list[str] = []
    for unspaced, word in _WORDS.findall(unicodedata.normalize("NFKC", text).casefold()):
        parts += [unspaced[i : i + 2] for i in range(max(1, len(unspaced) - 1))] if unspaced else [word]
        if len(word) > _STEM:
            parts.append(f"{word[:_STEM]}-")
    return parts


def by_words(
    passages: Sequence[Passage],
    question: str,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> list[int]:
    """Return the indices of the passages that match the words of a question, the best first.

    The order is that of Okapi BM25 (Robertson and Zaragoza 2009, doi:10.1561/1500000019); of equal ones the first comes
    first. Passages with less than 0.15 of the best score are left out.

    Raises:
        CancelledError: `cancel` was cancelled.
    """
    asked = Counter(words(question))
    counts: list[dict[str, int]] = []
    lengths: list[int] = []
    n_with = Counter[str]()
    for i, passage in enumerate(passages):
        if i % _EVERY == 0:
            check_cancelled(cancel, "the search")
            report_progress(on_progress, "searching", i, len(passages), "passages")
        there = words(passage.text)
        shared = {word: n for word, n in Counter(there).items() if word in asked}
        counts.append(shared)
        lengths.append(len(there))
        n_with.update(shared.keys())
    report_progress(on_progress, "searching", len(passages), len(passages), "passages")
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    rarity = {word: math.log(1 + (len(passages) - n + 0.5) / (n + 0.5)) for word, n in n_with.items()}
    scores = [
        sum(
            asked[word] * rarity[word] * n * (_K1 + 1) / (n + _K1 * (1 - _B + _B * length / mean))
            for word, n in shared.items()
        )
        for shared, length in zip(counts, lengths, strict=True)
    ]
    least = _FLOOR * max(scores, default=0.0)
    return sorted((i for i, score in enumerate(scores) if score > 0 and score >= least), key=lambda i: -scores[i])
