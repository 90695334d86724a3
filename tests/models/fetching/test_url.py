"""Downloads from a URL, as of wheels and hub files: complete, resumed, refused, failing, several at once."""

import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes.servers import Served, StubServer, files_in, model_bytes, sha256

from edgedec.errors import CancelledError, ModelNotFoundError, OfflineError, PullError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.progress import Progress
from edgedec_models import storage
from edgedec_models.addresses import url_path
from edgedec_models.fetching import partial, web
from edgedec_models.resolve import pull, resolve

DATA = model_bytes()
CancelAfter = Callable[[int], ResolveOptions]


def test_url_is_fetched_once(server: StubServer, root: Path) -> None:
    """The file of a URL is stored with its record, and needs no request the second time."""
    server.add("/a/my model.gguf", DATA)
    path = pull(f"{server.root}/a/my%20model.gguf", ResolveOptions())
    assert path.read_bytes() == DATA
    record = json.loads(path.with_name(path.name + ".json").read_text())
    assert record["sha256"] == sha256(DATA)
    assert record["source"] == f"{server.root}/a/my%20model.gguf"
    assert files_in(root) == ["my_20model.gguf", "my_20model.gguf.json"]
    assert resolve(f"{server.root}/a/my%20model.gguf", ResolveOptions(offline=True)) == path
    assert len(server.seen) == 1


def test_progress_counts_up_to_the_total(server: StubServer) -> None:
    """Progress rises to the file's size, in phase download, under the URL's name."""
    server.add("/a.gguf", DATA)
    reports: list[Progress] = []
    pull(f"{server.root}/a.gguf", ResolveOptions(on_progress=reports.append))
    done = [report.done for report in reports]
    assert done == sorted(done)
    assert reports[-1] == Progress("download", len(DATA), len(DATA), "bytes", f"{server.root}/a.gguf")


V1 = {"ETag": '"v1"'}
FROM_100K, STEPS = [None, "bytes=100000-"], range(10_000, 200_000, 10_000)


@pytest.mark.parametrize(
    ("served", "ranges"),
    [
        ({"headers": V1, "drops": [100_000]}, FROM_100K),
        ({"headers": V1, "drops": [100_000], "ranges": False}, FROM_100K),
        ({"drops": [100_000]}, [None, None]),
        ({"statuses": [503, 429]}, [None] * 3),
        ({"headers": V1, "drops": [*STEPS]}, [None, *(f"bytes={n}-" for n in STEPS)]),
        ({"length": False}, [None]),
    ],
    ids=["resumed", "ranges are ignored", "nothing to compare", "busy", "drops again and again", "of unknown length"],
)
def test_a_file_comes_whole(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, served: dict[str, Any], ranges: list[str | None]
) -> None:
    """A range is asked for where the ETag guards it, and goes on where bytes came; what brings them counts no try."""
    monkeypatch.setattr(web, "PROGRESS_BYTES", 10_000)
    server.served["/a.gguf"] = Served(DATA, **served)
    reports: list[Progress] = []
    assert pull(f"{server.root}/a.gguf", ResolveOptions(on_progress=reports.append)).read_bytes() == DATA
    asked = [(seen.get("Range"), seen.get("If-Range")) for seen in server.requests_of("/a.gguf")]
    assert asked == [(each, each and '"v1"') for each in ranges]
    assert (reports[-1].done, reports[-1].total) == (len(DATA), len(DATA) if served.get("length", True) else None)


LARGE = r"more than 100\.0 kB came, and the server does not say how large the file is"
SLOW = {"web.SLOW_S": 0.0, "web.SLOW_BYTES": 1 << 30}


