"""The tile cache: made once, known again, never wrong, and done without where the disk does not take it.

Tiles that a disk lost, without a trace in the file's times: found when logits are not finite, deleted, made anew.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import write_gguf
from support.models.tile_maker import LAYOUT, Maker, contents, names, until_seen
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import CancelledError, ModelFormatError, ModelNotFoundError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tile_header import place
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.cache import Job, TileTensor, known_tile_file, open_tiles
from edgedec_runtimes.cpu.tiles.file import map_tiles
from edgedec_runtimes.cpu.tiles.listing import list_tiles


def test_made_once_and_mapped_afterwards(maker: Maker) -> None:
    """The first start fills every tensor in order; the second fills none, reads the same bytes and reports nothing."""
    with maker.open() as tiles:
        assert tiles.mapped
        assert maker.filled == names(tiles) == list(read_gguf(maker.path).tensors)
        assert contents(tiles) == maker.expected()
    with maker.open() as tiles:
        assert tiles.mapped
        assert (maker.filled, maker.reports) == ([], [])
        assert contents(tiles) == maker.expected()
        assert tiles.path == maker.tile_file()
        assert tiles.n_bytes == maker.tile_file().stat().st_size
        tiles.verify()
    assert [path.suffix for path in maker.files()] == [".json", ".tiles"]


@pytest.mark.parametrize("in_a_file", [True, False])
def test_aligned_and_read_only(maker: Maker, in_a_file: bool) -> None:
    """Every tensor starts at a multiple of 64 bytes, in a file as in memory, and can't be written to."""
    with maker.open(**({} if in_a_file else {"cache_dir": None})) as tiles:
        assert tiles.mapped is in_a_file
        assert {tiles[name].ctypes.data % 64 for name in names(tiles)} == {0}
        assert not any(tiles[name].flags.writeable for name in names(tiles))
        assert contents(tiles) == maker.expected()
        assert tiles.n_bytes == maker.job().n_bytes


def test_padding_is_small(maker: Maker) -> None:
    """For 200 tensors of odd sizes about 100 kB, head and padding are less than 2 %."""
    tensors = [TileTensor(f"blk.{i}.attn_output.weight", 100_001 + i) for i in range(200)]
    n_payload = sum(tensor.n_bytes for tensor in tensors)
    assert n_payload < maker.job(tensors=tensors).n_bytes < 1.02 * n_payload
    assert all(offset % 64 == 0 for offset in place(tensors)[:-1])


def test_empty_tensors(maker: Maker) -> None:
    """A tensor without bytes, even the last, and a model without tensors make sound files."""
    for tensors in ([TileTensor("token_embd.weight", 8323), TileTensor("none", 0)], []):
        for _ in range(2):
            with open_tiles(maker.job(tensors=tensors, fill=lambda name, out, start: None, layout="empty")) as tiles:
                assert [(name, len(tiles[name])) for name in names(tiles)] == [(t.name, t.n_bytes) for t in tensors]


