"""Weights of types of few bits as floats: every bit as the gguf package, or a plain loop, has them."""

import numpy as np
import pytest
from support.models.plain_values import plain_values
from support.models.random_blocks import random_blocks

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.coded_values import VALUES
from edgedec_runtimes.weights.levels import dequantize


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
