"""What a person has typed in chats, kept across starts in a file that only its owner can read."""

import json
import os
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from edgedec.storage.whole_file import write_atomically

MOST_BYTES = 1_000_000
"""Most bytes of the file at a start; of a longer one, the newer half is kept."""


class TypedHistory(History):
    """The lines of a file of history, one JSON string each. Where the file can't be used, nothing is kept."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> list[str]:
        """Return the lines, the newest first; damaged ones are left out."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MOST_BYTES // 2 if size > MOST_BYTES else 0))
                data = file.read()
            if size > MOST_BYTES:
                data = data.partition(b"\n")[2]
                write_atomically(self._path, data, private=True)
        except OSError:
            return []
        typed = []
        for line in reversed(data.splitlines()):
            with suppress(ValueError, RecursionError):
                typed.append(json.loads(line))
        return [line for line in typed if isinstance(line, str)]

    def store_string(self, string: str) -> None:
        """Append a line."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "wb") as file:
                file.write(json.dumps(string).encode() + b"\n")