def test_what_it_takes_is_said_first(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """The log and the first progress say size or folder before a byte is written; bytes count up to all."""
    caplog.set_level(logging.INFO, "edgedec.tiles")
    folder = maker.root / "tiles"
    maker.open().close()
    assert caplog.messages == [
        f"m.gguf: tiles: 20.5 kB on disk in {folder}",
        f"m.gguf: 20.5 kB kept in {folder}, so that its next start is fast (edgedec cache prune --all deletes it)",
    ]
    total = maker.tile_file().stat().st_size
    assert maker.reports[0] == Progress("tiles", 0, total, "bytes", f"m.gguf, kept in {folder}")
    assert {(report.phase, report.total, report.detail) for report in maker.reports} == {
        ("tiles", total, f"m.gguf, kept in {folder}")
    }
    done = [report.done for report in maker.reports]
    assert done == sorted(done)
    assert done[-1] == total
    assert known_tile_file(maker.job()) == maker.tile_file()
    assert known_tile_file(maker.job(cache_dir=None)) is None


def test_a_date_kept_is_no_proof(maker: Maker) -> None:
    """Other weights with the size and date of the old ones, as cp -p leaves them, are noticed."""
    maker.open().close()
    before = maker.path.stat()
    data = bytearray(maker.path.read_bytes())
    data[-1] ^= 1

    def put() -> None:
        maker.path.write_bytes(data)
        os.utime(maker.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    until_seen(maker.path, put)
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert maker.filled != []


@pytest.mark.parametrize("copy", [shutil.copyfile, shutil.copy2, shutil.move])
def test_a_copy_shares_the_tiles(maker: Maker, tmp_path: Path, copy: Callable[[Path, Path], Any]) -> None:
    """A copied or moved model is read once and uses the same file from then on."""
    maker.open().close()
    original, maker.path = maker.path, tmp_path / "other" / "n.gguf"
    maker.path.parent.mkdir()
    copy(original, maker.path)
    for phases in (["verify"], []):
        maker.open().close()
        assert (maker.filled, maker.phases()) == ([], phases)
    assert maker.tile_file().exists()
    maker.path = original
    if original.exists():
        maker.open().close()
        assert maker.reports == []


def test_models_that_differ_in_weights_only(maker: Maker, tmp_path: Path) -> None:
    """Two models with the same header and size have a file each, and neither gets the other's."""
    twin = Maker(tmp_path / "twin.gguf", maker.root)
    data = bytearray(maker.path.read_bytes())
    data[-1] ^= 1
    twin.path.write_bytes(data)
    for filled in (True, False):
        for each in (maker, twin):
            with each.open() as tiles:
                assert contents(tiles) == each.expected()
            assert bool(each.filled) is filled
            assert filled or each.reports == []
    assert len(list(maker.root.glob("tiles/*.tiles"))) == 2


def test_a_replaced_model_loses_its_old_tiles(maker: Maker) -> None:
    """Another model at the same path is noticed; the tiles of the old one are deleted when the new ones are there."""
    maker.open().close()
    old = maker.tile_file()
    tiny_llama(maker.path, seed=7, n_layer=1, n_embd=8, n_ff=16)
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert not old.exists()
    assert len(maker.files()) == 2


def test_a_layout_has_a_file_of_its_own(maker: Maker) -> None:
    """Another layout does not use, and does not delete, the tiles of the first."""
    maker.open().close()
    maker.open(layout="other").close()
    assert maker.filled
    for layout in (LAYOUT, "other"):
        with maker.open(layout=layout) as tiles:
            assert tiles.header.layout == layout
        assert maker.filled == []


def test_other_tensors_are_made_anew(maker: Maker) -> None:
    """A file whose table differs from the one asked for, in a name, a size or the order, is replaced."""
    tensors = maker.tensors()
    for asked in (tensors, tensors[1:], tensors[::-1], [TileTensor(t.name, t.n_bytes + 64) for t in tensors]):
        for filled in ([tensor.name for tensor in asked], []):
            maker.open(tensors=asked).close()
            assert maker.filled == filled
        assert len(maker.files()) == 2


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    paths = [tmp_path / f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
        metadata = {"general.architecture": "llama", "split.no": i, "split.count": 2, "split.tensors.count": 2}
        write_gguf(path, metadata, {f"t{i}": np.full((4, 4), i, np.float32)})
    maker = Maker(paths[0], tmp_path / "cache")
    for filled in (["t0", "t1"], []):
        with maker.open() as tiles:
            assert contents(tiles) == maker.expected()
        assert maker.filled == filled
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    until_seen(paths[1], lambda: paths[1].write_bytes(data))
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert maker.filled == ["t0", "t1"]


@pytest.mark.parametrize("damage", ["", "{}", '{"sources": [[["m", "x", 1, 1]]]}', '{"sources": 1}', None])
def test_lost_sources_cost_one_reading(maker: Maker, damage: str | None) -> None:
    """Without the record of sources, or with a damaged one, the model is read once; its tiles stay good."""
    maker.open().close()
    record = maker.tile_file().with_suffix(".json")
    record.unlink() if damage is None else record.write_text(damage, encoding="ascii")
    for phases in (["verify"], []):
        maker.open().close()
        assert (maker.filled, maker.phases()) == ([], phases)


@pytest.mark.slow
def test_every_cut_and_every_flip_in_the_head_is_found(maker: Maker) -> None:
    """A file of any shorter length, a longer one, and any changed bit of the head is refused."""
    tiles = maker.open(tensors=maker.tensors()[1:3])
    n_head = tiles.header.offsets()[0]
    tiles.close()
    path = maker.tile_file()
    data = path.read_bytes()
    lengths = [*range(n_head + 1), *range(n_head, len(data), 61), len(data) - 1]
    copies = [data[:n_bytes] for n_bytes in lengths] + [data + b"\0", bytes(len(data))]
    for i in range(n_head):
        copies.append(data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :])
    for copy in copies:
        path.write_bytes(copy)
        with pytest.raises(
            ModelFormatError, match=r"^the tiles of mine .*; they are made anew when the model is loaded$"
        ):
            map_tiles(path, "mine")


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "version", "longer"])
def test_a_damaged_file_is_made_anew(maker: Maker, damage: str) -> None:
    """Whatever is wrong with the file, the next start replaces it by a sound one."""
    maker.open().close()
    path = maker.tile_file()
    data = path.read_bytes()
    other_version = data[:16] + b"\xff" + data[17:]
    damaged = {"empty": b"", "cut": data[:-1], "zeros": bytes(len(data)), "version": other_version, "longer": data * 2}
    path.write_bytes(damaged[damage])
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert maker.filled
    assert path.read_bytes() == data
    assert len(maker.files()) == 2


