"""edgedec launch: a coding agent, or another program, on a model of this machine."""

import difflib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edgedec.errors import EdgedecError, RequestError
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, flag, model_flag
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.options import Context
from edgedec_apps.cli.server_client import DEFAULT_URL, Address, ask, listens, url_of
from edgedec_apps.cli.shown.terminal import one_line, say, write_line
from edgedec_apps.launch_files import is_as_written, text_before, undo_settings, write_settings
from edgedec_apps.launching import TOOLS, Target, Tool, tool_of, with_models

_PORT, _N_CTX, _TIMEOUT_S = 8080, 32768, 3600


def command(
    tool: Annotated[str, argument("TOOL", f"{', '.join(TOOLS)}.", complete=completion.one_of(*TOOLS))],
    words: Annotated[
        list[str] | None, argument("-- ARGUMENT...", "What TOOL gets, such as: -- -p 'Explain main.py'.")
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
    yes: bool = flag("--yes -y", "Write the settings file as shown.", False, panel="Settings"),
) -> None:
    """Start a coding agent on a model of this machine: a server, the agent's settings, and the agent.

    A server that runs is used. Otherwise one is started, with as much context as its plan allows, and ends with TOOL;
    prompts that were read are kept on the disk. Ctrl-C goes to TOOL.

    Settings are variables and arguments, which are shown. Only continue needs a file: its changes are shown, it is
    copied first, and --undo gives it back. zed's settings are only printed.
    """
    chosen, typed = tool_of(tool), words or []
    if undo:
        say(f"edgedec: {undo_settings(chosen.path) if chosen.file else f'no file of {chosen.title} is ever written'}")
        return
    runs = listens(server) or server.url != DEFAULT_URL
    if runs and memory is not None:
        raise RequestError(f"--memory is for a server that is started, not that at {url_of(server)}: leave it out")
    if config or not (chosen.executable or chosen.file):
        target = _target(server, model, context) if runs else Target(url_of(server), _named(model), context or _N_CTX)
        for line in _lines(chosen, target, typed):
            write_line(line)
        return
    program = shutil.which(chosen.executable) if chosen.executable else ""
    if program is None:
        raise RequestError(f"{chosen.executable} is not installed; {chosen.title} comes with: {chosen.install}")
    with nullcontext() if runs else _started(server, _named(model), context, memory) as process:
        is_path = process is not None and Path(_named(model)).exists()  # which requests can't have
        target = _target(server, "default" if is_path else model, context)
        _tell_of_context(chosen, target)
        setup = chosen.setup(target)
        if program:
            for line in _lines(chosen, target, typed):
                say(f"edgedec: {line}")
            raise typer.Exit(_run([program, *setup.before(typed)], setup.variables))
        _write_file(chosen, setup.settings, yes=yes)
        if process is not None:
            say(f"edgedec: the server runs until Ctrl-C; {chosen.title} may use it now")
            with suppress(KeyboardInterrupt):
                process.wait()


def _named(model: str | None) -> str:
    if model is None:
        raise RequestError("no model is loaded; add --model NAME (edgedec list has those of this machine)")
    return model


def _target(server: Address, model: str | None, context: int | None) -> Target:
    """Return what a program is told of a server, which loads the model first (EdgedecError where it can't)."""
    name = model or _named(next((each["name"] for each in ask("GET", server, "/api/ps").get("models", [])), None))
    options = {} if context is None else {"num_ctx": context}
    ask("POST", server, "/api/generate", {"model": name, "stream": False, "options": options})
    facts = ask("POST", server, "/api/show", {"model": name}).get("model_info", {})
    return Target(url_of(server), name, int(facts.get("edgedec.context_length", 0)), server.api_key or "none")


def _tell_of_context(tool: Tool, target: Target) -> None:
    """Say how much context there is and, where it is too little for a program, what to do."""
    enough = 2 * tool.n_prompt  # which leaves room for some turns
    advice = f", which is little: the first prompt of {tool.title} has about {tool.n_prompt}; use --context {enough}, "
    advice += "more --memory, or a model that is smaller or was trained for more"
    context = f"a context of {target.n_ctx} tokens{advice if target.n_ctx < enough else ''}"
    say(f"edgedec: {one_line(target.model)} at {target.url} has {context}")


@contextmanager
def _started(server: Address, model: str, context: int | None, memory: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process of a server, which listens, and end it with the block (EdgedecError where it has ended)."""
    options = {"--port": server.port or _PORT, "--timeout": _TIMEOUT_S, "--context": context, "--memory": memory}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    say(f"edgedec: starting a server with {one_line(model)}, which ends with the program")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "edgedec_apps.cli", "serve", model, "--quiet", *words],
        env={**os.environ, **({} if server.api_key is None else {"EDGEDEC_API_KEY": server.api_key})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the program
    )
    try:
        while process.poll() is None and not listens(server):
            time.sleep(0.1)
        yield process
    except EdgedecError as error:
        with suppress(subprocess.TimeoutExpired):
            raise EdgedecError(f"the server did not start (exit code {process.wait(timeout=1)})") from error
        raise
    finally:
        process.terminate()
        process.wait()


def _lines(tool: Tool, target: Target, words: list[str]) -> list[str]:
    """Return what a program is told, as lines for a shell or a file; a server's key is not shown."""
    setup = tool.setup(target if target.key == "none" else replace(target, key="..."))
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    command = [shlex.join([tool.executable, *setup.before(words)])] if tool.executable else []
    return [*lines, *command, *setup.settings.splitlines()]


def _write_file(tool: Tool, settings: str, *, yes: bool) -> None:
    """Show what changes in the file of a program, and write it (RequestError without --yes, or as text_before)."""
    before = text_before(tool.path)
    after = with_models(before, settings)
    if is_as_written(tool.path, after):
        return
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), str(tool.path), "after", lineterm=""):
        say(line)
    if not yes:
        raise RequestError(
            f"nothing was written; add --yes to write {tool.path} as above, with a copy of what is there"
        )
    write_settings(tool.path, after)
    say(f"edgedec: {tool.path} is written; edgedec launch continue --undo takes it back")


def _run(words: list[str], variables: Mapping[str, str]) -> int:
    """Run a program, and return its exit code; Ctrl-C, which the terminal sends it too, is its own (OSError)."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(words, env={**os.environ, **variables}) as process:
            try:
                code = process.wait()
            except SystemExit:  # SIGTERM
                process.terminate()
                raise
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else of_signal(-code)
