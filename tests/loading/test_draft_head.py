"""The draft head of a model is found beside it, among those trained here, and among the shipped ones."""

import sys
from pathlib import Path

import pytest
from support.installed import with_plugin
from support.tiny_heads import TinyHead, write_head
from support.tiny_models import tiny_llama

from edgedec import plugins
from edgedec.gguf.file import read_gguf
from edgedec.loading.draft_head import FoundHead, find_head, heads_in, remember_head
from edgedec.trained_heads.card import Target
from edgedec.trained_heads.load import load_head
from edgedec.trained_heads.record import RECORD_FILE, record_text
from edgedec.trained_heads.target import target_of
from edgedec_export.head_to_gguf import write_head_gguf

TINY = TinyHead(n_embd=64, n_embd_target=64, head_dim=16, taps=(0, 2, 4), n_vocab_target=260)
FOLDER = Path()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny model in a folder of its own."""
    (tmp_path / "models").mkdir()
    return tiny_llama(tmp_path / "models" / "m.gguf", n_layer=4)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the root of a cache without heads."""
    return tmp_path / "cache"


def folder() -> Path:
    """What another package's entry point names."""
    return FOLDER


def _head(folder: Path, target: Target | None) -> Path:
    write_head(folder, TINY)
    (folder / RECORD_FILE).write_text(record_text(folder.name, target, None))
    return folder


def test_nothing_is_found_where_nothing_is(model: Path, cache: Path) -> None:
    """Neither the folder of the model nor the cache needs to hold anything."""
    assert find_head(model, cache) is None


def test_a_head_beside_its_model_is_taken_by_its_name(model: Path, cache: Path) -> None:
    """A GGUF wins over a folder, and both over what the cache has."""
    _head(cache / "heads" / "trained", target_of(read_gguf(model)))
    folder = _head(model.with_name("m.head"), None)
    assert find_head(model, cache) == FoundHead(folder, beside=True)
    file = write_head_gguf(load_head(folder), read_gguf(model), model.with_name("m.head.gguf"))
    assert find_head(model, cache) == FoundHead(file, beside=True)


def test_a_trained_head_is_taken_by_its_hashes(model: Path, cache: Path, tmp_path: Path) -> None:
    """One that learned from these weights wins over one of another quantization; one of another model is no match."""
    other = target_of(read_gguf(tiny_llama(tmp_path / "f16.gguf", n_layer=4, dtype="f16")))
    stranger = target_of(read_gguf(tiny_llama(tmp_path / "s.gguf", n_layer=4, seed=1)))
    _head(cache / "heads" / "1 stranger", stranger)
    _head(cache / "heads" / "2 unnamed", None)
    assert find_head(model, cache) is None
    quantized = _head(cache / "heads" / "3 quantized", other)
    assert find_head(model, cache) == FoundHead(quantized, beside=False)
    exact = _head(cache / "heads" / "4 exact", target_of(read_gguf(model)))
    assert find_head(model, cache) == FoundHead(exact, beside=False)
    assert find_head(tiny_llama(tmp_path / "copy.gguf", n_layer=4), cache) == FoundHead(exact, beside=False)


def test_a_head_is_found_where_it_was_noted(model: Path, cache: Path, tmp_path: Path) -> None:
    """Noting it twice is one note; a note of a head that is gone, or that holds no path, is passed over."""
    trained = _head(tmp_path / "elsewhere" / "my head", target_of(read_gguf(model)))
    remember_head(trained, cache)
    remember_head(trained, cache)
    assert len(list((cache / "heads").iterdir())) == 1
    assert find_head(model, cache) == FoundHead(trained, beside=False)
    (cache / "heads" / "0.path").write_bytes(b"\0")
    (cache / "heads" / "1.path").mkdir()
    assert find_head(model, cache) == FoundHead(trained, beside=False)
    trained.rename(tmp_path / "moved")
    assert find_head(model, cache) is None


def test_a_shipped_head_is_found(model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the plug-in "shipped"; a GGUF in it names its target, too."""
    source = load_head(_head(tmp_path / "source", target_of(read_gguf(model))))
    (tmp_path / "shipped").mkdir()
    file = write_head_gguf(source, read_gguf(model), tmp_path / "shipped" / "m.gguf")
    monkeypatch.setattr("edgedec_models.folders.shipped_heads", lambda: tmp_path / "shipped")
    assert find_head(model, cache) == FoundHead(file, beside=False)


def test_a_head_in_a_folder_of_another_package_is_found(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package names a function that returns its folder."""
    head = _head(tmp_path / "strangers" / "own", target_of(read_gguf(model)))
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", head.parent)
    assert find_head(model, cache) is None
    with_plugin(monkeypatch, tmp_path, plugins.HEAD_FOLDERS, "strangers", f"{__name__}:folder")
    assert find_head(model, cache) == FoundHead(head, beside=False)


def test_a_broken_plug_in_is_passed_over(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can't be asked for, or is none, keeps no model from loading."""
    monkeypatch.setattr("edgedec_models.folders.shipped_heads", lambda: 1 / 0)
    assert find_head(model, cache) is None
    monkeypatch.setattr("edgedec_models.folders.shipped_heads", lambda: None)
    assert find_head(model, cache) is None


def test_what_is_no_head_is_passed_over(model: Path, cache: Path) -> None:
    """Damaged files, models and other folders beside the heads are none of the user's concern here."""
    heads = cache / "heads"
    heads.mkdir(parents=True)
    (heads / "a.gguf").write_bytes(b"GGUF\x03")
    (heads / "b.gguf").write_bytes(model.read_bytes())
    (heads / "c.txt").write_text("c")
    (heads / "d").mkdir()
    (heads / "e").mkdir()
    (heads / "e" / RECORD_FILE).write_text("{")
    assert list(heads_in(heads)) == []
    assert find_head(model, cache) is None
