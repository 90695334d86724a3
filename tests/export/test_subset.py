"""A GGUF with some of a model's layers computes what the whole model computes without the others."""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forwards import all_logits, distance
from support.models.gguf_writer import RawTensor, Typed, write_gguf
from support.models.kept_as_tiles import kept_as_tiles
from support.models.real_models import real_model
from support.models.tiny_mamba import tiny_mamba
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, UNIFORM, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.models.tiny_runs import Bits, bits

from edgedec.errors import CancelledError, ModelFormatError, RequestError, StorageError, UnsupportedModelError
from edgedec.gguf.file import GGMLType, GGUFArray, ValueType, read_gguf
from edgedec.model import LayerSet
from edgedec.progress import CancelToken, Progress
from edgedec.runtime import Runtime
from edgedec_export.gguf_writer import read_entries
from edgedec_export.subset import KEPT_KEY, keep_layers, parse_layers, spread_layers
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(1).integers(0, 260, 24).astype(np.int32)


def logits(runtime: Runtime, path: Path, layers: LayerSet | None = None) -> Bits:
    """Return the bits of the logits of all rows of TOKENS."""
    return bits(all_logits(runtime, path, TOKENS, layers=layers))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNIFORM)
def test_logits_equal_those_with_the_layers_left_out(tmp_path: Path, name: str) -> None:
    """Logits are equal bit for bit on the cpu runtime, for every architecture and several types; llama.cpp agrees."""
    tiny = replace(ARCHITECTURES[name], types=("Q4_K", "F16", "Q8_0"))
    n_layer, kept = (12, tuple(range(6, 12))) if tiny.architecture == "gemma3" else (5, (0, 2, 3))
    whole = write_tiny(tmp_path / "whole.gguf", replace(tiny, n_layer=n_layer))
    subset = keep_layers(whole, tmp_path / "subset.gguf", kept)
    found = logits(Cpu(), subset)
    np.testing.assert_array_equal(found, logits(Cpu(), whole, LayerSet.of(n_layer, kept)))
    assert (found != logits(Cpu(), whole)).any()
    assert distance(found.view(np.float32), all_logits(LlamaCpp(), subset, TOKENS)) < 0.08


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_equal_those_of_the_reference(tmp_path: Path, architecture: Any) -> None:
    """The same holds on the reference runtime, and for a subset of a subset."""
    whole = tiny_llama(tmp_path / "whole.gguf", architecture=architecture, n_layer=6)
    first = keep_layers(whole, tmp_path / "first.gguf", (0, 1, 3, 5))
    second = keep_layers(first, tmp_path / "second.gguf", (0, 2, 3))
    expected = logits(Reference(), whole, LayerSet.of(6, (0, 3, 5)))
    np.testing.assert_array_equal(logits(Reference(), second), expected)
    np.testing.assert_array_equal(logits(Reference(), first, LayerSet.of(4, (0, 2, 3))), expected)
    assert kept_of(second) == [0, 3, 5]


def kept_of(path: Path) -> list[int]:
    """Return the numbers of a subset's layers in the whole model."""
    array = read_gguf(path).metadata[KEPT_KEY]
    assert isinstance(array, GGUFArray)
    return array.tolist()


def test_all_but_the_layers_is_copied(tmp_path: Path) -> None:
    """Typed metadata, bytes of tensors and alignment are copied; the name lists the layers."""
    extra = {
        "general.alignment": 128,
        "a.u64": Typed(ValueType.UINT64, 7),
        "a.i8": Typed(ValueType.INT8, -3),
        "a.f64": Typed(ValueType.FLOAT64, 0.1),
        "a.nested": [["x", "y"], ["z"]],
    }
    path = write_tiny(tmp_path / "whole.gguf", Tiny(n_layer=3, types=("Q6_K", "F32")), metadata=extra)
    seen: list[Progress] = []
    out = keep_layers(path, tmp_path / "subset.gguf", (0, 2), on_progress=seen.append)
    whole, subset = read_gguf(path), read_gguf(out)
    before, after = dict(read_entries(whole)), dict(read_entries(subset))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"general.name", "llama.block_count"}
    assert after.keys() - before.keys() == {KEPT_KEY}
    assert subset.metadata["general.name"] == "tiny llama 0 (layers 0,2 of 3)"
    assert subset.alignment == 128
    for name in subset.tensors:
        assert subset.read_tensor_bytes(name) == whole.read_tensor_bytes(name.replace("blk.1.", "blk.2."))
    assert len(subset.tensors) == len(whole.tensors) - 9
    assert seen[-1].done <= seen[-1].total == subset.n_bytes  # type: ignore[operator]  # it is known here
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert {p.detail for p in seen} == {"tensors"}  # one name: a bar for each tensor would stay


