"""The tile cache where others use it or no disk takes it: waiting, being killed, a full disk, no place at all."""

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.models.tile_maker import LAYOUT, Maker, contents, until_seen

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.cpu.tiles import cache as tile_cache

PATIENCE_S = 120.0

# Opens the tiles of argv[1] with the cache argv[2]; notes in the file argv[3] each fill, that it waits, and at last how
# it went. After so many fills (0: never) it goes on only when there is the file argv[4].
CHILD = """
import logging, os, sys, time
from pathlib import Path
import numpy as np
from edgedec.gguf.file import read_gguf
from edgedec_runtimes.cpu.tiles.cache import Job, TileTensor, open_tiles

path, root, notes, go, layout, n_fills, n_file_bytes = sys.argv[1:]
if int(n_file_bytes):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(n_file_bytes), int(n_file_bytes)))
gguf = read_gguf(path)
phases, filled = set(), []
def note(line):
    with open(notes, "a") as file:
        file.write(line + "\\n")
def fill(name, out, start):
    note("fill")
    filled.append(name)
    while len(filled) == int(n_fills) and not Path(go).exists():
        time.sleep(0.01)
    out[:-3] = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)[::-1]
def report(progress):
    if progress.phase == "wait" and "wait" not in phases:
        note("wait")
    phases.add(progress.phase)
logging.basicConfig(level=logging.WARNING)
tensors = [TileTensor(name, info.n_bytes + 3) for name, info in gguf.tensors.items()]
tiles = open_tiles(Job(gguf, tensors, layout, fill, cache_dir=Path(root), on_progress=report))
right = all(tiles[n].tobytes() == gguf.read_tensor_bytes(n)[::-1] + bytes(3) for n in gguf.tensors)
note(f"{'right' if right else 'WRONG'} {'mapped' if tiles.mapped else 'memory'} {' '.join(sorted(phases))}")
"""


class Children:
    """Processes that open the tiles of one model."""

    def __init__(self, maker: Maker, folder: Path) -> None:
        self._maker = maker
        self._notes, self._go = folder / "notes.txt", folder / "go"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *, n_fills: int = 0, n_file_bytes: int = 0) -> subprocess.Popen[bytes]:
        """Start one that stops in that fill (0: in none) until go(), and may write files of so many bytes (0: any)."""
        arguments = [self._maker.path, self._maker.root, self._notes, self._go, LAYOUT, n_fills, n_file_bytes]
        child = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, arguments)], stderr=subprocess.PIPE)
        self._started.append(child)
        return child

    def go(self) -> None:
        """Let those that have stopped go on."""
        self._go.touch()

    def notes(self) -> list[str]:
        """Return what they noted so far."""
        return self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []

    def wait_for(self, note: str, n_times: int) -> None:
        """Wait until something was noted so many times."""
        end = time.monotonic() + PATIENCE_S
        while self.notes().count(note) < n_times:
            assert time.monotonic() < end, f"{note!r} was not noted {n_times} times: {self.notes()}"
            time.sleep(0.01)

    def end(self) -> None:
        """End those that still run."""
        for child in self._started:
            child.kill()
            child.communicate()


@pytest.fixture
def children(maker: Maker, tmp_path: Path) -> Iterator[Children]:
    """Processes that open the tiny model's tiles; none outlives the test."""
    started = Children(maker, tmp_path)
    yield started
    started.end()


def at_the_first_wait(act: Callable[[], None], maker: Maker) -> Callable[[Progress], None]:
    """Return what notes progress with the maker, and acts when it is first told to wait."""

    def report(progress: Progress) -> None:
        if progress.phase == "wait" and "wait" not in maker.phases():
            act()
        maker.reports.append(progress)

    return report


@pytest.mark.slow
def test_processes_at_once_make_one_file(maker: Maker, children: Children) -> None:
    """Of three processes one makes the tiles; the others wait, say so, and map the same file."""
    started = [children.start(n_fills=1) for _ in range(3)]
    children.wait_for("wait", 2)
    children.go()
    assert [child.wait(timeout=PATIENCE_S) for child in started] == [0, 0, 0]
    n_tensors = len(maker.tensors())
    assert children.notes().count("fill") == n_tensors
    ends = sorted(line for line in children.notes() if line not in ("fill", "wait"))
    assert ends == ["right mapped tiles", "right mapped wait", "right mapped wait"]
    assert [path.suffix for path in maker.files()] == [".json", ".tiles"]


@pytest.mark.slow
def test_waiting_is_said_and_can_be_cancelled(maker: Maker, children: Children) -> None:
    """While another process makes the tiles, the phase is "wait"; cancelling ends the wait, not the other's work."""
    child = children.start(n_fills=2)
    children.wait_for("fill", 2)
    cancel = CancelToken()
    with pytest.raises(CancelledError, match=r"wait m\.gguf: cancelled"):
        maker.open(cancel=cancel, on_progress=at_the_first_wait(cancel.cancel, maker))
    assert maker.filled == []
    assert maker.phases() == ["wait"]
    assert {report.detail for report in maker.reports} == {"tiles of m.gguf, made by another process"}
    children.go()
    assert child.wait(timeout=PATIENCE_S) == 0
    assert children.notes()[-1] == "right mapped tiles"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is POSIX's")
