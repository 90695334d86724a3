"""What a person sees: text on standard output, all else on standard error.

Text from models and files is never markup, and control characters in it are made visible at a terminal, so that no
model can write escape sequences. Pipes and files get it as it is.
"""

import json
import os
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from edgedec.counted import counted
from edgedec_apps.cli.explain import explanation

if TYPE_CHECKING:
    from edgedec.sequence import Generation

_KEPT = {"\n", "\t"}
# Controls get their pictures (U+2400...); C1 controls and direction overrides a replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE |= {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
_BREAKS = {0x0A: 0x240A, 0x0D: 0x240D}


def neutral(text: str) -> str:
    """Return the text with control characters made visible, but for line ends and tabs.

    >>> neutral("a\\x1b[2Jb\\n")
    'a␛[2Jb\\n'
    """
    return text.translate(_VISIBLE)


def one_line(text: object) -> str:
    """Return a value from a file without line ends, which could pass for lines of ours.

    >>> one_line("a\\nb")
    'a␊b'
    """
    return str(text).translate(_BREAKS)


def prepare_streams() -> None:
    """Make the standard streams take any character: UTF-8 into pipes, replacements on consoles that lack it.

    A stream that was closed before the start becomes the null device, or the first file opened would take its place.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the end
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            piped = not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf-8" if piped else stream.encoding, errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # for what is typed; pipes are read as bytes


def abandon_output() -> None:
    """Send what standard output still holds, and all that follows, nowhere: it can't be written."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def say(message: str) -> None:
    """Print a line for the person, on standard error; where that is closed there is nobody to tell."""
    with suppress(OSError, ValueError):
        print(_for(sys.stderr, message), file=sys.stderr, flush=True)


def write_text(text: str) -> None:
    """Write generated text to standard output at once."""
    sys.stdout.write(_for(sys.stdout, text))
    sys.stdout.flush()


def write_line(line: str) -> None:
    """Write a line of a report to standard output."""
    sys.stdout.write(_for(sys.stdout, line) + "\n")


def write_json(document: Any) -> None:
    """Write one JSON object to standard output, in ASCII, so that no console's encoding can damage it."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def write_facts(rows: list[tuple[str, str]], *, indent: str = "") -> None:
    """Write names and values in two columns; at a terminal, long values go on below themselves."""
    width = max((len(name) for name, _ in rows), default=0)
    columns = max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else 0
    for name, value in rows:
        line = f"{indent}{name:{width}}  {one_line(value)}".rstrip()
        hanging = " " * (len(indent) + width + 2)
        if len(line) > columns > len(hanging) + 20:
            line = textwrap.fill(line, columns, subsequent_indent=hanging, break_on_hyphens=False)
        write_line(line)


def summary(generation: "Generation") -> str:
    """Return the one line that follows a reply."""
    stats = generation.stats
    n = stats.n_generated_tokens
    parts = [f"first token {stats.first_token_s:.2f} s"] if stats.first_token_s else []
    if stats.tokens_per_s:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    parts.append(f"{counted(n, 'token')} ({generation.finish_reason})")
    drafted = f"drafted {stats.n_draft_tokens}, accepted {stats.n_accepted_tokens}"
    parts.append(drafted if stats.n_drafts else "nothing drafted")
    if stats.n_reused_tokens:
        parts.append(f"reused {stats.n_reused_tokens} of {stats.n_prompt_tokens}")
    return " · ".join([*parts, *stats.reasons])


def say_summary(generation: "Generation", *, explain: bool = False) -> None:
    """Print the line that follows a reply, at a terminal set off from it; then, where asked for, the explanation."""
    separator = "\n" if sys.stderr.isatty() and sys.stdout.isatty() else ""
    say(separator + summary(generation))
    if explain:
        for line in explanation(generation.stats):
            say(f"  {line}")


def _for(stream: TextIO, text: str) -> str:
    return neutral(text) if stream.isatty() else text
