"""Markdown as lines for a terminal: a model's text, parsed by markdown-it and rendered by rich.

Nothing of the text is left out: HTML is text, the address of a link and of a picture is shown, and a backslash stays.
A line break of the model is a line break. Control characters are made visible, those too that an entity stands for.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, escape
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

from edgedec_apps.cli.shown.terminal import neutral

# Rules of markdown-it that take text away, or that make a heading of a paragraph before a line of dashes.
_WITHOUT = ("image", "lheading", "reference")
_ESCAPED = frozenset("*_`~")  # a backslash before another character stays, as in the formulas of TeX
_STYLES = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.code": "cyan",
        "markdown.link_url": "underline",
    }
)
_CODE_THEME = "ansi_dark"  # the terminal's own colours, without a background
_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
_BLANK_END = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, heading, list, table, quotation or block of code of a text.

    Attributes:
        tokens: What markdown-it made of it.
        first_line: The number of its first line in the text, from 0.
    """

    tokens: Sequence[Token]
    first_line: int


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a text in Markdown, without control characters."""
    blocks, begun = list[Block](), list[Token]()
    for token in _safe(_parser().parse(neutral(text))):
        begun.append(token)
        if token.level == 0 and token.nesting <= 0:
            blocks.append(Block(begun, (begun[0].map or [0])[0]))
            begun = []
    return blocks


def new_console() -> Console:
    """Return a console that renders blocks for the terminal of this process, with as many colours as that has."""
    return Console(file=io.StringIO(), force_terminal=True, theme=_STYLES, highlight=False, legacy_windows=False)


def lines_of(block: Block, console: Console, width: int) -> list[str]:
    """Return a block as lines of at most `width` cells, with escape sequences for colours, and without line ends."""
    console.width = width
    with console.capture() as capture:
        console.print(_Rendered(block.tokens))
    lines = [_BLANK_END.sub(_end, line) for line in capture.get().split("\n")]
    filled = [number for number, line in enumerate(lines) if width_of(line)] or [0]
    return lines[filled[0] : filled[-1] + 1]


def width_of(line: str) -> int:
    """Return how many cells a line of `lines_of` takes.

    >>> width_of("\\x1b[1mgroß\\x1b[0m")
    4
    """
    return cell_len(_SEQUENCE.sub("", line))


def _end(blank: re.Match[str]) -> str:
    return _RESET if "\x1b" in blank[0] else ""


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(_WITHOUT)
    parser.inline.ruler.at("escape", _unescape)
    return parser


def _unescape(state: StateInline, silent: bool) -> bool:
    """Take a backslash away before a character that Markdown would else read as its own."""
    return state.src[state.pos + 1 : state.pos + 2] in _ESCAPED and escape(state, silent)


def _safe(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens with control characters made visible, and with a line break for each of the text."""
    for token in tokens:
        token.content = neutral(token.content)
        token.attrs = {name: neutral(str(value)) for name, value in token.attrs.items()}
        token.type = "hardbreak" if token.type == "softbreak" else token.type
        token.children = None if token.children is None else list(_safe(token.children))
        yield token


class _Title(Heading):
    """A heading at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the heading."""
        yield self.text


class _Code(CodeBlock):
    """A block of code: coloured, indented, without empty lines around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the code."""
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class _Rendered(Markdown):
    """Tokens of markdown-it that are parsed already."""

    elements = {**Markdown.elements, "heading_open": _Title, "fence": _Code, "code_block": _Code}  # noqa: RUF012 - as in rich

    def __init__(self, tokens: Sequence[Token]) -> None:
        super().__init__("", code_theme=_CODE_THEME, hyperlinks=False)
        self.parsed = list(tokens)
