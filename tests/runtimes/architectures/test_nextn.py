"""Nextn layers in a file: the model without them, and the layer as a model of its own."""

from pathlib import Path

import numpy as np
import pytest
from support.heads.tiny_nextn import OWN, nextn_metadata, nextn_tensors, write_nextn
from support.models.gguf_writer import write_gguf
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.gguf.metadata import get_per_layer
from edgedec_runtimes.architectures.nextn import is_nextn_alone, nextn_layer, nextn_model, without_nextn
from edgedec_runtimes.cpu.network import read_network

TINY = Tiny("qwen3", n_layer=3, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=32)


def test_the_model_alone_is_a_model_without_nextn_layers(tmp_path: Path) -> None:
    """Its tensors and its layers are those of a file that never had nextn layers, and so are a token's bytes."""
    path, plain = write_nextn(tmp_path / "m.gguf", TINY, OWN, n_nextn=2), write_tiny(tmp_path / "plain.gguf", TINY)
    gguf, without = read_gguf(path), read_gguf(plain)
    found = without_nextn(gguf)
    assert found.tensors.keys() == without.tensors.keys()
    assert found.metadata == without.metadata
    assert without_nextn(without) is without
    assert read_network(gguf).n_layer == 3
    assert np.array_equal(layer_bytes(path).halves, layer_bytes(plain).halves)
    assert layer_bytes(path).rest == layer_bytes(plain).rest


@pytest.mark.parametrize("own", [(), OWN])
def test_the_layer_is_a_model_of_one_layer(own: tuple[str, ...], tmp_path: Path) -> None:
    """It has the layer's tensors, and the layer's own norm and matrices where there are any, else the model's."""
    gguf = read_gguf(write_nextn(tmp_path / "m.gguf", TINY, own, n_nextn=2))
    found = nextn_model(gguf)
    assert read_network(found).n_layer == 1
    of_layer = {name.removeprefix("blk.3.") for name in gguf.tensors if name.startswith("blk.3.")}
    ordinary = {name for name in of_layer if not name.startswith("nextn.")}
    assert {name for name in found.tensors if name.startswith("blk.")} == {f"blk.0.{name}" for name in ordinary}
    for short, place in zip(OWN, ("output_norm", "output", "token_embd"), strict=True):
        source = f"blk.3.nextn.{short}.weight" if own else f"{place}.weight"
        assert found.tensors[f"{place}.weight"].offset == gguf.tensors[source].offset
    name = "blk.3.attn_q.weight"
    assert found.read_tensor_bytes("blk.0.attn_q.weight") == gguf.read_tensor_bytes(name)


def test_what_the_metadata_says_by_layer_is_the_layers(tmp_path: Path) -> None:
    """An array's number for the layer stands, and the last one of an array for the model's own layers alone."""
    arrays = {
        "qwen3.feed_forward_length": np.array([1, 2, 3, 4], np.int32),
        "qwen3.attention.head_count_kv": np.array([5, 6, 7], np.int32),
        "qwen3.rope.dimension_sections": np.array([1, 2, 3, 4], np.int32),
        "qwen3.attention.recurrent_layers": np.array([True, True, False, True]),
        "qwen3.ssm.state_size": 16,
        "qwen3.leading_dense_block_count": 1,
    }
    path = write_gguf(tmp_path / "m.gguf", nextn_metadata(TINY) | arrays, nextn_tensors(TINY))
    found = nextn_model(read_gguf(path))
    values = {key: found.metadata[f"qwen3.{key}"] for key in ("full_attention_interval", "leading_dense_block_count")}
    assert values == {"full_attention_interval": 1, "leading_dense_block_count": 0}
    assert get_per_layer(found, "qwen3.feed_forward_length", 1, at_most=9) == (4,)
    assert get_per_layer(found, "qwen3.attention.head_count_kv", 1, at_most=9) == (7,)
    assert get_per_layer(found, "qwen3.attention.recurrent_layers", 1, at_most=1) == (0,)
    assert found.metadata["qwen3.rope.dimension_sections"] == read_gguf(path).metadata["qwen3.rope.dimension_sections"]


def test_where_nextn_layers_are(tmp_path: Path) -> None:
    """Beside a model, alone, or counted by the metadata and left out of the file."""
    beside = read_gguf(write_nextn(tmp_path / "beside.gguf", TINY))
    alone = read_gguf(write_nextn(tmp_path / "alone.gguf", TINY, alone=True))
    kept = {name: tensor for name, tensor in nextn_tensors(TINY).items() if not name.startswith("blk.3.")}
    counted = read_gguf(write_gguf(tmp_path / "counted.gguf", nextn_metadata(TINY), kept))
    assert [nextn_layer(gguf) for gguf in (beside, alone, counted)] == [3, 3, None]
    assert [is_nextn_alone(gguf) for gguf in (beside, alone, counted)] == [False, True, False]
    assert read_network(counted).n_layer == 3


def test_a_count_above_the_layers_is_refused(tmp_path: Path) -> None:
    """By its name, wherever it is read."""
    path = write_gguf(tmp_path / "m.gguf", nextn_metadata(TINY) | {"qwen3.nextn_predict_layers": 4}, {})
    for read in (without_nextn, nextn_layer):
        with pytest.raises(ModelFormatError, match=r"'qwen3.nextn_predict_layers' is 4, expected .* from 0 to 3"):
            read(read_gguf(path))
