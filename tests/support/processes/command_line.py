"""The command line for tests: in this process (quick), as a process of its own, and at a terminal.

result = run_here("list")              # a Result: exit code, standard output, standard error
result = run_process("list")           # the same with real pipes
with Terminal("chat", path) as person: # at a pty
    person.expect(">>> ")
"""

import io
import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import pytest

from edgedec.progress import CancelToken, Progress
from edgedec_apps.cli import main

PATIENCE_S = 300.0  # for a machine that does other things as well

# Options for a generation that nothing but an interrupt ends.
ENDLESS = ("-c", "100000", "--method=ignore-end", "-t", "0")
# What such a context is told of, with a model that was trained on 2,048 tokens.
TOO_LONG = (
    "the context of 100000 tokens is longer than the 2048 that the model was trained for: "
    "text beyond them tends to be poor"
)

Arg = str | bytes | os.PathLike[str]

# What a process of its own runs; at a terminal it makes the pty its controlling terminal first.
_COMMAND = [sys.executable, "-m", "edgedec_apps.cli"]
_AT_TERMINAL = (
    "import fcntl, termios, sys; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {}from edgedec_apps.cli import main; main()"
)
_CLOCK_STANDS_STILL = (
    "import types, edgedec_apps.cli.shown.progress as p; p.time = types.SimpleNamespace(monotonic=lambda: 0.0); "
)
_END = b"\0the end"
_CURSOR = re.compile(rb"\x1b\[\?25([hl])")


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.out.decode("utf-8")

    def document(self) -> dict[str, Any]:
        """Return the one JSON object that standard output holds, of a command that succeeded."""
        assert (self.code, self.out.isascii()) == (0, True), self
        found: dict[str, Any] = json.loads(self.out)
        return found

    def failed(self, code: int, *words: str) -> None:
        """Assert that it refused with this exit code and these words, printed no text and showed no traceback."""
        assert (self.code, self.out) == (code, b""), self
        lines = self.err.splitlines()
        assert lines, self
        assert lines[-1].startswith("edgedec: "), self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err


def run_here(
    *args: Arg, stdin: bytes = b"", env: Mapping[str, str] | None = None, tells_progress: bool = False
) -> Result:
    """Run a command in this process; standard input is a pipe that holds `stdin`. Progress is told if asked for."""
    from edgedec_apps.cli.shown.progress import ProgressLine

    streams = [io.TextIOWrapper(io.BytesIO(stdin), "utf-8"), *(io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in "oe")]
    argv = ["edgedec", *(os.fsdecode(arg) for arg in args)]
    code: Any = None
    with (
        mock.patch.multiple(sys, argv=argv, stdin=streams[0], stdout=streams[1], stderr=streams[2]),
        mock.patch.dict(os.environ, dict(env or {})),
        mock.patch.object(ProgressLine, "said_at", -math.inf if tells_progress else math.inf),
        mock.patch.multiple(logging.getLogger("edgedec"), handlers=[], propagate=True, level=logging.NOTSET),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    for stream in streams[1:]:
        stream.flush()
    out, err = (stream.buffer.getvalue() for stream in streams[1:])
    return Result(int(code or 0), out, err.decode("utf-8"))


def start(*args: Arg, env: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command as a process of its own; its input is empty and its output a pipe, unless `options` differ."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [*_COMMAND, *map(os.fsdecode, args)], env=os.environ | dict(env or {}), **pipes | options
    )
    return process


def finish(process: "subprocess.Popen[bytes]", stdin: bytes | None = None) -> Result:
    """Wait for a process and return how it ended."""
    try:
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args!r} did not end; so far: {out[-300:]!r} {err[-1000:]!r}") from None
    return Result(process.returncode, out or b"", (err or b"").decode("utf-8", "replace"))


def run_process(*args: Arg, stdin: bytes = b"", env: Mapping[str, str] | None = None, **options: Any) -> Result:
    """Run a command as a process of its own; standard input is a pipe that holds `stdin`."""
    return finish(start(*args, env=env, stdin=subprocess.PIPE, **options), stdin)


