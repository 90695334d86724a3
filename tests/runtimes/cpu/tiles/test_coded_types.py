"""Weights of types with codes and look-up grids, as floats: every bit as other code has them."""

from pathlib import Path

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.plain_values import plain_values
from support.models.random_blocks import random_blocks
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

CODED = (
    *("IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K", "TQ2_0", "TQ1_0", "Q2_0", "Q1_0"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
N_EMBD = 1024


@pytest.mark.parametrize("name", CODED)
def test_embeddings_are_what_other_code_makes_of_them(tmp_path: Path, name: str) -> None:
    """A forward through no layer returns rows of the embedding matrix, whose random bytes use all entries of a grid."""
    data = random_blocks(name, N_VOCAB, N_EMBD, np.random.default_rng(0))
    if name == "MXFP4":
        data = every_exponent(data)
    tiny = Tiny(n_layer=1, n_embd=N_EMBD)
    tensors = tiny_tensors(tiny) | {"token_embd.weight": RawTensor(GGMLType[name], (N_EMBD, N_VOCAB), data)}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(tiny), tensors)
    with Cpu().load(path, LoadOptions(n_ctx=N_VOCAB, max_rows=256)) as model:
        session = model.session(N_VOCAB)
        none = LayerSet.of(1, [])
        tokens = np.arange(N_VOCAB, dtype=np.int32)
        found = session.forward(tokens, n_past=0, layers=none, taps=(0,)).hidden[0].copy()
    rows = np.frombuffer(data, np.uint8).reshape(N_VOCAB, -1)
    expected = plain_values(GGMLType[name], rows)
    np.testing.assert_array_equal(found, expected.reshape(N_VOCAB, N_EMBD))


def every_exponent(data: bytes) -> bytes:
    """Return blocks of MXFP4 with all exponents that leave squares of weights below a float's limit."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 17).copy()
    blocks[:, 0] = np.arange(len(blocks)) % 180
    return blocks.tobytes()