@pytest.mark.parametrize(
    ("served", "patched", "kind", "words", "n_requests"),
    [
        ({"statuses": [401]}, {}, PullError, "access is refused", 1),
        ({"statuses": [403]}, {}, PullError, "access", 1),
        ({"statuses": [404]}, {}, ModelNotFoundError, "the server has no such file", 1),
        ({"statuses": [503] * 10}, {}, PullError, r"503 .*tried 4 times", 4),
        ({"data": b"<!DOCTYPE html>"}, {}, PullError, "not a model: it begins with b'<!DO'", 1),
        ({"headers": {"Content-Encoding": "gzip"}}, {}, PullError, "sends its answer compressed", 1),
        ({"headers": V1, "length": False}, {"partial.MOST_UNKNOWN_BYTES": 100_000}, PullError, LARGE, 1),
        ({"headers": V1, "drops": [*range(1, 40)]}, {}, PullError, r"\(tried 4 times\).*stays for resuming", 4),
        ({"headers": V1}, SLOW, PullError, r"only [\d,]+ bytes came in 0 s \(tried 4 times\)", 4),
    ],
)
def test_refusals_say_what_they_mean(
    server: StubServer,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Any,
    patched: Any,
    kind: Any,
    words: str,
    n_requests: int,
) -> None:
    """What may pass is tried again, and only then; next to nothing is no progress; nothing stays but what can go on."""
    for name, value in patched.items():
        monkeypatch.setattr(f"edgedec_models.fetching.{name}", value)
    server.served["/a.gguf"] = Served(**{"data": DATA} | served)
    with pytest.raises(kind, match=words):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == n_requests
    assert files_in(root) == (["a.gguf.partial", "a.gguf.partial.json"] if "drops" in served else [])


def test_wrong_checksum_keeps_nothing(server: StubServer, root: Path) -> None:
    """A file whose checksum differs from the URL's is refused and deleted."""
    server.add("/a.gguf", DATA)
    with pytest.raises(PullError, match=f"SHA-256 is {sha256(DATA)} where {'0' * 64} was expected"):
        pull(f"{server.root}/a.gguf#sha256={'0' * 64}", ResolveOptions())
    assert files_in(root) == []


@pytest.mark.parametrize(
    ("length", "free", "words"),
    [
        (True, [1000] * 9, r"200\.0 kB more are needed .* 1\.0 kB are free"),
        (False, [1_000_000, 10_000], r"more are needed .* 10\.0 kB are free"),
    ],
)
def test_too_little_space_is_said(
    server: StubServer, root: Path, monkeypatch: pytest.MonkeyPatch, length: bool, free: list[int], words: str
) -> None:
    """Before anything is fetched, and again and again while the length is unknown."""
    server.add("/a.gguf", DATA).length = length
    monkeypatch.setattr(partial, "ROOM_BYTES", 50_000)
    monkeypatch.setattr(storage, "free_bytes", lambda folder: free.pop(0))
    with pytest.raises(StorageError, match=words):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert free == [] if not length else files_in(root) == []


def test_file_changed_between_tries_begins_anew(server: StubServer, cancel_after: CancelAfter) -> None:
    """If the remote file changed between two attempts, nothing of the first is kept."""
    server.add("/a.gguf", DATA, ETag='"v1"')
    with pytest.raises(CancelledError):
        pull(f"{server.root}/a.gguf", cancel_after(50_000))
    changed = model_bytes(150_000, seed=1)
    server.add("/a.gguf", changed, ETag='"v2"')
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == changed


def test_cancel_keeps_what_was_fetched(server: StubServer, root: Path, cancel_after: CancelAfter) -> None:
    """A cancelled pull leaves no final file, and the next one requests only the rest."""
    server.add("/a.gguf", DATA, ETag='"v1"')
    with pytest.raises(CancelledError, match="cancelled"):
        pull(f"{server.root}/a.gguf", cancel_after(50_000))
    assert files_in(root) == ["a.gguf.partial", "a.gguf.partial.json"]
    kept = url_path(f"{server.root}/a.gguf", root / "models").with_name("a.gguf.partial").stat().st_size
    assert 50_000 <= kept < len(DATA)
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA
    assert server.seen[-1].headers["Range"] == f"bytes={kept}-"
    assert files_in(root) == ["a.gguf", "a.gguf.json"]


def test_complete_partial_needs_no_bytes(server: StubServer, root: Path) -> None:
    """If only the renaming was missing, the server's answer 416 is understood as complete."""
    server.add("/a.gguf", DATA)
    url = f"{server.root}/a.gguf#sha256={sha256(DATA)}"
    path = url_path(url, root / "models")
    path.parent.mkdir(parents=True)
    path.with_name("a.gguf.partial").write_bytes(DATA)
    path.with_name("a.gguf.partial.json").write_text(json.dumps({"identity": sha256(DATA)}))
    assert pull(url, ResolveOptions()).read_bytes() == DATA
    assert [seen.headers["Range"] for seen in server.seen] == [f"bytes={len(DATA)}-"]


