"""A fetched model is on the disk once: tiles take the place of its GGUF, which is made again from them bit for bit."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models.real_models import real_model
from support.models.tiny_quantized import Tiny, write_tiny
from support.processes.command_line import run_here
from support.processes.servers import StubServer

import edgedec
from edgedec.errors import CancelledError, EdgedecError, ModelFormatError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.places import tiled_place
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.tile_form import UNTILED, untiled
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve as resolve_model
from edgedec.progress import CancelToken, Progress
from edgedec_models.fetching.verify import find_fault
from edgedec_models.record import WantedFile, is_recorded
from edgedec_models.resolve import pull, resolve
from edgedec_runtimes.cpu import weights
from edgedec_runtimes.cpu.library import address, native
from edgedec_runtimes.shared.file_lock import FileLock, try_lock
from edgedec_runtimes.tile_files import keeping, record
from edgedec_runtimes.tile_files.keeping import make_whole
from edgedec_runtimes.tile_files.record import is_tiled, rename_tiles

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no file that is mapped")

TYPES = tuple(kind.name for kind in UNTILED)
PATIENCE_S = 120
LOAD = """
import os, signal, sys
import edgedec
from edgedec_runtimes.tile_files import keeping, record
at = sys.argv[3]
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def report(progress):
    if progress.phase == at and progress.done:
        die()
if at == "record":
    keeping.publish = die
if at == "name":
    keeping.move_tiles = die
if at == "renamed":
    record.publish = die
    record.rename_tiles(__import__("pathlib").Path(sys.argv[1]))
if at == "both":
    keeping.tiled_place = die
    keeping.make_whole(__import__("pathlib").Path(sys.argv[1]))
if at == "restore":
    keeping.make_whole(__import__("pathlib").Path(sys.argv[1]), on_progress=report)
with edgedec.load(sys.argv[1], runtime="cpu", n_ctx=64, cache_dir=sys.argv[2], on_progress=report) as engine:
    print(list(engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids))
"""


class Fetched:
    """A model that was fetched from a server to a cache of its own."""

    def __init__(self, root: Path, data: bytes) -> None:
        self.root, self.data, self.options = root, data, ResolveOptions(root)
        with StubServer() as server:
            server.add("/tiny.gguf", data)
            self.url = f"{server.root}/tiny.gguf"
            self.path = pull(self.url, self.options)

    def text(self, **options: object) -> tuple[int, ...]:
        """Load the model on the cpu runtime and return what it writes."""
        with self.load(**options) as engine:
            return tuple(engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids)

    def load(self, **options: object) -> edgedec.Engine:
        chosen = {"runtime": "cpu", "n_ctx": 64, "cache_dir": self.root} | options
        return edgedec.load(self.path, **chosen)  # type: ignore[arg-type]  # options of many types

    def files(self) -> list[str]:
        """Return the names of the files of models and tiles."""
        found = (path for folder in ("models", "tiles") for path in (self.root / folder).rglob("*"))
        return sorted(path.name for path in found if path.is_file())

    def run(self, at: str = "") -> subprocess.CompletedProcess[str]:
        """Load the model in another process, which is killed at a phase of its progress or of the change."""
        command = [sys.executable, "-c", LOAD, str(self.path), str(self.root), at]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    @property
    def tiles(self) -> Path:
        """Where the tiles are that took the place of the GGUF."""
        return tiled_place(self.path)

    def whole(self) -> bytes:
        """Return the bytes of the GGUF, which is made again where it has to be."""
        make_whole(self.path)
        return self.path.read_bytes()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with a matrix of each type that can be made again, and vectors."""
    tiny = Tiny("qwen2", types=TYPES, dealt=True, n_layer=2, n_head=8, n_head_kv=4, head_dim=32)
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny).read_bytes()


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EDGEDEC_MODELS", raising=False)


@pytest.fixture
def fetched(tmp_path: Path, data: bytes) -> Fetched:
    """A fetched model that was never loaded."""
    return Fetched(tmp_path / "cache", data)


