"""Layers of one network may differ in their heads and widths, and may lack attention or a feed-forward block."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu import kv_types
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(4).integers(0, 260, 80).astype(np.int32)
FIRST, SECOND = Tiny(n_head=8, n_head_kv=4, head_dim=32), Tiny(n_head=8, n_head_kv=2, head_dim=32, n_ff=512)


def logits(runtime: Runtime, path: Path, kv_type: str = "f16") -> NDArray[np.float32]:
    """Return the logits of all rows of TOKENS."""
    with runtime.load(path, LoadOptions(n_ctx=128, n_threads=2, max_rows=80, kv_type=kv_type)) as model:
        return model.session(128).forward(TOKENS, n_past=0, rows="all").logits.copy()


def tensors_of(first: Tiny, second: Tiny) -> dict[str, RawTensor]:
    """Return the tensors of a model whose layers are the first ones of two others."""
    others = tiny_tensors(replace(second, seed=1))
    moved = {name.replace("blk.0.", "blk.1."): tensor for name, tensor in others.items() if name.startswith("blk.0.")}
    return {**tiny_tensors(first), **moved}


def written(folder: Path, name: str, tensors: dict[str, RawTensor], n_head_kv: list[int], n_ff: list[int]) -> Path:
    """Write a llama of two layers with these key-value heads and widths, and return its path."""
    arrays = {"attention.head_count_kv": np.array(n_head_kv, np.int32), "feed_forward_length": np.array(n_ff, np.int32)}
    keys = {f"llama.{key}": value for key, value in arrays.items()}
    return write_gguf(folder / f"{name}.gguf", tiny_metadata(FIRST) | keys, tensors)


def test_heads_and_widths_by_layer(tmp_path: Path) -> None:
    """Logits are those of the reference, with every type of keys and values, of which each layer has its own number."""
    path = written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 2], [256, 512])
    network = read_network(read_gguf(path))
    assert [(shape.n_head_kv, shape.n_ff) for shape in network.layers] == [(4, 256), (2, 512)]
    assert kv_types.token_bytes(network, "f16") == 2 * 2 * 32 * (4 + 2)
    expected = logits(Reference(), path)
    for kv_type, bound in {"f16": 2e-4, "q8_0": 0.03, "gear": 0.3, "q4_0": 0.3}.items():
        found = logits(Cpu(), path, kv_type)
        assert np.sqrt(np.square(found - expected).mean() / expected.var()) < bound


def test_a_layer_without_one_of_its_halves(tmp_path: Path) -> None:
    """The bits are those of a half that adds zeros."""
    tensors = tensors_of(FIRST, SECOND)

    def without(*prefixes: str) -> dict[str, RawTensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}

    def zeroed(name: str) -> dict[str, RawTensor]:
        tensor = tensors[name]
        return tensors | {name: RawTensor(tensor.type, tensor.shape, bytes(len(tensor.data)))}

    halves = {
        "attention": (without("blk.1.attn_"), [4, 0], [256, 512], zeroed("blk.1.attn_output.weight")),
        "block": (without("blk.1.ffn_"), [4, 2], [256, 0], zeroed("blk.1.ffn_down.weight")),
    }
    for name, (fewer, n_head_kv, n_ff, zeros) in halves.items():
        found = written(tmp_path, name, fewer, n_head_kv, n_ff)
        expected = written(tmp_path, f"{name}-zero", zeros, [4, 2], [256, 512])
        for runtime in (Cpu(), Reference()):
            np.testing.assert_array_equal(logits(runtime, found), logits(runtime, expected))


def test_one_number_for_all_layers_is_refused_by_name(tmp_path: Path) -> None:
    """What takes only layers of one shape says what they differ in."""
    network = read_network(read_gguf(written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 2], [256, 512])))
    assert (network.n_head, network.head_dim) == (8, 32)
    with pytest.raises(UnsupportedModelError, match="differ in n_head_kv, which is from 2 to 4"):
        _ = network.n_head_kv
    with pytest.raises(UnsupportedModelError, match="differ in n_ff, which is from 256 to 512"):
        _ = network.n_ff


def test_heads_that_contradict_each_other(tmp_path: Path) -> None:
    """The message names the layer."""
    path = written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 3], [256, 512])
    with pytest.raises(ModelFormatError, match="layer 1 has 8 heads on 3 key-value heads"):
        read_network(read_gguf(path))


def test_layers_that_read_the_keys_of_others(tmp_path: Path) -> None:
    """They take no memory for keys and values, and leaving their source out leaves out their attention."""
    tiny = ARCHITECTURES["gemma4"]
    network = read_network(read_gguf(write_gguf(tmp_path / "m.gguf", tiny_metadata(tiny), tiny_tensors(tiny))))
    assert [shape.kv_from for shape in network.layers] == [0, 1, 2, 1, 1, 2]
    assert kv_types.token_bytes(network, "f16") == 2 * 2 * 2 * (64 + 64 + 128)
    source, readers = np.ones((6, 2), np.bool_), np.ones((6, 2), np.bool_)
    source[1, 0] = readers[[1, 3, 4], 0] = False
    for runtime in (Cpu(), Reference()):
        with runtime.load(tmp_path / "m.gguf", LoadOptions(n_ctx=64)) as model:
            sets = [LayerSet(*mask.T.copy()) for mask in (source, readers, np.ones((6, 2), np.bool_))]
            found = [
                model.session(64).forward(TOKENS[:9], n_past=0, layers=layers, rows="all").logits.copy()
                for layers in sets
            ]
        np.testing.assert_array_equal(found[0], found[1])
        assert (found[0] != found[2]).any()