def change_a_tile(maker: Maker) -> tuple[str, os.stat_result]:
    """Make the tiles and flip a bit of one; return its tensor, and what the file was before."""
    with maker.open() as tiles:
        offset, name = tiles.header.offsets()[2], names(tiles)[2]
    path = maker.tile_file()
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    until_seen(path, lambda: path.write_bytes(data))
    return name, before


def test_a_tile_that_was_written_to_is_found_at_the_start(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """A file with another time than when it was made is read whole; a damaged one is made anew, and that is said."""
    name, _ = change_a_tile(maker)
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert maker.phases() == ["verify", "tiles"]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"the tiles of m.gguf are damaged: of '{name}' they have the CRC-32 ")
    maker.open().close()
    assert (maker.filled, maker.phases()) == ([], [])


@pytest.mark.parametrize("touched", ["model", "tiles"])
def test_what_is_touched_is_read_once(maker: Maker, touched: str) -> None:
    """New times, same bytes: the model, or the tiles, are read once to find out, then known."""
    maker.open().close()
    path = maker.path if touched == "model" else maker.tile_file()
    os.utime(path, ns=(1, 1))
    for phases in (["verify"], []):
        maker.open().close()
        assert (maker.filled, maker.phases()) == ([], phases)
        assert touched == "tiles" or not phases or maker.reports[-1].done == path.stat().st_size


def test_verify_finds_a_changed_tile(maker: Maker) -> None:
    """A bit that a disk lost, which leaves no trace in the times, is found by verify, which names the tensor."""
    name, before = change_a_tile(maker)
    os.utime(maker.tile_file(), ns=(before.st_atime_ns, before.st_mtime_ns))
    with maker.open() as tiles:
        assert maker.filled == []
        with pytest.raises(
            ModelFormatError, match=f"the tiles of m.gguf are damaged: of '{name}' they have the CRC-32"
        ):
            tiles.verify()