def test_damaged_partial_is_fetched_again(server: StubServer, root: Path, cancel_after: CancelAfter) -> None:
    """Damage of a partial file is noticed by the checksum, and the file fetched again at once."""
    server.add("/a.gguf", DATA)
    url = f"{server.root}/a.gguf#sha256={sha256(DATA)}"
    with pytest.raises(CancelledError):
        pull(url, cancel_after(50_000))
    partial_file = url_path(url, root / "models").with_name("a.gguf.partial")
    partial_file.write_bytes(b"X" + partial_file.read_bytes()[1:])
    assert pull(url, ResolveOptions()).read_bytes() == DATA


def test_nobody_listening_is_a_pull_error() -> None:
    """A refused connection is tried again, and then reported."""
    with pytest.raises(PullError, match="check the connection"):
        pull("http://127.0.0.1:9/a.gguf", ResolveOptions())


def test_remote_file_that_shrank_is_fetched_anew(server: StubServer, cancel_after: CancelAfter) -> None:
    """If the remote file is shorter than what was fetched, the download starts again."""
    url = f"{server.root}/a.gguf#sha256={sha256(DATA[:40_000])}"
    server.add("/a.gguf", DATA)
    with pytest.raises(CancelledError):
        pull(url, cancel_after(50_000))
    server.add("/a.gguf", DATA[:40_000])
    assert pull(url, ResolveOptions()).read_bytes() == DATA[:40_000]


def test_redirect_is_followed(server: StubServer) -> None:
    """The file behind a redirect is fetched."""
    server.add("/b.gguf", DATA)
    server.add("/a.gguf", b"", Location="/b.gguf").statuses = [302]
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA


def test_disk_full_half_way_keeps_the_partial(server: StubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills up, what was fetched stays, and the error says so."""
    server.add("/a.gguf", DATA, ETag='"v1"')
    path = url_path(f"{server.root}/a.gguf", root / "models")

    def fill(progress: Progress) -> None:
        monkeypatch.setattr(partial.Partial, "write", full)
        monkeypatch.setattr(storage, "free_bytes", lambda folder: 0)

    write = partial.Partial.write

    def full(self: partial.Partial, block: bytes) -> None:
        class Full:
            def write(self, rest: object) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        file, self._file = self._file, Full()  # type: ignore[assignment]  # only its write is used here
        try:
            write(self, block)
        finally:
            self._file = file

    with pytest.raises(StorageError, match=r"0 bytes are free; make room.*stay for resuming; `edgedec rm"):
        pull(f"{server.root}/a.gguf", ResolveOptions(on_progress=fill))
    assert path.with_name("a.gguf.partial").exists()
    assert not path.exists()


def test_forbidden_folder_is_a_storage_error(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a read-only cache has its path and says what to do."""
    server.add("/a.gguf", DATA)

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"cannot create the folder .*: Permission denied; .*EDGEDEC_CACHE"):
        pull(f"{server.root}/a.gguf", ResolveOptions())


def test_offline_says_from_where(server: StubServer) -> None:
    """When offline, the error has the address without its password."""
    with pytest.raises(OfflineError, match=r"would have been fetched from https://host/a\.gguf"):
        pull("https://me:secret@host/a.gguf", ResolveOptions(offline=True))


def test_force_replaces_a_damaged_file(server: StubServer) -> None:
    """With force a stored file is hashed again, and fetched again only if it has changed."""
    server.add("/a.gguf", DATA)
    path = pull(f"{server.root}/a.gguf", ResolveOptions())
    assert pull(f"{server.root}/a.gguf", ResolveOptions(), force=True) == path
    assert len(server.seen) == 1
    path.write_bytes(b"damaged")
    assert pull(f"{server.root}/a.gguf", ResolveOptions(), force=True).read_bytes() == DATA


def test_file_url_is_used_in_place(tmp_path: Path, root: Path) -> None:
    """The file of a file:// URL is used where it is, not copied."""
    path = tmp_path / "mein modell.gguf"
    path.write_bytes(DATA)
    assert resolve(path.as_uri(), ResolveOptions(offline=True)) == path
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve((tmp_path / "none.gguf").as_uri(), ResolveOptions())
    with pytest.raises(ModelNotFoundError, match="three slashes"):
        resolve("file://models/a.gguf", ResolveOptions())


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
