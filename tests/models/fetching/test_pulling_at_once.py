"""Several pulls of one file at the same time: threads, processes, and cancelling the wait."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.servers import StubServer, files_in, model_bytes

from edgedec.errors import CancelledError
from edgedec.load_options import ResolveOptions
from edgedec.progress import Progress
from edgedec_models.resolve import pull

DATA = model_bytes()
CancelAfter = Callable[[int], ResolveOptions]


def test_two_threads_fetch_once(server: StubServer) -> None:
    """One of several pulls fetches; the others report that they wait, and then use its file."""
    gate = server.add("/a.gguf", DATA).gate = threading.Event()
    waiting: set[int] = set()
    paths: list[Path] = []

    def note(progress: Progress) -> None:
        if progress.phase == "wait":
            waiting.add(threading.get_ident())
            if len(waiting) == 2:
                gate.set()

    def work() -> None:
        paths.append(pull(f"{server.root}/a.gguf", ResolveOptions(on_progress=note)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == DATA for path in paths] == [True] * 3
    assert len(server.seen) == 1
    assert len(waiting) == 2


@pytest.mark.slow
def test_two_processes_fetch_once(server: StubServer, root: Path, tmp_path: Path) -> None:
    """The same holds between processes, and no lock file stays."""
    gate = server.add("/a.gguf", DATA).gate = threading.Event()
    code = (
        "import sys; from edgedec.load_options import ResolveOptions; from edgedec_models.resolve import pull; "
        "pull(sys.argv[1], ResolveOptions(on_progress=lambda progress: print(progress.phase, flush=True)))"
    )
    outputs, processes = [tmp_path / f"{i}.txt" for i in range(2)], list[subprocess.Popen[bytes]]()
    for output in outputs:
        with output.open("wb") as file:
            processes.append(subprocess.Popen([sys.executable, "-c", code, f"{server.root}/a.gguf"], stdout=file))
    while not any(output.read_bytes().startswith(b"wait") for output in outputs):
        assert any(process.poll() is None for process in processes)
        time.sleep(0.01)
    gate.set()
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(server.seen) == 1
    assert files_in(root) == ["a.gguf", "a.gguf.json"]


def test_waiting_can_be_cancelled(server: StubServer, cancel_after: CancelAfter) -> None:
    """A pull that waits for another one stops waiting when it is cancelled."""
    gate = server.add("/a.gguf", DATA).gate = threading.Event()
    first = threading.Thread(target=pull, args=(f"{server.root}/a.gguf", ResolveOptions()))
    first.start()
    while not server.seen:
        assert first.is_alive()
        time.sleep(0.01)
    options = cancel_after(0)
    assert options.cancel is not None
    options.cancel.cancel()
    with pytest.raises(CancelledError, match="wait for another pull"):
        pull(f"{server.root}/a.gguf", options)
    gate.set()
    first.join()