def test_tiles_copied_to_memory_are_checked(maker: Maker) -> None:
    """With mapped=False the tiles are copied to private memory; a changed bit is found although the times are kept."""
    with maker.open() as tiles:
        expected = contents(tiles)
    for _ in range(2):
        with maker.open(mapped=False) as tiles:
            assert (tiles.mapped, contents(tiles)) == (False, expected)
        assert (maker.filled, maker.phases()) == ([], ["load"])
    _, before = change_a_tile(maker)
    os.utime(maker.tile_file(), ns=(before.st_atime_ns, before.st_mtime_ns))
    with maker.open(mapped=False) as tiles:
        assert (tiles.mapped, contents(tiles)) == (False, expected)
    assert maker.phases() == ["load", "tiles"]


def test_tiles_of_models_that_are_gone_go_when_others_are_made(maker: Maker, tmp_path: Path) -> None:
    """Making tiles frees what those of a deleted model take, and says so; tiles of models that are there stay."""
    others = [Maker(tiny_llama(tmp_path / f"{i}.gguf", seed=i + 1, n_layer=1), maker.root) for i in range(2)]
    for each in others:
        each.open().close()
    others[0].path.unlink()
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()
    assert sorted(entry.models[0] for entry in list_tiles(maker.root)) == sorted([others[1].path, maker.path])


def test_a_deleted_file_stays_valid_for_its_users(maker: Maker) -> None:
    """Tiles that are mapped outlive the deletion and the replacement of their file."""
    with maker.open() as tiles:
        shutil.rmtree(maker.root)
        with maker.open() as others:
            assert maker.filled
            assert contents(tiles) == contents(others) == maker.expected()


def test_arrays_may_outlive_close(maker: Maker) -> None:
    """Closing with an array still held neither fails nor takes the memory from under it."""
    with maker.open() as tiles:
        array = tiles["token_embd.weight"]
    assert array.tobytes() == maker.expected()["token_embd.weight"]
    with pytest.raises(KeyError):
        tiles["token_embd.weight"]


@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_cancelling_leaves_nothing(maker: Maker, when: str) -> None:
    """A build that is cancelled leaves no file, wherever it was; the next one is whole."""
    cancel = CancelToken()
    last = list(read_gguf(maker.path).tensors)[-1]
    at = {"start": "token_embd.weight", "middle": "blk.0.ffn_up.weight", "end": last}[when]
    maker.on_fill = lambda name: cancel.cancel() if name == at else None
    with pytest.raises(CancelledError, match=r"tiles m\.gguf: cancelled"):
        maker.open(cancel=cancel)
    assert maker.filled[-1] == at
    assert maker.files() == []
    with maker.open() as tiles:
        assert contents(tiles) == maker.expected()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "mine"), KeyboardInterrupt(), MemoryError()])
def test_what_fill_raises_comes_out(maker: Maker, error: BaseException) -> None:
    """An error of the caller's, even one that looks like the disk's, is passed on, and no file is left."""

    def fail(name: str) -> None:
        raise error

    maker.on_fill = fail
    with pytest.raises(type(error)) as raised:
        maker.open()
    assert raised.value is error
    assert maker.files() == []


def test_a_model_that_changes_meanwhile(maker: Maker) -> None:
    """Tiles of a file that was written to while they were made are not kept."""
    maker.on_fill = lambda name: os.utime(maker.path, ns=(1, 1))
    with pytest.raises(StorageError, match="changed while it was read"):
        maker.open()
    assert maker.files() == []


def test_a_model_that_is_gone(maker: Maker) -> None:
    """A model deleted after its header was read is told as such."""
    gguf = read_gguf(maker.path)
    maker.path.unlink()
    with pytest.raises(ModelNotFoundError, match=r"m\.gguf"):
        open_tiles(Job(gguf, [], LAYOUT, lambda name, out, start: None, cache_dir=maker.root))


