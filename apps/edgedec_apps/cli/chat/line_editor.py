"""The line that a person types at a terminal: edited, pasted in several lines, completed, and found again later.

This is prompt_toolkit with the settings of a chat. A paste of several lines is one message: the terminal brackets it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import get_terminal_size

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from edgedec_apps.cli.chat.settings import setting_names
from edgedec_apps.cli.chat.slash_commands import beginnings
from edgedec_apps.cli.chat.typed_history import TypedHistory
from edgedec_apps.cli.completion import any_model


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
