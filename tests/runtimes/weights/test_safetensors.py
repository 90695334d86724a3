"""Weights that are read: safetensors files within their bounds, and types of few bits to the last bit."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hf_checkpoints import TinyHF, safetensors_bytes, write_checkpoint
from support.models.plain_values import plain_values
from support.models.random_blocks import random_blocks

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.coded_values import VALUES
from edgedec_runtimes.weights.levels import dequantize
from edgedec_runtimes.weights.safetensors import open_checkpoint, read_header


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    """A path to another folder, a missing shard and a wrong one are refused."""
    write_checkpoint(tmp_path, TinyHF(n_files=2))
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for shard, error in (("../x.safetensors", ModelFormatError), ("x.safetensors", ModelNotFoundError)):
        index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": shard}}))
        with pytest.raises(error, match="safetensors"):
            open_checkpoint(tmp_path)
    other = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": other}}))
    with pytest.raises(ModelFormatError, match="which has no such tensor"):
        open_checkpoint(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[]", "no JSON object"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "no sound JSON"),
        (json.dumps({"a": ENTRY | {"dtype": "F31"}}).encode(), "dtype 'F31'"),
        (json.dumps({"a": ENTRY | {"shape": [-2]}}).encode(), r"the shape \[-2\]"),
        (json.dumps({"a": ENTRY | {"shape": [True]}}).encode(), "the shape"),
        (json.dumps({"a": ENTRY | {"shape": [2**62, 2**62]}}).encode(), "needs"),
        (json.dumps({"a": ENTRY | {"data_offsets": [8, 16]}}).encode(), "at 8 to 16 of 8"),
        (json.dumps({"a": ENTRY | {"data_offsets": [8, 0]}}).encode(), "needs 8 bytes"),
        (json.dumps({"a": ENTRY, "b": ENTRY}).encode(), "'a' and 'b' overlap"),
        (json.dumps({"a": {}}).encode(), "has no dtype"),
    ],
)
def test_safetensors_headers_are_checked(tmp_path: Path, header: bytes, reason: str) -> None:
    """Claims are checked against the file's size and against each other."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelFormatError, match=reason):
        read_header(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    """It is refused before that much is read; so is a file that ends within the length."""
    path = tmp_path / "m.safetensors"
    for raw in (struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 3) + b"{}", b"abc", b""):
        path.write_bytes(raw)
        with pytest.raises(ModelFormatError, match="it claims a header"):
            read_header(path)


SOUND = safetensors_bytes({"a": ("F32", [2, 2], bytes(16)), "b": ("BF16", [3], bytes(6))})


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_fuzzed_headers_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Changed, deleted and inserted bytes give an EdgedecError, or tensors within the file."""
    raw = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"9", b"-", b"1e9"])
        )
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(raw)
    try:
        tensors = read_header(path)
    except EdgedecError:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.n_bytes <= len(raw)


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.name)
def test_weights_are_those_of_other_code(kind: GGMLType) -> None:
    """Random blocks; of MXFP4 with every exponent."""
    rows = np.frombuffer(random_blocks(kind.name, 64, 1024, np.random.default_rng(1)), np.uint8).reshape(64, -1).copy()
    if kind is GGMLType.MXFP4:
        rows.reshape(-1, 17)[:, 0] = np.arange(64 * 32) % 256
    with np.errstate(over="ignore"):
        expected = plain_values(kind, rows)
    found = dequantize(kind, rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.reshape(64, 1024))


def test_a_grid_is_refused() -> None:
    """By its name, with the types that are taken apart."""
    with pytest.raises(UnsupportedModelError, match=r"the tensor type is IQ2_XS, expected one of .*IQ4_XS.*Q3_K"):
        dequantize(GGMLType.IQ2_XS, np.zeros((1, 74), np.uint8))
