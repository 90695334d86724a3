"""Tiles that a disk lost, without a trace in the file's times: found when logits are not finite, deleted, made anew."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import ModelFormatError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.file import map_tiles

pytestmark = pytest.mark.slow

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
    """Return the tile files in a cache."""
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
    """Return the logits of a prompt."""
    return model.session(64).forward(TOKENS, n_past=0).logits.tobytes()


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
