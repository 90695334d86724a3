"""A terminal's screen for tests: it knows line ends, moving up, erasing below and colours."""

import re
from unicodedata import east_asian_width

_PART = re.compile("\x1b\\[([0-9;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """What a terminal shows, with the rows that have left it at the top."""

    def __init__(self, columns: int, rows: int) -> None:
        """Begin with an empty screen."""
        self.fed: list[str] = []
        self._columns, self._n_rows = columns, rows
        self._rows = [""]
        self._y, self._x = 0, 0

    @property
    def text(self) -> str:
        """All rows, without colours, blanks at their ends and empty rows at the end."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip("\n")

    def feed(self, text: str) -> None:
        """Take what a program writes."""
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
