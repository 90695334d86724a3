"""Text in Markdown that is shown while it comes: what may still change is drawn again in place."""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from shutil import get_terminal_size

from edgedec_apps.cli.shown.markdown_text import blocks_of, lines_of, new_console, width_of

_PAUSE_S = 0.03  # between two drawings
_SHARE = 10  # drawing takes at most one part in so many of the time


class LiveMarkdown:
    """Shows a text on standard output, a terminal, as it comes.

    Only the last block of the text changes with what comes next. Its lines are drawn again where they differ. The lines
    of earlier blocks are left alone, and so are lines that have left the terminal at its top.
    """

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        size: Callable[[], Sequence[int]] = get_terminal_size,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """Begin a text.

        Args:
            write: Writes to the terminal; None for standard output.
            size: Returns the terminal's columns and rows.
            pause_s: Least time between two drawings.
        """
        self._write, self._size, self._pause_s = write or _to_standard_output, size, pause_s
        self._console = new_console()
        self._text = ""  # of the blocks that may still change
        self._n_blocks = 0  # above them
        self._n_above = 0  # lines of these blocks that have left the part that is drawn again
        self._lines: list[str] = []  # of these blocks, as they are shown
        self._columns = 0
        self._next_s = 0.0  # when it is drawn again

    def write(self, text: str) -> None:
        """Add to the text."""
        self._text += text
        now = time.monotonic()
        if now >= self._next_s:
            self._draw()
            self._next_s = time.monotonic() + max(self._pause_s, _SHARE * (time.monotonic() - now))

    def end(self) -> None:
        """Show all of the text, and end its last line."""
        self._draw()
        if self._lines:
            self._write("\n")
        self._text, self._lines = "", []

    def break_off(self) -> None:
        """End the line of the text for a note on standard error; what comes behind it begins a block of its own."""
        self.end()
        self._n_blocks = self._n_above = 0

    def _draw(self) -> None:
        columns, rows = self._size()
        columns, rows = max(columns, 20), max(rows, 4)
        blocks = blocks_of(self._text)
        if not blocks:
            return
        lines, ends = list[str](), [0]
        for number, block in enumerate(blocks, start=self._n_blocks):
            lines += (
                ["", *lines_of(block, self._console, columns - 1)]
                if number
                else lines_of(block, self._console, columns - 1)
            )
            ends.append(len(lines))
        self._show(lines[min(self._n_above, len(lines) - 1) :], columns)
        # What follows can't change a block behind which another one begins in a line that has ended.
        n_ended = self._text.count("\n")
        n_done = max((number for number, block in enumerate(blocks) if block.first_line < n_ended), default=0)
        n_over = max(ends[n_done], self._n_above, len(lines) - (rows - 1))
        self._lines = lines[n_over:]
        self._n_above = n_over - ends[n_done]
        self._n_blocks += n_done
        self._text = "\n".join(self._text.split("\n")[blocks[n_done].first_line :])

    def _show(self, lines: list[str], columns: int) -> None:
        """Put lines in the place of those that are shown; the cursor is, and stays, behind the last one."""
        old = self._lines
        n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, lines, strict=False)))
        changed = old[n_same:]
        if columns == self._columns and not changed:
            move, new = "\n" if old and lines[n_same:] else "", lines[n_same:]
        elif columns == self._columns and len(changed) == 1 and lines[n_same:] and lines[n_same].startswith(changed[0]):
            move, new = "", [lines[n_same].removeprefix(changed[0]), *lines[n_same + 1 :]]
        else:
            n_same = min(n_same, len(lines) - 1)
            n_up = sum(_rows(line, columns) for line in old[n_same:]) - 1
            move, new = f"\r\x1b[{n_up}A\x1b[J" if n_up > 0 else "\r\x1b[J", lines[n_same:]
        self._write(move + "\n".join(new))
        self._lines, self._columns = lines, columns


def _rows(line: str, columns: int) -> int:
    """Return how many rows of the terminal a line takes, which was drawn for another width."""
    return max(1, -(-width_of(line) // columns))


def _to_standard_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