def start_shell(script: str, *args: Arg) -> "subprocess.Popen[bytes]":
    """Start a line of sh in which "$@" is the command with these arguments."""
    command = ["sh", "-c", script, "sh", *_COMMAND, *map(os.fsdecode, args)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_shell(script: str, *args: Arg) -> Result:
    """Run such a line."""
    return finish(start_shell(script, *args))


def wait_for_reader(fifo: Path) -> int:
    """Wait until somebody has opened a FIFO for reading, and return its other end."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < until, "nobody reads"
            time.sleep(0.01)


def interrupt_when(
    monkeypatch: pytest.MonkeyPatch, is_so: Callable[[Progress], bool], number: signal.Signals = signal.SIGINT
) -> None:
    """Make this process get a signal at the first report of progress that is so, and wait until it is heard."""
    from edgedec_apps.cli.shown.progress import ProgressLine

    seen = threading.Event()
    cancel = CancelToken.cancel

    def note(token: CancelToken) -> None:
        cancel(token)
        seen.set()

    def report(_line: ProgressLine, progress: Progress) -> None:
        if is_so(progress) and not seen.is_set():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)
            assert seen.wait(PATIENCE_S)

    monkeypatch.setattr(ProgressLine, "report", report)
    monkeypatch.setattr(CancelToken, "cancel", note)


class Terminal:
    """A person at a terminal: a pty of 100 columns that the command runs on. A context manager."""

    def __init__(
        self, *args: Arg, env: Mapping[str, str] | None = None, stdout: Any = None, in_no_time: bool = False
    ) -> None:
        """Start the command; `stdout` may lead elsewhere. In no time: by the clock of progress, which stands still."""
        self._master, self._slave = os.openpty()
        self.before = self.settings()
        self.shown = b""
        self._seen = 0
        code = _AT_TERMINAL.format(_CLOCK_STANDS_STILL if in_no_time else "")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(os.fsdecode, args)],
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | dict(env or {}),
            stdin=self._slave,
            stdout=self._slave if stdout is None else stdout,
            stderr=self._slave,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the command, if it has not ended, and close the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def send(self, keys: str, *then: str) -> None:
        """Type these keys, and expect these words."""
        data = keys.encode()
        while data:
            data = data[os.write(self._master, data) :]
        self.expect(*then)

    def expect(self, *words: str) -> bytes:
        """Wait until the words are shown in turn, behind what was expected before; return what came up to their end."""
        return b"".join(map(self._expected, words))

    def _expected(self, words: str) -> bytes:
        wanted = words.encode()
        until = time.monotonic() + PATIENCE_S
        while (at := self.shown.find(wanted, self._seen)) < 0:
            assert self._read(until), f"{wanted!r} was not shown after {self.shown[self._seen :]!r}"
        start, self._seen = self._seen, at + len(wanted)
        return self.shown[start : self._seen]

    def settle(self) -> None:
        """Wait until nothing more is shown: what was typed is dealt with, and the command waits for keys."""
        while self._read(time.monotonic() + 0.3):
            pass

    def end(self) -> int:
        """Read until the command ends, and return its exit code."""
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it did not end; shown at last: {self.shown[-300:]!r}"
            self._read(time.monotonic() + 0.05)
        os.write(self._slave, _END)  # behind all that the command wrote, some of which may still be on its way
        while _END not in self.shown:
            assert self._read(until), f"its last words did not come; shown at last: {self.shown[-300:]!r}"
        self.shown = self.shown.partition(_END)[0]
        return self.process.returncode

    def settings(self) -> list[Any]:
        """Return the terminal's settings: echo, line mode, signals."""
        import termios

        return termios.tcgetattr(self._slave)

    @property
    def cursor_shown(self) -> bool:
        """Whether the cursor is visible, as far as escape sequences told."""
        told = _CURSOR.findall(self.shown)
        return not told or told[-1] == b"h"

    def _read(self, until: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, until - time.monotonic()))
        if ready:
            self.shown += os.read(self._master, 65536)
        return bool(ready)


def rename_model(path: Path, source: Path, name: str) -> Path:
    """Copy a tiny model of seed 0 under another name in its metadata, of 12 bytes."""
    return _replaced(path, source, b"tiny llama 0", name.encode())


def teach_word(path: Path, source: Path, word: str) -> Path:
    """Copy a tiny model of 261 tokens whose last token is a word of 9 bytes; with SAY_WORD it says nothing else."""
    return _replaced(path, source, b"[unused0]", word.encode())


SAY_WORD = ("--logit-bias", "260=1000", "--temperature", "0")


def _replaced(path: Path, source: Path, old: bytes, new: bytes) -> Path:
    data = source.read_bytes()
    assert len(new) == len(old), f"{new!r} has {len(new)} bytes, not {len(old)}"
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def names(folder: Path) -> list[str]:
    """Return the names in a folder, those of hidden files included."""
    return sorted(path.name for path in folder.iterdir())
