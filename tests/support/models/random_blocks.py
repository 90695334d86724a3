"""Random matrices of any tensor type of the cpu runtime.

Quantized blocks are random bytes whose scales give the values the spread that a trained matrix of that size has.
"""

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType

# Where the float16 numbers of a block are: (offset, factor of the block's scale).
_HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1.0),),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_0": ((0, 1.0),),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "TQ1_0": ((52, 1.0),),
    "TQ2_0": ((64, 1.0),),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), ((0, 1.0),)),
    **dict.fromkeys(("Q1_0", "Q2_0"), ((0, 1.0),)),
}
# The spread of the values of a block of random bytes whose scale is 1.
_SPREADS = {
    **dict.fromkeys(("Q4_0", "Q4_1"), 4.6),
    **dict.fromkeys(("Q5_0", "Q5_1"), 9.2),
    "Q8_0": 74.0,
    "Q4_K": 260.0,
    "Q5_K": 520.0,
    "Q6_K": 1370.0,
    "Q2_K": 13.9,
    "Q3_K": 43.4,
    "IQ4_NL": 67.0,
    "IQ4_XS": 1250.0,
    "MXFP4": 5.8,
    **dict.fromkeys(("IQ3_S", "IQ3_XXS"), 141.0),
    **dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ2_XXS"), 55.0),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), 7.2),
    "TQ1_0": 0.8,
    "TQ2_0": 1.1,
    "Q1_0": 1.0,
    "Q2_0": 1.2,
}


def random_blocks(name: str, n_rows: int, n_cols: int, rng: np.random.Generator, spread: float = 1.0) -> bytes:
    """Return the bytes of a random matrix of a tensor type, its values about as far from 0 as `spread`."""
    kind = GGMLType[name]
    if name in ("F32", "F16", "BF16"):
        return _floats(name, (rng.standard_normal(n_rows * n_cols) * spread).astype(np.float32))
    n_blocks = n_rows * n_cols // kind.block_size
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)
    scale = spread / _SPREADS[name] * rng.uniform(0.5, 1.5, n_blocks)
    if name == "MXFP4":  # a power of two
        blocks[:, 0] = 128 + np.round(np.log2(scale))
    elif name == "IQ1_M":  # a float16 in four pieces
        halves = scale.astype("<f2").view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (halves >> 4 * i & 15) << 4
    else:
        for offset, factor in _HALVES[name]:
            blocks[:, offset : offset + 2] = (scale * factor).astype("<f2").view(np.uint8).reshape(n_blocks, 2)
    return blocks.tobytes()


def _floats(name: str, values: NDArray[np.float32]) -> bytes:
    if name == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if name == "F16" else "<f4").tobytes()
