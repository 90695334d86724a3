"""Q4_0 with a searched scale: the format is ggml's, and the error is smaller than that of ggml's own rounding."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.block_types import BLOCK_ENCODERS, quantize_q4_0
from edgedec_runtimes.weights.levels import dequantize


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_the_error_is_smaller_than_ggmls(heavy_tails: bool) -> None:
    """On weights like a trained matrix's, at least a twentieth of the squared error goes; no block gets worse."""
    rng = np.random.default_rng(1)
    shape = (40, 256)
    weights = (rng.standard_t(4, shape) if heavy_tails else rng.standard_normal(shape)).astype(np.float32)
    ours = quants.dequantize(quantize_q4_0(weights).reshape(40, -1), GGMLQuantizationType.Q4_0)
    raw = quants.quantize(weights, GGMLQuantizationType.Q4_0)
    theirs = quants.dequantize(raw, GGMLQuantizationType.Q4_0)
    of_ours = np.square(ours - weights).reshape(-1, 32).sum(axis=1)
    of_theirs = np.square(theirs - weights).reshape(-1, 32).sum(axis=1)
    assert of_ours.sum() < 0.95 * of_theirs.sum()
    assert (of_ours <= of_theirs * 1.0001).all()


def test_blocks_are_read_as_they_were_meant() -> None:
    """Our own dequantizing and gguf-py's agree; a block of zeros stays zero, and levels come back exactly."""
    levels = np.arange(-8, 8, dtype=np.float32).repeat(2).reshape(1, 32) * np.float32(0.25)
    weights = np.concatenate((levels, np.zeros((1, 32), np.float32), -levels[:, ::-1] * 3))
    raw = quantize_q4_0(weights)
    found = dequantize(GGMLType.Q4_0, raw)
    assert (found == quants.dequantize(raw, GGMLQuantizationType.Q4_0)).all()
    assert (found[:2] == weights[:2]).all()


def test_numbers_that_no_scale_holds_are_refused() -> None:
    """NaN, and numbers beyond float16's range."""
    for wrong in (np.nan, np.inf, 1e9):
        weights = np.ones((1, 32), np.float32)
        weights[0, 3] = wrong
        with pytest.raises(UnsupportedModelError, match="NaN or numbers beyond"):
            BLOCK_ENCODERS[GGMLType.Q4_0](weights)