TOKENS = np.arange(3, 40, dtype=np.int32)
MATRICES = ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of float32 weights."""
    return tiny_llama(tmp_path_factory.mktemp("damaged") / "m.gguf", n_layer=4)


def load(path: Path, cache: Path, resident_bytes: int | None = None) -> CpuModel:
    """Load the model with its tiles in that cache."""
    options = LoadOptions(n_ctx=64, n_threads=2, cache_dir=cache, resident_bytes=resident_bytes)
    model = Cpu().load(path, options)
    assert isinstance(model, CpuModel)
    return model


def tile_files(cache: Path) -> list[Path]:
    return list(cache.glob("tiles/*.tiles"))


def damage(cache: Path, name: str) -> None:
    """Make a tensor's first weight what is no number; the times of the file stay."""
    (path,) = tile_files(cache)
    with map_tiles(path) as tiles:
        place = tiles.header.places()[name]
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 4)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def bits(model: CpuModel) -> bytes:
    return model.session(64).forward(TOKENS, n_past=0).logits.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("streamed", [False, True], ids=["mapped", "streamed"])
def test_damaged_tiles_are_deleted_and_made_anew(path: Path, tmp_path: Path, name: str, streamed: bool) -> None:
    """One bad weight in whatever matrix: every forward fails and names it; the next load has the same bits again."""
    with load(path, tmp_path) as model:
        expected = bits(model)
    (made,) = tile_files(tmp_path)
    damage(tmp_path, name)
    with load(path, tmp_path, made.stat().st_size * 9 // 10 if streamed else None) as model:
        assert any(term.name == "weights (streamed)" for term in model.memory(64, 1)) is streamed
        session = model.session(64)
        messages = set()
        for n_rows in (1, len(TOKENS)):
            with pytest.raises(ModelFormatError) as raised:
                session.forward(TOKENS[:n_rows], n_past=0)
            messages.add(str(raised.value))
            assert session.n_cached == 0
    (message,) = messages
    assert message.startswith(f"the model's logits are not finite: the tiles of m.gguf are damaged: of '{name}' they")
    assert message.endswith(
        "; they are made anew when the model is loaded. Their file was deleted: load the model again"
    )
    assert tile_files(tmp_path) == []
    with load(path, tmp_path) as model:
        assert bits(model) == expected


@pytest.mark.slow
def test_an_engine_says_it_too(path: Path, tmp_path: Path) -> None:
    """Whichever forward meets the damage, a measurement or a draft's, the error says what to do, and that helps."""
    with edgedec.load(path, runtime="cpu", cache_dir=tmp_path, n_ctx=64) as engine:
        expected = engine.generate("Hello", max_tokens=8, temperature=0).token_ids
    for draft in ("auto", "off", "suffix"):
        damage(tmp_path, "blk.1.ffn_down.weight")
        with (
            pytest.raises(
                ModelFormatError,
                match=r"made anew when the model is loaded. Their file was deleted: load the model again$",
            ),
            edgedec.load(path, runtime="cpu", cache_dir=tmp_path, n_ctx=64, draft=draft) as engine,
        ):
            engine.generate("Hello", max_tokens=8, temperature=0)
        with edgedec.load(path, runtime="cpu", cache_dir=tmp_path, n_ctx=64) as engine:
            assert engine.generate("Hello", max_tokens=8, temperature=0).token_ids == expected


@pytest.mark.slow
def test_a_model_that_is_damaged_itself(path: Path, tmp_path: Path) -> None:
    """Where the tiles are as they were made, the model's file is to blame, and the tiles stay."""
    broken = tmp_path / "broken.gguf"
    shutil.copyfile(path, broken)
    with broken.open("r+b") as file:
        file.seek(read_gguf(path).tensors["output.weight"].offset)
        file.write(b"\xff" * 4)
    with load(broken, tmp_path) as model:
        for _ in range(2):
            with pytest.raises(
                ModelFormatError, match=r"not finite, and the tiles of broken.gguf are undamaged: .* download it"
            ):
                bits(model)
    assert len(tile_files(tmp_path)) == 1
