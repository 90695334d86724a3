"""edgedec run with files: read whole or searched, one or several, one question or more; what is said of it."""

import re
from pathlib import Path

import pytest
from support.models.tiny_bert import TinyBert
from support.processes.command_line import run_here
from support.texts.pdf_files import pdf_of

from edgedec_apps.documents.files import read_document
from edgedec_apps.documents.passages import passages_of
from edgedec_apps.documents.search import by_meaning

pytestmark = pytest.mark.slow

SHORT = ("-t", "0", "-n", "8", "--method=ignore-end", "--runtime", "cpu", "-c", "600")
LINES = [f"Line {i} tells of thing {i * 7}." for i in range(1, 101)]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text of 100 lines, longer than the context."""
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def test_what_fits_is_read_whole(model: Path, tmp_path: Path) -> None:
    """A PDF is its pages' text, several files stand below their names, a PDF may be piped; nothing is said."""
    note, paper = tmp_path / "a.txt", tmp_path / "b.pdf"
    note.write_text("one\n", encoding="utf-8")
    paper.write_bytes(pdf_of("two", "", "three"))
    both = "File a.txt:\n\none\n\nFile b.pdf:\n\ntwo\n\nthree\n\nWhy?"
    for given, args, stdin in (
        ("two\n\nthree\n\nWhy?", ("-f", paper), b""),
        ("two\n\nthree\n\nWhy?", (), paper.read_bytes()),
        (both, ("-f", note, "-f", paper), b""),
    ):
        found = run_here("run", model, "Why?", *args, *SHORT, "--json", stdin=stdin).document()
        alone = run_here("run", model, given, *SHORT, "--json").document()
        assert found["token_ids"] == alone["token_ids"]
        assert found["stats"]["n_prompt_tokens"] == alone["stats"]["n_prompt_tokens"]
        assert "search" not in found


def test_what_is_too_long_is_searched_and_that_is_said(model: Path, book: Path) -> None:
    """The text is that of a prompt with the passages; they are told, with their places, and so is the sum."""
    found = run_here("run", model, "thing 441", "-f", book, *SHORT, "--json", "--explain")
    read = found.document()["search"]
    place = read["passages"][0]["place"]
    shown = "\n\n".join(f"[book.txt, {each['place']}]\n{each['text']}" for each in read["passages"])
    alone = run_here("run", model, f"{shown}\n\nthing 441", *SHORT, "--json").document()
    assert found.document()["token_ids"] == alone["token_ids"]
    assert LINES[62] in shown, "the line with thing 441"
    assert f"of {read['n_passages']} passages ({place}" in found.err
    assert f"read: book.txt, {place}: " in found.err
    assert "too long" not in run_here("run", model, "thing 441", "-f", book, *SHORT, "-q").err


FACTS = {3: "Ingrid built the lighthouse.", 8: "The key lies under a stone."}


@pytest.fixture
def made_books(tmp_path: Path) -> dict[str, tuple[Path, list[str]]]:
    """A book of twelve pages with a fact on some, as a PDF and as a text, with the place of each page."""
    tale = ["The baker sold bread.", "The boats were late.", "The town slept well."]
    pages = ["\n".join([*tale, FACTS.get(page, tale[0]), *tale]) for page in range(1, 13)]
    pdf, text = tmp_path / "book.pdf", tmp_path / "book.txt"
    pdf.write_bytes(pdf_of(*pages))
    text.write_text("\n\n".join(pages), encoding="utf-8")
    lines = text.read_text(encoding="utf-8").splitlines()
    of_line = [str(lines.index(FACTS[page]) + 1) for page in FACTS]
    return {"pdf": (pdf, ["page 3", "page 8"]), "txt": (text, of_line)}


def is_at(place: str, wanted: str) -> bool:
    """Return whether a place is that page, or lines with that line."""
    first, *last = map(int, re.findall(r"\d+", place))
    return place == wanted or (
        place.startswith("line") and wanted.isdigit() and first <= int(wanted) <= (last or [first])[0]
    )


@pytest.mark.parametrize("kind", ["pdf", "txt"])
@pytest.mark.parametrize("command", ["run", "chat", "extract"])
def test_the_passages_that_matter_are_read_and_their_place_is_said(
    model: Path, made_books: dict[str, tuple[Path, list[str]]], kind: str, command: str
) -> None:
    """For each question about a book with known places: the right one first, and at most a quarter of the context."""
    path, places = made_books[kind]
    for place, question in zip(places, ("Who built the lighthouse?", "Where lies the key?"), strict=True):
        if command == "chat":
            result = run_here("chat", model, *SHORT, stdin=f"/file {path}\n{question}\n".encode())
        elif command == "run":
            result = run_here("run", model, question, "-f", path, *SHORT)
        else:
            result = run_here("extract", model, question, "-f", path, "-c", "600", "--span-tokens", "8")
            assert all(line.endswith(")") for line in result.text.splitlines())
        assert result.code == 0, result
        said = re.findall(r"of \d+ passages \(([^)]*)\)", result.err)
        assert len(said) == 1, result.err
        assert any(is_at(each, place) for each in re.split(r"[,;] ", said[0])), (said, place)