def test_a_killed_process_blocks_nobody(maker: Maker, children: Children) -> None:
    """After kill -9 in the middle of the work its lock is free, and the next start makes the whole file."""
    child = children.start(n_fills=3)
    children.wait_for("fill", 3)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=PATIENCE_S)
    assert [path.suffix for path in maker.files()] == [".lock", ".partial"]
    with maker.open() as tiles:
        assert tiles.mapped
        assert contents(tiles) == maker.expected()
    assert maker.phases() == ["tiles"]
    assert [path.suffix for path in maker.files()] == [".json", ".tiles"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is POSIX's")
def test_who_waits_for_a_killed_process_takes_over(maker: Maker, children: Children) -> None:
    """A process that waits makes the tiles itself when the one that it waits for is killed."""
    first = children.start(n_fills=1)
    children.wait_for("fill", 1)
    with maker.open(on_progress=at_the_first_wait(first.kill, maker)) as tiles:
        assert contents(tiles) == maker.expected()
    assert maker.phases() == ["wait", "tiles"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")
@pytest.mark.parametrize("n_file_bytes", [1000, 5000, 20_000])
def test_a_disk_that_is_full_half_way(maker: Maker, children: Children, n_file_bytes: int) -> None:
    """When writing fails in the middle, the tiles are made in memory, a warning says why, and no file is left."""
    child = children.start(n_file_bytes=n_file_bytes)
    _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0
    assert children.notes()[-1] == "right memory tiles"
    assert (
        b"WARNING:edgedec.tiles:m.gguf: the tiles are made in memory, at each start: the cache can't be used" in stderr
    )
    assert b"[Errno 27] File too large; make room" in stderr
    assert stderr.count(b"\n") == 1
    assert maker.files() == []


def in_memory_after(maker: Maker, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Assert that the tiles are made in memory, with one warning that says why, and leave no file."""
    caplog.clear()
    with maker.open() as tiles:
        assert not tiles.mapped
        assert tiles.path is None
        assert contents(tiles) == maker.expected()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    for word in ("m.gguf: ", *words, "in memory, at each start"):
        assert word in record.getMessage()
    assert maker.files() == []


def test_without_a_cache(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """No folder means memory, without a warning and without a file."""
    with maker.open(cache_dir=None) as tiles:
        assert not tiles.mapped
        assert contents(tiles) == maker.expected()
    assert {report.detail for report in maker.reports} == {"m.gguf, in memory"}
    assert caplog.records == []
    assert not maker.root.exists()


def test_too_little_space_is_seen_before(
    maker: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for the tiles gets not a byte of them."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1000))
    in_memory_after(maker, caplog, "20.5 kB for tiles are needed in ", "1.0 kB are free")


class Refusal(NamedTuple):
    """A system call that fails, and what is said then."""

    module: Any
    call: str
    number: int
    word: str


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(os, "fsync", errno.ENOSPC, "make room"),
        Refusal(os, "replace", errno.EIO, "Input/output error"),
        Refusal(Path, "mkdir", errno.EROFS, "Read-only file system"),
        Refusal(os, "listdir", errno.EACCES, "Permission denied"),
        Refusal(tile_cache, "try_lock", errno.ENOLCK, "No locks available"),
    ],
    ids=lambda refusal: refusal.call,
)
def test_a_disk_that_refuses(
    maker: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """A disk that turns out full, read-only or without locks at any point leads to memory and leaves nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(refusal.number, os.strerror(refusal.number))

    monkeypatch.setattr(refusal.module, refusal.call, refuse)
    in_memory_after(maker, caplog, refusal.word)


@pytest.mark.parametrize("where", ["root", "tiles"])
def test_a_file_in_the_place_of_the_folder(maker: Maker, caplog: pytest.LogCaptureFixture, where: str) -> None:
    """A cache folder that can't be made leads to memory."""
    obstacle = maker.root if where == "root" else maker.root / "tiles"
    obstacle.parent.mkdir(exist_ok=True)
    obstacle.write_text("mine", encoding="utf-8")
    with maker.open() as tiles:
        assert not tiles.mapped
        assert contents(tiles) == maker.expected()
    assert len(caplog.records) == 1
    assert obstacle.read_text(encoding="utf-8") == "mine"


def test_a_read_only_cache_is_used(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in a folder that can't be written to are mapped, for a copy of the model, too."""
    maker.open().close()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for module, call in ((os, "utime"), (os, "replace"), (tile_cache, "try_lock"), (Path, "write_text")):
        monkeypatch.setattr(module, call, refuse)
    for phases in ([], ["verify"], ["verify"]):
        with maker.open() as tiles:
            assert tiles.mapped
        assert (maker.filled, maker.phases()) == ([], phases)
        until_seen(maker.path, lambda: maker.path.chmod(stat.S_IRUSR))  # a new time of the status