def test_all_layers_give_the_same_file(tmp_path: Path) -> None:
    """Keeping all layers changes only the name and the list of layers; tensors keep bytes and places."""
    path = write_tiny(tmp_path / "whole.gguf", Tiny())
    subset, whole = read_gguf(keep_layers(path, tmp_path / "subset.gguf", 2)), read_gguf(path)
    assert [(t.name, t.shape, t.type) for t in subset.tensors.values()] == [
        (t.name, t.shape, t.type) for t in whole.tensors.values()
    ]
    assert all(subset.read_tensor_bytes(name) == whole.read_tensor_bytes(name) for name in whole.tensors)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no file that is mapped")
def test_a_model_that_is_kept_as_tiles_gives_the_same_file(tmp_path: Path) -> None:
    """Metadata and tensors are those of the GGUF that the tiles stand for; so is the tokenizer of a head for it."""
    whole = write_tiny(tmp_path / "whole.gguf", Tiny(n_layer=3))
    fetched = kept_as_tiles(whole, tmp_path / "cache")
    subsets = [keep_layers(path, tmp_path / f"{i}.gguf", (0, 2)) for i, path in enumerate((whole, fetched))]
    assert subsets[0].read_bytes() == subsets[1].read_bytes()
    assert read_entries(read_gguf(fetched)) == read_entries(read_gguf(whole))


@pytest.mark.slow
def test_the_parts_of_a_split_model_become_one_file(tmp_path: Path) -> None:
    """Tensors of all parts are copied, and no key of the split is left."""
    tiny = Tiny(n_layer=3)
    metadata, tensors = tiny_metadata(tiny), tiny_tensors(tiny)
    names = list(tensors)
    paths = [tmp_path / f"m-{i + 1:05}-of-00002.gguf" for i in range(2)]
    for i, path in enumerate(paths):
        split = {"split.no": i, "split.count": 2, "split.tensors.count": len(names)}
        part = {name: tensors[name] for name in (names[:15] if i == 0 else names[15:])}
        write_gguf(path, (metadata if i == 0 else {}) | split, part)
    out = keep_layers(paths[0], tmp_path / "subset.gguf", (1, 2))
    assert not [key for key in read_gguf(out).metadata if key.startswith("split.")]
    whole = write_tiny(tmp_path / "whole.gguf", tiny)
    np.testing.assert_array_equal(logits(Cpu(), out), logits(Cpu(), whole, LayerSet.of(3, (1, 2))))


def test_arrays_with_an_entry_for_each_layer_are_cut(tmp_path: Path) -> None:
    """Known per-layer arrays are cut; unknown ones of that length, and wrong lengths, are refused."""
    heads = Typed(ValueType.ARRAY, [1, 2, 3, 4], ValueType.UINT32)
    path = header_only(tmp_path, {"llama.attention.head_count_kv": heads, "llama.rope.dimension_sections": [8, 8, 8]})
    subset = read_gguf(keep_layers(path, tmp_path / "subset.gguf", (0, 3)))
    cut = subset.metadata["llama.attention.head_count_kv"]
    assert isinstance(cut, GGUFArray)
    assert (cut.element_type, cut.tolist()) == (ValueType.UINT32, [1, 4])
    path = header_only(tmp_path, {"llama.attention.head_count_kv": [1, 2, 3]})
    with pytest.raises(ModelFormatError, match="head_count_kv has 3 entries for 4 layers"):
        keep_layers(path, tmp_path / "other.gguf", (0, 3))
    path = header_only(tmp_path, {"llama.something": ["a", "b", "c", "d"]})
    with pytest.raises(UnsupportedModelError, match=r"llama\.something has . entries, as many as the model has layers"):
        keep_layers(path, tmp_path / "other.gguf", (0, 3))


def header_only(tmp_path: Path, metadata: dict[str, Any], n_layer: int = 4) -> Path:
    """Write a file with one small tensor per layer."""
    tensors = {f"blk.{i}.attn_norm.weight": RawTensor(GGMLType.F32, (1,), bytes(4)) for i in range(n_layer)}
    keys = {"general.architecture": "llama", "llama.block_count": n_layer}
    return write_gguf(tmp_path / "header.gguf", keys | metadata, tensors)


def test_gemmas_pattern_is_kept_or_refused(tmp_path: Path) -> None:
    """Every sixth layer sees all tokens: layers behind a gap must keep their place in their group of six."""
    gemma = {"general.architecture": "gemma3", "gemma3.block_count": 14, "gemma3.attention.sliding_window": 8}
    path = header_only(tmp_path, gemma, n_layer=14)
    for wrong in ((5,), (0, 1, 2, 3, 5), (*range(6), *range(7, 13))):
        with pytest.raises(UnsupportedModelError, match=r"every 6th layer .* 0-5"):
            keep_layers(path, tmp_path / "subset.gguf", wrong)
    for i, right in enumerate(((0, 1, 2), (*range(6), 12, 13), (1, 2, 3, 4, 6, 11))):
        assert kept_of(keep_layers(path, tmp_path / f"{i}.gguf", right)) == list(right)
    assert kept_of(keep_layers(path, tmp_path / "six.gguf", 6)) == list(range(6))
    assert kept_of(keep_layers(path, tmp_path / "twelve.gguf", 12)) == list(range(12))