def test_at_most_a_quarter_of_the_context_is_read_unless_a_number_is_given(model: Path, book: Path) -> None:
    """Where every passage matches; the method's key has its number of them."""
    question, long = "Line tells of the thing", ("-c", "1200")
    short = run_here("run", model, question, "-f", book, *SHORT, *long, "--json").document()
    assert short["stats"]["n_prompt_tokens"] < 1200 // 4 + 100  # the question and the template are not counted
    for n in (1, 4):
        found = run_here(
            "run", model, question, "-f", book, *SHORT, *long, "--method", f"passages:n={n}", "--json"
        ).document()
        assert found["search"]["n_read"] == n
    quoted = ("extract", model, question, "-f", book, "-c", "600", "--span-tokens", "8", "--json")
    for options, asked in ((("--passages", "2"), ("--method", "passages:2")), ((), ())):
        found = run_here(*quoted, *options).document()  # the same passages are read for a quotation as for an answer
        answered = run_here("run", model, question, "-f", book, *SHORT, "-c", "600", *asked, "--json").document()
        assert found["search"] == answered["search"]
        assert found["search"]["n_read"] == 2 or not options
    for span in found["spans"]:
        read = found["search"]["passages"][span["passage"]]
        assert read["text"][span["start"] : span["end"]] == span["text"]
        assert span["place"] == read["place"]


def test_answers_to_several_questions_are_those_to_each_alone(model: Path, book: Path, tmp_path: Path) -> None:
    """Of a document that fits, the later questions read what is new; of a longer one, each has passages of its own."""
    note = tmp_path / "note.txt"
    note.write_text("\n".join(LINES[:10]), encoding="utf-8")
    asked = ("Which thing?", "thing 441", "Why?")
    for file in (note, book):
        together = run_here("run", model, *asked[:2], "-f", file, *SHORT, "--json").document()["answers"]
        for question, answer in zip(asked[:2], together, strict=True):
            alone = run_here("run", model, question, "-f", file, *SHORT, "--json").document()
            assert (answer["question"], answer["token_ids"]) == (question, alone["token_ids"])
            assert answer.get("search") == alone.get("search")
            assert ("search" in alone) == (file == book)
        if file == note:
            assert together[1]["stats"]["n_reused_tokens"] > len("\n".join(LINES[:10]))
    shown = run_here("run", model, *asked, "-f", note, *SHORT)
    texts = [run_here("run", model, question, "-f", note, *SHORT, "-q").text for question in asked]
    heads = [f"--- question {i} of 3: {question} ---\n" for i, question in enumerate(asked, 1)]
    assert shown.text == "".join(head + text for head, text in zip(heads, texts, strict=True))
    assert len(re.findall("first token", shown.err)) == 3


def test_a_text_too_many_is_drawn_for_each_question(model: Path, tmp_path: Path) -> None:
    """Questions, several texts of each, a stop string and a seed: as each question alone."""
    note = tmp_path / "note.txt"
    note.write_text("abc\n", encoding="utf-8")
    how = ("-f", note, "-n", "6", "-k", "2", "--seed", "5", "--stop", "a", "--runtime", "cpu", "-c", "600", "--json")
    together = run_here("run", model, "x", "y", *how).document()["answers"]
    for question, answer in zip("xy", together, strict=True):
        alone = run_here("run", model, question, *how).document()
        assert [text["token_ids"] for text in answer["texts"]] == [text["token_ids"] for text in alone["texts"]]


def test_passages_may_be_ranked_by_an_embedding_model(model: Path, book: Path, tmp_path: Path) -> None:
    """The best passage by its vectors is read first; the same ones are read again."""
    bert = TinyBert(seed=1).write_gguf(tmp_path / "bert.gguf", pooling_type=1)
    asked = ("run", model, "thing 441", "-f", book, *SHORT, "--method", f"passages:model={bert}", "--json")
    read = run_here(*asked).document()["search"]
    assert read == run_here(*asked).document()["search"]

    import edgedec

    passages = passages_of([read_document(book)], 80)  # of a quarter of the context
    with edgedec.load(bert) as embedder:
        best = passages[by_meaning(embedder, passages, "thing 441")[0]]
    assert len(passages) == read["n_passages"]
    assert any(best.text.strip() in each["text"] for each in read["passages"])


def test_a_prompt_that_does_not_fit_says_what_would_help(model: Path, book: Path) -> None:
    """The context to ask for, or a question; a question without a word of the document, and --raw, are told so."""
    alone = run_here("run", model, "-f", book, *SHORT)
    alone.failed(41, "trained for about 3840 (this one: 2048)", "Or ask a question about it: then edgedec searches it")
    run_here("run", model, "zebra", "-f", book, *SHORT).failed(41, "no passage with a word of the question fits")
    raw = run_here("run", model, "zebra", "-f", book, *SHORT, "--raw")
    raw.failed(41, "load a model that was trained for about")
    assert "search" not in raw.err
    run_here("run", model, "word " * 3000, *SHORT).failed(41, "load a model that was trained for", "(--method slide)")


def test_files_that_can_not_be_read_end_the_command(model: Path, tmp_path: Path) -> None:
    """Before a model is loaded, with the reason."""
    bad, empty = tmp_path / "bad.pdf", tmp_path / "empty.pdf"
    bad.write_bytes(b"%PDF-1.4 nothing")
    empty.write_bytes(pdf_of(""))
    for file, code, words in (
        (bad, 40, "it is no PDF, or damaged"),
        (empty, 40, "its pages have no text"),
        (tmp_path, 60, "is a directory"),
        (tmp_path / "no", 60, "No such file"),
    ):
        run_here("run", "no-such-model", "x", "-f", file).failed(code, words)
