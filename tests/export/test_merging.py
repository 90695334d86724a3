"""Adapters that are merged into the weights of a GGUF: as numpy merges them, rounded to the type of each matrix."""

from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_adapters import matrix, merged, tiny_adapter
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import ModelFormatError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.to_gguf import export_gguf

pytestmark = pytest.mark.slow


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """Two adapters, F32 and F16 matrices: the bits of a sum in float64; all other tensors and keys stay."""
    base = tiny_llama(tmp_path / "base.gguf")
    a, b = (
        tiny_adapter(tmp_path / "a.gguf", base),
        tiny_adapter(tmp_path / "b.gguf", base, seed=1, matrices=("attn_q",)),
    )
    made = export_gguf(base, tmp_path / "made.gguf", lora=[(a, 0.5), (b, -1.0)])
    expected = merged(tmp_path / "expected.gguf", base, [(a, 0.5), (b, -1.0)])
    found, wanted = read_gguf(made), read_gguf(expected)
    assert found.metadata == wanted.metadata
    assert list(found.tensors) == list(wanted.tensors)
    for name in found.tensors:
        np.testing.assert_array_equal(matrix(made, name), matrix(expected, name))


@pytest.mark.parametrize(("kind", "becomes"), [("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_K", "F16")])
def test_the_types_of_changed_matrices(kind: str, becomes: str, tmp_path: Path) -> None:
    """Floats and Q8_0 stay, other types become F16; what no adapter changes has its bytes."""
    base = write_tiny(tmp_path / "base.gguf", Tiny(types=(kind,), n_layer=1))
    adapter = tiny_adapter(tmp_path / "a.gguf", base, matrices=("ffn_up",))
    made = export_gguf(base, tmp_path / "made.gguf", lora=[(adapter, 1.0)])
    expected = merged(tmp_path / "expected.gguf", base, [(adapter, 1.0)])
    old, new = read_gguf(base), read_gguf(made)
    assert new.tensors["blk.0.ffn_up.weight"].type is GGMLType[becomes]
    assert ("general.file_type" in new.metadata) == (kind == becomes and "general.file_type" in old.metadata)
    name = "blk.0.ffn_up.weight"
    np.testing.assert_allclose(matrix(made, name), matrix(expected, name), rtol=0, atol=0.02)
    for name in set(old.tensors) - {"blk.0.ffn_up.weight"}:
        assert new.read_tensor_bytes(name) == old.read_tensor_bytes(name)


def test_what_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    """An adapter of another model is refused, and nothing is written."""
    base = tiny_llama(tmp_path / "base.gguf")
    other = tiny_llama(tmp_path / "other.gguf", n_ff=96)
    with pytest.raises(ModelFormatError, match="ffn_gate"):
        export_gguf(base, tmp_path / "made.gguf", lora=[(tiny_adapter(tmp_path / "a.gguf", other), 1.0)])
    with pytest.raises(RequestError, match="expected a type, layers, adapters"):
        export_gguf(base, tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()