@pytest.mark.parametrize("kind", list(UNTILED))
@pytest.mark.parametrize("n_rows", [1, 16, 37])
def test_tiles_are_turned_back(kind: GGMLType, n_rows: int) -> None:
    """For each type, the native library's tiles of random bits become these bits again."""
    n_cols = 512
    rng = np.random.default_rng(n_rows)
    rows = rng.integers(0, 256, (n_rows, n_cols // kind.block_size * kind.block_bytes), dtype=np.uint8)
    tiles = np.zeros(native().ec_tile_bytes(kind, n_rows, n_cols), np.uint8)
    shape = (kind, n_rows, n_cols, 0, n_rows)
    assert native().ec_tile_pack(*shape, address(rows), rows.size, address(tiles), tiles.size) == 0
    np.testing.assert_array_equal(untiled(kind, tiles, n_cols)[:n_rows], rows)


@pytest.mark.slow
def test_tiles_take_the_place_of_the_file(fetched: Fetched, data: bytes, tmp_path: Path) -> None:
    """After the first load one file is there; header and tensors read as before, and all texts are the same."""
    own = tmp_path / "own.gguf"
    own.write_bytes(data)
    first = fetched.text()
    assert is_tiled(fetched.path)
    assert fetched.files() == ["tiny.gguf.json", "tiny.tiles"]
    assert fetched.text() == first
    assert fetched.text(runtime_options={"mmap": False}) == first
    assert fetched.text(runtime_options={"tile_cache": False}) == first
    whole, tiled = read_gguf(own), read_gguf(fetched.path)
    same = ("version", "metadata", "tensors", "alignment", "n_bytes", "header_hash", "n_header_bytes")
    assert all(getattr(whole, name) == getattr(tiled, name) for name in same)
    for name, tensor in whole.tensors.items():
        expected = whole.read_tensor_bytes(name)
        assert tiled.read_tensor_bytes(name) == expected
        start = tensor.n_bytes // 3
        assert tiled.read_tensor_bytes(name, start, 77) == expected[start : start + 77]
    assert resolve(fetched.url, ResolveOptions(fetched.root, offline=True)) == fetched.path


@pytest.mark.slow
def test_the_file_is_made_again(fetched: Fetched, data: bytes) -> None:
    """The GGUF has the bytes that were fetched; with `keep`, tiles do not take its place again."""
    fetched.text()
    assert make_whole(fetched.path, keep=True)
    assert fetched.path.read_bytes() == data
    assert resolve(fetched.url, ResolveOptions(fetched.root, offline=True)) == fetched.path
    assert not make_whole(fetched.path)
    fetched.text()
    assert fetched.path.read_bytes() == data
    keeping.let_tiles_replace(fetched.path)
    fetched.text()
    assert is_tiled(fetched.path)


@pytest.mark.slow
def test_a_header_that_was_read_before_stays_valid(fetched: Fetched, data: bytes) -> None:
    """What holds a header of the GGUF reads the same tensors after tiles took its place, and after it is back."""
    before = read_gguf(fetched.path)
    expected = {name: before.read_tensor_bytes(name) for name in before.tensors}
    fetched.text()
    tiled = read_gguf(fetched.path)
    assert all(before.read_tensor_bytes(name) == each for name, each in expected.items())
    make_whole(fetched.path)
    assert all(tiled.read_tensor_bytes(name) == each for name, each in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no record", "changed", "own folder", "link", "elsewhere", "a copy uses the tiles"])
def test_other_files_are_never_touched(
    fetched: Fetched, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Only a file that edgedec fetched and that is still what was fetched is replaced."""
    path = fetched.path
    if case == "no record":
        path.with_name("tiny.gguf.json").unlink()
    elif case == "changed":
        os.utime(path, ns=(1, 1))
    elif case == "own folder":
        monkeypatch.setenv("EDGEDEC_MODELS", str(path.parent))
    elif case == "link":
        path.rename(tmp_path / "real.gguf")
        path.symlink_to(tmp_path / "real.gguf")
    elif case == "elsewhere":
        fetched.path = tmp_path / "own.gguf"
        fetched.path.write_bytes(data)
    else:
        other = tmp_path / "copy.gguf"
        other.write_bytes(data)
        with edgedec.load(other, runtime="cpu", n_ctx=64, cache_dir=fetched.root):
            pass
    fetched.text()
    assert path.read_bytes() == fetched.path.read_bytes() == data


@pytest.mark.slow
def test_types_that_cannot_be_turned_back_keep_their_file(tmp_path: Path) -> None:
    """A model with a type of look-up grids has its file and its tiles."""
    data = write_tiny(tmp_path / "tiny.gguf", Tiny(types=("IQ4_XS",))).read_bytes()
    fetched = Fetched(tmp_path / "cache", data)
    fetched.text()
    assert fetched.path.read_bytes() == data
    assert [name for name in fetched.files() if name.endswith(".tiles")]


@pytest.mark.slow
def test_a_file_that_tiles_do_not_stand_for_is_kept(tmp_path: Path, data: bytes) -> None:
    """A GGUF with something between its tensors is compared once, and kept for good."""
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    gguf = read_gguf(path)
    assert gguf.n_header_bytes < min(tensor.offset for tensor in gguf.tensors.values())
    odd = bytearray(data)
    odd[gguf.n_header_bytes] = 1
    fetched = Fetched(tmp_path / "cache", bytes(odd))
    first, phases = fetched.text(), list[str]()
    assert fetched.text(on_progress=lambda progress: phases.append(progress.phase)) == first
    assert "verify" not in phases
    assert fetched.path.read_bytes() == odd


@pytest.mark.slow
@pytest.mark.parametrize("at", ["tiles", "verify", "record", "name", "renamed", "restore", "both"])
def test_a_kill_loses_nothing(fetched: Fetched, data: bytes, at: str) -> None:
    """Killed while tiles are written, compared, about to take the file's place, named, or turned back: all is there."""
    expected = fetched.text() if at in ("renamed", "restore", "both") else None
    if at == "renamed":
        fetched.tiles.rename(fetched.path)
    assert fetched.run(at).returncode == -signal.SIGKILL
    found = fetched.text()
    assert expected in (None, found)
    assert resolve(fetched.url, ResolveOptions(fetched.root, offline=True)) == fetched.path
    if at != "both":
        assert is_tiled(fetched.path)
        assert not fetched.path.exists()
    assert fetched.whole() == data
    run_here("rm", fetched.url)
    assert [path.name for path in (fetched.root / "models").rglob("*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["by name", "list", "read only", "full disk", "two at once", "a GGUF again"])
def test_tiles_of_earlier_versions_get_their_name(
    fetched: Fetched, data: bytes, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Tiles called NAME.gguf are known by their first bytes and renamed, whole or not at all; they work in both places.

    What stands there by the time the lock is taken counts: another process may have renamed them, or made the GGUF.
    """
    first = fetched.text()
    fetched.tiles.rename(fetched.path)
    inode = fetched.path.stat().st_ino

    def refused(*_: object) -> None:
        raise OSError(30 if case == "read only" else 28, case)

    def other(path: Path) -> FileLock | None:
        (make_whole if case == "a GGUF again" else rename_tiles)(path)
        return try_lock(path)

    with monkeypatch.context() as patch:
        if case in ("read only", "full disk"):
            patch.setattr(record, "try_lock" if case == "read only" else "publish", refused)
        elif case != "list" and case != "by name":
            locks = iter((other, try_lock))
            patch.setattr(record, "try_lock", lambda path: next(locks)(path))
        listed = json.loads(run_here("list", "--json").out)["models"] if case == "list" else []
        assert resolve(fetched.url, ResolveOptions(fetched.root, offline=True)) == fetched.path
    there = fetched.path if case in ("read only", "full disk", "a GGUF again") else fetched.tiles
    assert [path for path in (fetched.path, fetched.tiles) if path.exists()] == [there]
    assert [(one["as_tiles"], one["path"]) for one in listed] == ([(True, str(there))] if listed else [])
    assert (there.stat().st_ino == inode) == (case != "a GGUF again")
    assert fetched.text() == first
    assert fetched.whole() == data


@pytest.mark.slow
def test_both_paths_of_a_model_lead_to_it(fetched: Fetched) -> None:
    """The path that its GGUF had, and that of its tiles, which a person sees there."""
    first = fetched.text()
    for path in (fetched.path, fetched.tiles):
        assert resolve_model(path, fetched.options) == fetched.path
        with edgedec.load(path, runtime="cpu", n_ctx=64, cache_dir=fetched.root) as engine:
            assert tuple(engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids) == first
    assert not fetched.path.exists()


@pytest.mark.slow
def test_processes_at_once(fetched: Fetched, data: bytes) -> None:
    """Processes that load the model for the first time at once write the same text; one file is left."""
    command = [sys.executable, "-c", LOAD, str(fetched.path), str(fetched.root), ""]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    texts = [child.communicate(timeout=PATIENCE_S)[0] for child in started]
    assert texts[0].startswith("[")
    assert len(set(texts)) == 1
    assert [child.returncode for child in started] == [0, 0, 0]
    fetched.text()  # where the last one found the lock held
    assert fetched.files() == ["tiny.gguf.json", "tiny.tiles"]
    assert fetched.whole() == data


@pytest.mark.slow
def test_a_model_in_use_goes_on(fetched: Fetched, data: bytes) -> None:
    """A model whose file is made again, or deleted, while it is loaded writes on."""
    with fetched.load() as engine:
        first = engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids
        assert fetched.whole() == data
        assert engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids == first
        run_here("rm", fetched.url)
        assert engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids == first


@pytest.mark.slow
def test_a_full_disk_keeps_the_tiles(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the file, the error says how much is needed; what is there stays, and nothing beside it."""
    first = fetched.text()
    with monkeypatch.context() as patch:
        patch.setattr(keeping, "_MARGIN_BYTES", 1 << 62)
        with pytest.raises(StorageError, match=r"to make its file again .* more are needed .*; make room"):
            make_whole(fetched.path)

    def full(_: Progress) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device; its folder must have room"):
        make_whole(fetched.path, on_progress=full)
    assert fetched.files() == ["tiny.gguf.json", "tiny.tiles"]
    assert fetched.text() == first


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["verify", "restore"])
def test_cancelling_leaves_what_was_there(fetched: Fetched, data: bytes, phase: str) -> None:
    """Cancelled while the tiles are compared, or turned back, the file that was there stays and works."""
    cancel = CancelToken()

    def on_progress(progress: Progress) -> None:
        if progress.phase == phase:
            cancel.cancel()

    if phase == "restore":
        fetched.text()
    act = partial(make_whole, fetched.path) if phase == "restore" else fetched.load
    with pytest.raises(CancelledError):
        act(on_progress=on_progress, cancel=cancel)
    assert is_tiled(fetched.path) == (phase == "restore")
    assert fetched.whole() == data


@pytest.mark.slow
@pytest.mark.parametrize("where", ["head", "matrix", "header", "end", "cut"])
def test_damage_is_found_and_fetched_again(fetched: Fetched, data: bytes, where: str) -> None:
    """A tile file that is all there is of a model is not deleted for damage: `pull --force` fetches the model again."""
    first = fetched.text()
    gguf = read_gguf(fetched.path)
    assert gguf.form is not None
    places = gguf.form.tiles.places()
    at = {"head": 100, "matrix": places["blk.0.attn_q.weight"] + 5, "header": places[""] + 30}.get(where, -1)
    found = bytearray(fetched.tiles.read_bytes()[: -1 if where == "cut" else None])
    found[at] ^= 1
    fetched.tiles.write_bytes(found)
    with pytest.raises(ModelFormatError, match=r"download the model again|is damaged"):
        fetched.load()
    with pytest.raises(EdgedecError):
        make_whole(fetched.path)
    assert fetched.tiles.read_bytes() == bytes(found)
    with StubServer() as server:
        server.add("/tiny.gguf", data)
        written = json.loads(fetched.path.with_name("tiny.gguf.json").read_text())
        assert written["sha256"] == hashlib.sha256(data).hexdigest()
        fetched.path = pull(f"{server.root}/tiny.gguf", fetched.options, force=True)
    assert fetched.text() == first


@pytest.mark.slow
def test_tiles_that_were_touched_are_read_once(fetched: Fetched) -> None:
    """A tile file with another time is compared with its checksums, and is known again afterwards."""
    first = fetched.text()
    os.utime(fetched.tiles, ns=(5, 5))
    phases: list[str] = []
    assert fetched.text(on_progress=lambda progress: phases.append(progress.phase)) == first
    assert "verify" in phases
    phases.clear()
    fetched.text(on_progress=lambda progress: phases.append(progress.phase))
    assert "verify" not in phases


@pytest.mark.slow
def test_another_layout_is_made_from_the_old_tiles(
    fetched: Fetched, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of edgedec with another arrangement makes its tiles from the old ones, without the GGUF."""
    first = fetched.text()
    monkeypatch.setattr(weights, "LAYOUT", "another")
    assert fetched.text() == first
    form = read_gguf(fetched.path).form
    assert form is not None
    assert form.tiles.layout == "another"
    assert fetched.files() == ["tiny.gguf.json", "tiny.tiles"]
    assert fetched.whole() == data


@pytest.mark.slow
def test_pull_compares_what_the_tiles_stand_for(fetched: Fetched, data: bytes) -> None:
    """`pull --force` finds right tiles to be right, and downloads nothing."""
    fetched.text()
    before = fetched.tiles.stat().st_ino
    wanted = WantedFile("tiny", fetched.path, fetched.url, len(data), hashlib.sha256(data).hexdigest())
    assert find_fault(wanted, fetched.options, rehash=True) is None
    assert find_fault(replace(wanted, sha256="0" * 64), fetched.options, rehash=True) is not None
    fetched.path.with_name("tiny.gguf.json").unlink()
    assert find_fault(wanted, fetched.options) is None
    assert is_recorded(wanted)
    assert fetched.tiles.stat().st_ino == before


@pytest.mark.slow
def test_commands_say_what_is_on_the_disk(fetched: Fetched, data: bytes) -> None:
    """`list` has the sum, `pull` says the sizes before it downloads, `--keep-file` makes the file again, `rm` all.

    `cache verify` reads the tiles, too; damaged ones are named, with how the model is had again, and stay.
    """
    fetched.text()
    (model,) = json.loads(run_here("list", "--json").out)["models"]
    assert (model["disk_bytes"], model["tiles_bytes"], model["as_tiles"]) == (fetched.tiles.stat().st_size, 0, True)
    listed = run_here("list").text
    assert "stored as tiles" in " ".join(listed.split())
    assert "on the disk in all: " in listed
    assert (
        "(tiles, which other programs can't read; --keep-file makes the GGUF again)"
        in run_here("pull", fetched.url, "--offline").err
    )
    assert run_here("pull", fetched.url, "--keep-file", "--offline").code == 0
    assert fetched.path.read_bytes() == data
    assert run_here("pull", fetched.url, "--no-keep-file", "--offline").code == 0
    fetched.text()
    tiles, remedy = fetched.tiles.read_bytes(), f"; download the model again: edgedec pull --force {fetched.url}\n"
    for end, words in ((tiles[-4:], "1 of 1"), (b"odd!", f"{remedy}0 of 1")):
        fetched.tiles.write_bytes(tiles[:-4] + end)
        assert run_here("cache", "verify").err.endswith(f"{words} tile files are sound\n")
    assert is_tiled(fetched.path)
    assert run_here("rm", fetched.url).code == 0
    assert fetched.files() == []
    with StubServer() as server:
        server.add("/tiny.gguf", data)
        said = run_here("pull", f"{server.root}/tiny.gguf").err.splitlines()[0]
    assert " on the disk, and as much again for a moment when it first runs on the cpu runtime" in said


@pytest.mark.slow
def test_llamacpp_gets_the_file(fetched: Fetched, data: bytes) -> None:
    """The llamacpp runtime has the file made again when it loads the model, and plans without it."""
    pytest.importorskip("llama_cpp")
    fetched.text()
    assert json.loads(run_here("plan", fetched.path, "--runtime", "llamacpp", "--context", "64", "--json").out)[
        "total_bytes"
    ]
    assert is_tiled(fetched.path)
    fetched.text(runtime="llamacpp")
    assert fetched.path.read_bytes() == data


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_is_made_again(tmp_path: Path) -> None:
    """SmolLM2 135M, kept as tiles, is made again to the bit."""
    data = real_model("smollm2-135m.gguf").read_bytes()
    fetched = Fetched(tmp_path / "cache", data)
    fetched.text()
    assert is_tiled(fetched.path)
    assert fetched.tiles.stat().st_size < 1.01 * len(data)
    assert fetched.whole() == data
