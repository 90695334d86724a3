"""Searching documents: their passages and places, what matches a question, and how much of it fits."""

import random
from collections import Counter
from math import log

import pytest

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken, Progress
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.passages import Passage, by_words, passages_of, words
from edgedec_apps.documents.search import search, whole

LINES = [f"Line {i} tells of the thing {i * 7}." for i in range(1, 201)]
TEXT = Document("notes.txt", "\n".join(LINES) + "\n")
BOOK = Document("book.pdf", "\f".join(["The lighthouse stands at Skarvøy.", "", "Ragna keeps it. " * 20]), True)


def test_passages_are_the_document_and_know_their_place() -> None:
    """Lines of a text and pages of a PDF count from 1; a passage crosses no page, and an empty page has none."""
    found = passages_of([TEXT, BOOK], 200)
    texts = [each for each in found if each.document == 0]
    assert "".join(each.text for each in texts) == TEXT.text
    for each in texts:
        assert each.text.strip() == "\n".join(LINES[each.first - 1 : each.last])
        assert len(each.text) <= 200
    pages = [each for each in found if each.document == 1]
    assert {each.place for each in pages} == {"page 1", "page 3"}
    assert "".join(each.text for each in pages if each.first == 3) == BOOK.text.split("\f")[2]
    assert (texts[0].place, pages[0].name) == ("lines 1-6", "book.pdf")


@pytest.mark.parametrize("most", [2, 7, 50])
def test_any_text_is_cut_into_pieces_that_are_the_text(most: int) -> None:
    """Paragraphs, sentences without spaces, words without an end, blanks: nothing is lost, and nothing is too long."""
    rng = random.Random(most)
    for _ in range(200):
        text = "".join(rng.choice("ab .\n。語") for _ in range(rng.randrange(200)))
        found = passages_of([Document("x", text)], most)
        assert all(0 < len(each.text) <= most for each in found)
        assert "".join("".join(each.text for each in found).split()) == "".join(text.split())


def test_words_need_no_language() -> None:
    """Case and width do not matter; long words have their beginning, too; scripts without spaces have pairs."""
    assert words("Ｔｈｅ BRÜCKEN, Brücke_2") == ["the", "brücken", "brück-", "brücke", "brück-", "2"]
    assert words("灯台の鍵 ok") == ["灯台", "台の", "の鍵", "ok"]
    assert words(" \n.,-") == []


def test_the_order_is_that_of_bm25() -> None:
    """Computed again from the definition, for random texts; passages that match little or nothing are left out."""
    rng = random.Random(3)
    animals = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu")
    texts = [" ".join(rng.choices(animals, k=rng.randrange(1, 30))) for _ in range(40)]
    passages = [Passage(0, "x", text, 1, 1, False) for text in texts]
    wanted, counts = Counter(words("fox bee fox zebra")), [Counter(words(text)) for text in texts]
    mean = sum(map(len, map(words, texts))) / 40
    scores = []
    for count in counts:
        score = 0.0
        for word, times in wanted.items():
            n = sum(word in other for other in counts)
            rarity = log(1 + (40 - n + 0.5) / (n + 0.5))
            length = sum(count.values()) / mean
            score += times * rarity * count[word] * 2.2 / (count[word] + 1.2 * (0.25 + 0.75 * length))
        scores.append(score)
    expected = sorted((i for i in range(40) if scores[i] >= 0.15 * max(scores)), key=lambda i: (-scores[i], i))
    assert by_words(passages, "fox bee fox zebra") == expected
    assert by_words(passages, "zebra") == by_words([], "fox") == []


def test_what_fits_is_read_in_the_documents_order() -> None:
    """The best passages that fit, neighbours joined, each below its place; the same ones every time."""
    question = "Where is the lighthouse of Skarvøy, and thing 700?"
    reports: list[Progress] = []
    found = search([TEXT, BOOK], question, 400, lambda text: len(text) <= 700, on_progress=reports.append)
    assert found is not None
    assert len(found.content) <= 700
    assert found.content.endswith(f"\n\n{question}")
    assert "[book.pdf, page 1]\nThe lighthouse stands at Skarvøy.\n\n" in found.content
    places = [(each.document, each.first) for each in found.passages]
    assert places == sorted(places)
    assert "the thing 700" in found.content
    assert found.document()["n_read"] == found.n_read <= found.n_searched == len(passages_of([TEXT, BOOK], 200))
    assert found == search([TEXT, BOOK], question, 400, lambda text: len(text) <= 700)
    assert "longer than the context of 512 tokens" in found.line("notes.txt", 512)
    assert (reports[-1].done, reports[-1].total) == (found.n_searched, found.n_searched)


@pytest.mark.parametrize("room", range(60, 700, 40))
def test_as_much_as_fits_is_read(room: int) -> None:
    """One more of the ranked passages would not fit, whatever the room."""
    question, ranked = "the thing 700", [20, 10, 11, 3, 30]
    found = search([TEXT], question, 400, lambda text: len(text) <= room, rank=lambda *_: ranked[:])
    fits = [n for n in range(1, len(ranked) + 1) if len(_content(ranked[:n], question)) <= room]
    assert (found.n_read if found else 0) == max(fits, default=0)
    if found:
        assert found.content == _content(ranked[: found.n_read], question)


def _content(chosen: list[int], question: str) -> str:
    passages, last = passages_of([TEXT], 200), -2
    texts: list[tuple[int, list[Passage]]] = []
    for i in sorted(chosen):
        if i == last + 1:
            texts[-1][1].append(passages[i])
        else:
            texts.append((passages[i].first, [passages[i]]))
        last = i
    shown = [
        f"[notes.txt, lines {first}-{group[-1].last}]\n{''.join(each.text for each in group).strip()}"
        for first, group in texts
    ]
    return "\n\n".join([*shown, question])


def test_a_search_can_be_cancelled() -> None:
    """A long document does not hold Ctrl-C up."""
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        search([TEXT], "thing", 400, lambda text: True, cancel=cancel)


def test_documents_that_fit_are_whole() -> None:
    """Alone as it stands, without its pages' breaks; several below their names; the question comes last."""
    assert whole([TEXT], "Why?", with_names=False) == f"{TEXT.text}\n\nWhy?"
    assert whole([BOOK], None, with_names=False).startswith("The lighthouse stands at Skarvøy.\n\nRagna")
    both = whole([Document("a", "one\n"), Document("b", "two")], "Why?", with_names=True)
    assert both == "File a:\n\none\n\nFile b:\n\ntwo\n\nWhy?"
    assert whole([Document("a", " \n")], "Why?", with_names=False) == "Why?"
