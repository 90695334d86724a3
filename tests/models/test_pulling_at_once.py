"""Several pulls of the same file at once: threads, processes, and giving up the wait."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import StubServer, model_bytes

from edgedec.errors import CancelledError
from edgedec.resolver import ResolveOptions
from edgedec_models.resolve import pull

DATA = model_bytes()
CancelAfter = Callable[[int], ResolveOptions]


def files_in(root: Path) -> list[str]:
    """Return the names of all files below a folder, sorted."""
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_two_threads_fetch_once(server: StubServer) -> None:
    """Of two pulls at once one waits, says so, and then uses what the other has fetched."""
    server.add("/a.gguf", DATA).pause_s = 0.3
    phases: set[str] = set()
    paths: list[Path] = []

    def work() -> None:
        options = ResolveOptions(on_progress=lambda progress: phases.add(progress.phase))
        paths.append(pull(f"{server.root}/a.gguf", options))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == DATA for path in paths] == [True] * 3
    assert len(server.seen) == 1
    assert "wait" in phases


def test_two_processes_fetch_once(server: StubServer, root: Path) -> None:
    """The same between processes; no lock file stays."""
    server.add("/a.gguf", DATA).pause_s = 0.4
    code = (
        "import sys; from edgedec.resolver import ResolveOptions; from edgedec_models.resolve import pull; "
        "pull(sys.argv[1], ResolveOptions())"
    )
    command = [sys.executable, "-c", code, f"{server.root}/a.gguf"]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(server.seen) == 1
    assert files_in(root) == ["a.gguf", "a.gguf.json"]


def test_waiting_can_be_cancelled(server: StubServer, cancel_after: CancelAfter) -> None:
    """A pull that waits for another one stops waiting when it is cancelled."""
    server.add("/a.gguf", DATA).pause_s = 0.4
    first = threading.Thread(target=pull, args=(f"{server.root}/a.gguf", ResolveOptions()))
    first.start()
    while not server.seen:
        pass
    options = cancel_after(0)
    assert options.cancel is not None
    options.cancel.cancel()
    with pytest.raises(CancelledError, match="wait for another pull"):
        pull(f"{server.root}/a.gguf", options)
    first.join()
