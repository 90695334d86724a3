"""Markdown at a terminal: what is shown of a text, and that it is the same whatever the pieces it came in."""

import re
from random import Random
from unicodedata import east_asian_width

import pytest

from edgedec_apps.cli.shown import live_text
from edgedec_apps.cli.shown.live_text import LiveMarkdown
from edgedec_apps.cli.shown.markdown_text import blocks_of, lines_of, new_console, width_of

_PART = re.compile("\x1b\\[([0-9;]*)([A-Za-z])|(.)", re.DOTALL)
SAMPLE = """# A title

Here is **bold** and *italic* text with `code`, and words that wrap at the width of the terminal.
A second line of it, grüße 日本語 🙂.

1. One
2. Two

   ```python
   def f(x):
       return "a string"
   ```
- three

| a | bb |
|---|----|
| 1 | 22 |

> Said
> so

```
plain
    indented
```
The end"""
SHOWN = """A title

Here is bold and italic text with code,
and words that wrap at the width of the
terminal.
A second line of it, grüße 日本語 🙂.

 1 One
 2 Two
     def f(x):
         return "a string"

 • three

 a  bb
 ─────
 1  22

▌ Said
▌ so

  plain
      indented

The end"""


class Screen:
    """What a terminal shows, with the rows that have left it at the top: of line ends, moving up, erasing, colours."""

    def __init__(self, columns: int, rows: int) -> None:
        self.fed: list[str] = []
        self._columns, self._n_rows = columns, rows
        self._rows = [""]
        self._y, self._x = 0, 0

    @property
    def text(self) -> str:
        """All rows, without colours, blanks at their ends and empty rows at the end."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip("\n")

    def feed(self, text: str) -> None:
        self.fed.append(text)
        for number, kind, character in _PART.findall(text):
            if kind == "A":
                first = max(0, len(self._rows) - self._n_rows)  # the cursor never leaves the screen
                self._y = max(first, self._y - int(number or 1))
            elif kind == "J":
                del self._rows[self._y + 1 :]
                self._rows[self._y] = self._rows[self._y][: self._x]
            elif kind == "m":
                continue
            elif kind:
                raise AssertionError(f"an escape sequence that is not known: {number}{kind}")
            else:
                self._put(character)

    def resize(self, columns: int) -> None:
        """Make the terminal narrower: a row that is too long becomes several; the cursor is at the end."""
        self._columns = columns
        self._rows = [row[at : at + columns] for row in self._rows for at in range(0, max(1, len(row)), columns)]
        self._y, self._x = len(self._rows) - 1, len(self._rows[-1])

    def _put(self, character: str) -> None:
        if character == "\r":
            self._x = 0
        elif character == "\n":  # a terminal driver adds the carriage return
            self._down()
        else:
            if self._x_cells() >= self._columns:
                self._down()
            row = self._rows[self._y].ljust(self._x)
            self._rows[self._y] = row[: self._x] + character + row[self._x + 1 :]
            self._x += 1

    def _x_cells(self) -> int:
        return sum(1 + (east_asian_width(each) in "WF") for each in self._rows[self._y][: self._x])

    def _down(self) -> None:
        self._y, self._x = self._y + 1, 0
        if self._y == len(self._rows):
            self._rows.append("")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw at every piece, with 16 colours."""
    monkeypatch.setattr(live_text, "_SHARE", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)


def shown(pieces: list[str], columns: int = 40, rows: int = 24) -> Screen:
    """Return the screen after a text has come in pieces."""
    screen = Screen(columns, rows)
    live = LiveMarkdown(screen.feed, lambda: (columns, rows), 0.0)
    for piece in pieces:
        live.write(piece)
    live.end()
    return screen


def plain(text: str, width: int = 60) -> list[str]:
    """Return a text's lines without their colours, with an empty line between blocks."""
    console = new_console()
    lines = [["", *lines_of(block, console, width)] for block in blocks_of(text)]
    return [re.sub("\x1b\\[[0-9;]*m", "", line) for block in lines for line in block][1:]


def test_a_text_is_shown_as_markdown() -> None:
    """Headings, emphasis, lists, tables, quotations and code, wrapped at words."""
    assert shown([SAMPLE]).text == SHOWN


@pytest.mark.slow
@pytest.mark.parametrize("rows", [50, 24, 8, 4])
def test_the_pieces_change_nothing(rows: int) -> None:
    """Character by character, or in pieces of any length, the same lines stand there at the end.

    On a terminal that is lower than a block, too: what has left it is not drawn again.
    """
    for size in (1, 2, 7, 50):
        pieces = [SAMPLE[start : start + size] for start in range(0, len(SAMPLE), size)]
        assert shown(pieces, rows=rows).text == SHOWN


