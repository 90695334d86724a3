"""edgedec launch: a coding agent, or another program, on a model of this machine."""

import difflib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgedec.errors import EdgedecError, RequestError
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, flag, model_flag
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.options import Context
from edgedec_apps.cli.server_client import DEFAULT_URL, Address, ask, listens, url_of
from edgedec_apps.cli.shown.terminal import one_line, say, write_line

if TYPE_CHECKING:
    from edgedec_apps.launching import Setup, Target, Tool

_NAMES = ("claude", "codex", "opencode", "aider", "continue", "zed")
_PORT, _N_CTX = 8080, 32768
_ANSWER_S = 3600  # a long first prompt takes minutes on a slow machine
_POLL_S = 0.1
_ROOM = 2  # a context of twice the first prompt leaves room for some turns
_Server = subprocess.Popen[bytes]


def command(
    tool: Annotated[str, argument("TOOL", f"{', '.join(_NAMES)}.", complete=completion.one_of(*_NAMES))],
    words: Annotated[
        list[str] | None, argument("[-- ARGUMENT]...", "What TOOL gets, such as: -- -p 'Explain main.py'.")
    ] = None,
    *,
    model: str | None = model_flag(
        "--model NAME", "The model (default: what the server has loaded).", complete=completion.stored_model
    ),
    context: Context = None,
    memory: str | None = model_flag("--memory SIZE", "Most memory of a server that is started."),
    server: Address,
    config: bool = flag("--config", "Only print what TOOL would be told.", False, panel="Settings"),
    undo: bool = flag("--undo", "Give back the settings file that was written.", False, panel="Settings"),
    yes: bool = flag("--yes -y", "Write the settings file without a question.", False, panel="Settings"),
) -> None:
    """Start a coding agent on a model of this machine: a server, the agent's settings, and the agent.

    A server that runs is used. Otherwise one is started, with as much context as its plan allows, and ends with TOOL;
    prompts that were read are kept on the disk. Ctrl-C goes to TOOL.

    Settings are variables and arguments, which are shown. Only continue needs a file: its changes are shown, it is
    copied first, and --undo gives it back. zed's settings are only printed.
    """
    from edgedec_apps.launching import command_of, tool_of

    chosen = tool_of(tool)
    if undo:
        _undo(chosen)
        return
    if config or not (chosen.executable or chosen.file):
        _write_setup(chosen, chosen.setup(_described(server, model, context)), words or [])
        return
    program = shutil.which(chosen.executable) if chosen.executable else ""
    if program is None:
        raise RequestError(f"{chosen.executable} is not installed; {chosen.title} comes with: {chosen.install}")
    with _served(server, model, context, memory) as (target, process):
        _tell_of_room(chosen, target)
        setup = chosen.setup(target)
        if not program:
            _write_file(chosen, setup, yes=yes)
            if process is not None:
                say(f"edgedec: {target.url} serves {one_line(target.model)} until Ctrl-C")
                _wait_for(process)
            return
        for line in _lines(chosen, setup, words or []):
            say(f"edgedec: {line}")
        code = _run([program, *command_of(setup, words or [])], setup.variables)
    raise typer.Exit(code)


def _undo(tool: "Tool") -> None:
    """Give back the file of a program.

    Raises:
        RequestError: None is written for it, nothing was written, or it was edited since.
    """
    from edgedec_apps.launch_files import undo_settings

    if not tool.file:
        raise RequestError(f"there is nothing to undo: no file of {tool.title} is written, its settings end with it")
    was_there = undo_settings(tool.path)
    say(f"edgedec: {tool.path} is {'as it was before' if was_there else 'deleted; there was none before'}")


def _described(server: Address, model: str | None, context: int | None) -> "Target":
    """Return what a program would be told by a server that runs, or by one that would be started."""
    from edgedec_apps.launching import Target

    if listens(server):
        return _target(server, model, context)
    return Target(url_of(server), _named(model), context or _N_CTX)


def _named(model: str | None) -> str:
    if model is None:
        raise RequestError("no model is loaded; add --model NAME (edgedec list has those of this machine)")
    return model


def _target(server: Address, model: str | None, context: int | None) -> "Target":
    """Return what a program is told by a server, which loads the model and waits for it.

    Raises:
        RequestError: No model is named, and none is loaded; or the context does not fit.
        ModelNotFoundError: The server has no such model.
    """
    from edgedec_apps.launching import Target

    loaded: list[dict[str, Any]] = ask("GET", server, "/api/ps").get("models", [])
    name = _named(model or next((each["name"] for each in loaded), None))
    options = {} if context is None else {"num_ctx": context}
    ask("POST", server, "/api/generate", {"model": name, "stream": False, "options": options})
    facts = ask("POST", server, "/api/show", {"model": name}).get("model_info", {})
    return Target(url_of(server), name, int(facts.get("edgedec.context_length", 0)), server.api_key or "none")


