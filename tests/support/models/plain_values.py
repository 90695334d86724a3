"""The weights of a row of blocks, one after another, for types that the gguf package may not know."""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType

U8 = NDArray[np.uint8]
_BITS = {GGMLType.Q1_0: 1, GGMLType.Q2_0: 2}


def plain_values(kind: GGMLType, rows: U8) -> NDArray[np.float32]:
    """Return the weights of rows of blocks: those of the gguf package, or each of Q1_0 and Q2_0 by itself."""
    if kind not in _BITS:
        found: NDArray[Any] = quants.dequantize(rows, GGMLQuantizationType[kind.name])
        return found.astype(np.float32)
    bits, blocks = _BITS[kind], rows.reshape(-1, kind.block_bytes)
    weights = np.empty((len(blocks), kind.block_size), np.float32)
    for block, row in zip(blocks, weights, strict=True):
        scale = np.float32(block[:2].view("<f2")[0])
        for i in range(kind.block_size):
            code = int(block[2 + i * bits // 8]) >> i * bits % 8 & 2**bits - 1
            row[i] = scale * np.float32(code - 1 if bits == 2 else 2 * code - 1)
    return weights.reshape(len(rows), -1)
