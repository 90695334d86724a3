"""The messages that a person types in a chat, and the lines that are kept for the next one."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from edgedec_apps.cli.shown.terminal import say

_QUOTES = '"""'


def typed_messages(history: Path | None) -> Iterator[str]:
    """Yield the messages that a person types, until Ctrl-D; three quotation marks enclose one of several lines.

    Args:
        history: The file that keeps what is typed; None for no file.
    """
    ask = _reader(history)
    while True:
        try:
            text = ask(">>> ")
            if text.startswith(_QUOTES):
                text = _more_lines(text.removeprefix(_QUOTES), ask)
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /bye leaves)")
            continue
        if text.strip():
            yield text


def is_screen() -> bool:
    """Return whether standard output is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"


def _reader(history: Path | None) -> Callable[[str], str]:
    """Return what asks for a line: an editor at a terminal, a plain read elsewhere."""
    if is_screen():
        return line_editor(history)
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  # gives input() editing
    return _plain_line


def _more_lines(first: str, ask: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].endswith(_QUOTES):
        lines.append(ask("... "))
    return "\n".join(lines).removesuffix(_QUOTES).strip("\n")


def _plain_line(prompt: str) -> str:
    """Return a typed line without its end; the prompt goes to standard error where standard output is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


MOST_BYTES = 1_000_000
"""Most bytes of the file at a start; of a longer one, the newer half is kept."""


class TypedHistory:
    """The lines of a file of history, one JSON string each. Where the file can't be used, nothing is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        """Return the lines, oldest first; damaged ones are left out."""
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
        for line in data.splitlines():
            with suppress(ValueError, RecursionError):
                typed.append(json.loads(line))
        return [line for line in typed if isinstance(line, str)]

    def add(self, line: str) -> None:
        """Append a line."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "wb") as file:
                file.write(json.dumps(line).encode() + b"\n")


def line_editor(history: Path | None) -> Callable[[str], str]:
    """Return a function that shows a prompt and returns what was typed behind it.

    The function raises EOFError for Ctrl-D on an empty line, and KeyboardInterrupt for Ctrl-C.

    Args:
        history: The file of what was typed at earlier starts; None keeps it for this start only.
    """
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else _Kept(TypedHistory(history)),
        completer=_Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        key_bindings=_keys(),
        output=_output(),
    )
    return session.prompt


class _Kept(History):
    """Our file, as prompt_toolkit wants its history: the newest line first."""

    def __init__(self, history: TypedHistory) -> None:
        super().__init__()
        self._kept = history

    def load_history_strings(self) -> Iterable[str]:
        """Return the lines of the file."""
        return reversed(self._kept.lines())

    def store_string(self, string: str) -> None:
        """Append a line to the file."""
        self._kept.add(string)


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