@contextmanager
def _served(
    server: Address, model: str | None, context: int | None, memory: str | None
) -> "Iterator[tuple[Target, _Server | None]]":
    """Yield what a program is told, and the process of a server, where none ran; it ends with the block.

    Raises:
        EdgedecError: The server did not start.
    """
    if listens(server) or server.url != DEFAULT_URL:
        target = _target(server, model, context)
        say(f"edgedec: the server at {target.url} has {one_line(target.model)}")
        yield target, None
        return
    options = {"--port": server.port or _PORT, "--timeout": _ANSWER_S, "--context": context, "--memory": memory}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    say(f"edgedec: starting a server with {one_line(_named(model))}, which ends with the program")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgedec_apps.cli", "serve", _named(model), *words],
            env={**os.environ, **({} if server.api_key is None else {"EDGEDEC_API_KEY": server.api_key})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the program
        )
        try:
            while process.poll() is None and not listens(server):
                time.sleep(_POLL_S)
            try:
                target = _target(server, model, context)
            except EdgedecError as error:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_S)
                raise _reason(process, log) or error from error
            yield target, process
        finally:
            process.terminate()
            process.wait()


def _reason(process: _Server, log: Any) -> EdgedecError | None:
    """Return why a server ended, in its own words; None for one that runs."""
    if process.poll() is None:
        return None
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines() or [f"exit status {process.returncode}"]
    return EdgedecError(f"the server did not start: {lines[-1].removeprefix('edgedec: ')}")


def _tell_of_room(tool: "Tool", target: "Target") -> None:
    """Say where the context is too small for the prompts of a program, and what to do."""
    if target.n_ctx < _ROOM * tool.n_prompt:
        say(
            f"edgedec: {one_line(target.model)} has a context of {target.n_ctx} tokens, and the first prompt of "
            f"{tool.title} has about {tool.n_prompt}: use --context {_ROOM * tool.n_prompt}, more --memory, or a "
            "smaller model or one that was trained for more"
        )


def _lines(tool: "Tool", setup: "Setup", words: list[str]) -> list[str]:
    """Return what a program is told, as lines for a shell; keys that are none of ours are not shown."""
    from edgedec_apps.launching import command_of

    shown = {
        name: "..." if name.endswith(("_KEY", "_TOKEN")) and value not in ("", "none") else value
        for name, value in setup.variables.items()
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in shown.items()]
    return [*lines, shlex.join([tool.executable, *command_of(setup, words)])] if tool.executable else lines


def _write_setup(tool: "Tool", setup: "Setup", words: list[str]) -> None:
    """Print what a program is told."""
    for line in [*_lines(tool, setup, words), *setup.settings.splitlines()]:
        write_line(line)


def _write_file(tool: "Tool", setup: "Setup", *, yes: bool) -> None:
    """Show what changes in the file of a program, ask, and write it.

    Raises:
        RequestError: Nobody can be asked, or the file was edited since it was written.
        typer.Exit: The answer is not yes.
    """
    from edgedec_apps.launch_files import copy_of, holds, text_before, write_settings
    from edgedec_apps.launching import with_models

    before = text_before(tool.path)
    after = with_models(before, setup.settings)
    if holds(tool.path, after):
        say(f"edgedec: {tool.path} has these settings")
        return
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), str(tool.path), "after", lineterm=""):
        say(line)
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError(f"nobody can be asked whether to write {tool.path}; add --yes")
        print("Write this? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was written")
            raise typer.Exit(0)
    write_settings(tool.path, after)
    kept = f"; what was there is in {copy_of(tool.path)}" if before else ""
    say(f"edgedec: {tool.path} is written{kept}; edgedec launch continue --undo takes it back")


def _run(words: list[str], variables: Mapping[str, str]) -> int:
    """Run a program until it ends, and return its exit code; Ctrl-C, which the terminal sends it too, is its own."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(words, env={**os.environ, **variables})
        try:
            code = process.wait()
        finally:
            if process.poll() is None:  # SIGTERM ends this process
                process.terminate()
                process.wait()
    except OSError as error:
        raise EdgedecError(f"{words[0]} could not be started: {error.strerror or error}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else of_signal(-code)


def _wait_for(process: _Server) -> None:
    with suppress(KeyboardInterrupt):
        process.wait()