def test_layers_whose_number_matters_are_refused(tmp_path: Path) -> None:
    """Unknown architectures, metadata that counts layers, and tensors beyond the last layer are refused."""
    with pytest.raises(UnsupportedModelError, match="the architecture is 'mamba'"):
        keep_layers(tiny_mamba(tmp_path / "mamba.gguf"), tmp_path / "subset.gguf", 1)
    with pytest.raises(UnsupportedModelError, match=r"llama\.nextn_predict_layers counts layers"):
        keep_layers(header_only(tmp_path, {"llama.nextn_predict_layers": 1}), tmp_path / "subset.gguf", 1)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.4\.attn_norm\.weight' belongs to none of the 4 layers"):
        keep_layers(header_only(tmp_path, {"llama.block_count": 4}, n_layer=5), tmp_path / "subset.gguf", 1)


def test_layers_are_read_as_written() -> None:
    """A count, and numbers and ranges in increasing order, are read."""
    assert parse_layers("14") == 14
    assert parse_layers(" 0-2, 5,7-7") == (0, 1, 2, 5, 7)
    for wrong in ("", "a", "3-1", "0-2,2", "5,1", "-1", "0--2", "0-99999"):
        with pytest.raises(RequestError, match="expected a count such as 14"):
            parse_layers(wrong)


def test_a_count_is_spread_evenly() -> None:
    """For all counts, the first and the last layer are among them, and none occurs twice."""
    assert spread_layers(30, 4) == (0, 10, 19, 29)
    for n_layer in range(1, 40):
        for count in range(1, n_layer + 1):
            layers = spread_layers(n_layer, count)
            gaps = np.diff(layers)
            assert (len(layers), layers[0]) == (count, 0)
            assert count == 1 or (layers[-1] == n_layer - 1 and gaps.min() >= 1 and np.ptp(gaps) <= 1)
    for wrong in (0, 31):
        with pytest.raises(RequestError, match=f"{wrong} layers are to be kept of a model with 30"):
            spread_layers(30, wrong)


def test_a_result_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong layers, a taken name, a full disk and cancelling leave the folder as it was."""
    path = write_tiny(tmp_path / "whole.gguf", Tiny())
    (tmp_path / "taken.gguf").write_bytes(b"mine")
    cancel = CancelToken()
    cancel.cancel()
    for layers, name, token, error, reason in (
        ((0, 2), "subset.gguf", None, RequestError, "layers 0,2: expected numbers from 0 to 1"),
        ((), "subset.gguf", None, RequestError, "layers None"),
        ((1, 0), "subset.gguf", None, RequestError, "increasing order"),
        ((0,), "taken.gguf", None, RequestError, "the file exists"),
        ((0,), "whole.gguf", None, RequestError, "this is the model to export"),
        ((0,), "none/subset.gguf", None, StorageError, "cannot be written"),
        ((0,), "subset.gguf", cancel, CancelledError, "cancelled"),
    ):
        with pytest.raises(error, match=reason):
            keep_layers(path, tmp_path / name, layers, cancel=token)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(StorageError, match="bytes, but 1000 are free"):
            keep_layers(path, tmp_path / "subset.gguf", (0,))
    assert (tmp_path / "taken.gguf").read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["taken.gguf", "whole.gguf"]
    keep_layers(path, tmp_path / "taken.gguf", (0,), force=True)
    assert kept_of(tmp_path / "taken.gguf") == [0]


def test_cancelling_from_another_thread_ends_the_copy(tmp_path: Path) -> None:
    """It ends between two pieces and leaves no file."""
    path = write_tiny(tmp_path / "whole.gguf", Tiny(n_layer=4))
    cancel = CancelToken()

    def stop(progress: Progress) -> None:
        thread = threading.Thread(target=cancel.cancel)
        thread.start()
        thread.join()

    with pytest.raises(CancelledError):
        keep_layers(path, tmp_path / "subset.gguf", 2, on_progress=stop, cancel=cancel)
    assert [file.name for file in tmp_path.iterdir()] == ["whole.gguf"]


@pytest.mark.slow
@pytest.mark.model
def test_a_real_models_subset_equals_skipping(tmp_path: Path) -> None:
    """With 20 of the 30 layers of the 135M model, the logits of 24 rows have the same bits."""
    whole = real_model("smollm2-135m.gguf")
    subset = keep_layers(whole, tmp_path / "subset.gguf", 20)
    kept = spread_layers(30, 20)
    np.testing.assert_array_equal(logits(Cpu(), subset), logits(Cpu(), whole, LayerSet.of(30, kept)))