def test_a_text_grows_in_place() -> None:
    """Plain words are appended, and not drawn again."""
    screen = Screen(40, 24)
    live = LiveMarkdown(screen.feed, lambda: (40, 24), 0.0)
    for piece in ("and", " so", " on"):
        live.write(piece)
    live.end()
    assert screen.fed == ["\r\x1b[Jand", " so", " on", "", "\n"]


def test_a_note_stands_between_two_parts() -> None:
    """A text that is broken off ends its line, and goes on below the note without touching it."""
    shown: list[str] = []
    live = LiveMarkdown(shown.append, lambda: (40, 24), 0.0)
    live.write("one *two* ")
    live.break_off()
    shown.append("[note]\n")
    live.write("three\n\nfour")
    live.end()
    before, after = "".join(shown).split("[note]\n")
    assert before.endswith("\n")
    assert after == "three\n\nfour\n"


def test_nothing_is_drawn_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two drawings there is a pause; the end draws what came in it."""
    now = 0.0
    monkeypatch.setattr("edgedec_apps.cli.shown.live_text.time.monotonic", lambda: now)
    screen = Screen(40, 24)
    live = LiveMarkdown(screen.feed, lambda: (40, 24), 1.0)
    for now in (10.0, 10.5, 10.9, 11.0, 11.5):
        live.write(f"{now} ")
    assert screen.text == "10.0 10.5 10.9 11.0"
    live.end()
    assert screen.text == "10.0 10.5 10.9 11.0 11.5"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a <b>c</b> &lt;d&gt;", ["a <b>c</b> <d>"]),
        ("<think>\nso\n</think>", ["<think>", "so", "</think>"]),
        ("[a](http://b/c) ![d](http://e/f)", ["a (http://b/c) !d (http://e/f)"]),
        ("[a]: http://b", ["[a]: http://b"]),
        (r"\( x_1 \) \[ \frac{a}{b} \\ \] \, \% \*a\*", [r"\( x_1 \) \[ \frac{a}{b} \\ \] \, \% *a*"]),
        ("Roses are red\nViolets are blue", ["Roses are red", "Violets are blue"]),
        ("text\n---\nmore", ["text", "", "-" * 60, "", "more"]),
        (":smile: [bold]x[/]", [":smile: [bold]x[/]"]),
        ("```\n\n```", [""]),
        ("```nonsense\na\n```", ["  a"]),
        ("", []),
    ],
)
def test_nothing_is_left_out(text: str, lines: list[str]) -> None:
    """HTML, addresses, formulas and line breaks are shown; rich's own markup is text."""
    assert plain(text) == lines


@pytest.mark.parametrize(
    "text", ["a\x1b[2Jb", "`\x1b[2J`", "```\n\x1b]0;x\x07\n```", "&#x1b;[2J &#x202e;b", "[a](\x9b1m)"]
)
def test_no_text_controls_the_terminal(text: str) -> None:
    """The only escape sequences are those of colours, and those that move to what is drawn again."""
    fed = "".join(shown(list(text)).fed)
    rest = re.sub("\x1b\\[[0-9;]*[mAJ]", "", fed).replace("\n", "").replace("\r", "")
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", rest), rest
    assert "\x1b[2J" not in fed


def test_a_terminal_that_becomes_narrower() -> None:
    """What is drawn again then takes more rows than before, and all of them are found."""
    size = (40, 24)
    screen = Screen(40, 24)
    live = LiveMarkdown(screen.feed, lambda: size, 0.0)
    live.write("one two three four five six seven *eigh")
    screen.resize(20)
    size = (20, 24)
    live.write("t*")
    live.end()
    assert screen.text == "one two three four\nfive six seven\neight"


@pytest.mark.slow
def test_any_text_is_shown() -> None:
    """Whatever is written, nothing fails, and the pieces it came in change nothing."""
    random = Random(7)
    words = ("a", "word ", "\n", "\n\n", "    ", "\t", "\\", "<b>", "&amp;", "日", "🙂", "\x1b", "\ud800")
    marks = ("*", "**", "`", "```", "~~", "# ", "- ", "1. ", "> ", "|", "---", "[", "](", ")")
    for _ in range(60):
        pieces = random.choices(words + marks, k=25)
        assert shown(pieces, rows=200).text == shown(["".join(pieces)], rows=200).text


def test_widths_count_cells() -> None:
    """A wide character takes two cells, and an escape sequence none."""
    assert [width_of(text) for text in ("abc", "日本", "\x1b[1;31mx\x1b[0m", "")] == [3, 4, 1, 0]
