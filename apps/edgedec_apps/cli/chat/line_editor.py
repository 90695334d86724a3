"""The line that a person types at a terminal: edited, pasted in several lines, completed, and found again later.

This is prompt_toolkit with the settings of a chat. A paste of several lines is one message: the terminal brackets it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from edgedec.storage.whole_file import write_atomically
from edgedec_apps.cli.chat.settings import setting_names
from edgedec_apps.cli.chat.slash_commands import beginnings
from edgedec_apps.cli.completion import any_model

MOST_BYTES = 1_000_000
"""Most bytes of the file at a start; of a longer one, the newer half is kept."""


def line_editor(history: Path | None) -> Callable[[str], str]:
    """Return a function that shows a prompt and returns what was typed behind it.

    The function raises EOFError for Ctrl-D on an empty line, and KeyboardInterrupt for Ctrl-C.

    Args:
        history: The file of what was typed at earlier starts; None keeps it for this start only.
    """
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else TypedHistory(history),
        completer=_Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        key_bindings=_keys(),
        output=_output(),
    )
    return session.prompt


class TypedHistory(History):
    """What a person has typed in chats, kept across starts in a file that only its owner can read.

    It has a JSON string a line. Where the file can't be used, nothing is kept.
    """

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


class _Commands(Completer):
    """Completes commands, the names that /set knows, and files."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield what may stand at the end of the text before the cursor."""
        command, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            yield from _beginning(command, beginnings() if command.startswith("/") else [])
        elif command == "/set" and " " not in rest:
            yield from _beginning(rest, [f"{name} " for name in setting_names()])
        elif command in ("/save", "/load", "/file", "/image"):
            yield from self._paths.get_completions(Document(rest), complete_event)
        elif command == "/model":
            yield from _beginning(rest, any_model(rest))


def _beginning(text: str, names: Sequence[str]) -> Iterable[Completion]:
    return (Completion(each, start_position=-len(text)) for each in names if each.startswith(text))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _output() -> Output:
    """Return the terminal; it is never asked where the cursor is, as not all of them answer."""
    output = create_output()
    if not isinstance(output, Vt100_Output):  # a console of Windows
        return output

    def size() -> Size:
        columns, rows = get_terminal_size()
        return Size(rows=rows, columns=columns)

    return Vt100_Output(sys.stdout, size, term=os.environ.get("TERM"), enable_cpr=False)
