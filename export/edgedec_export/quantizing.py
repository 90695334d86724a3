"""Choose how a matrix is stored, by measured error: the options `--quant exact`, `balanced` and `small`.

    quantize(gguf, "blk.0.ffn_up.weight", "balanced")  # .matrix, .method, .error

| method | bits per weight | what it does |
|---|---|---|
| exact | 5 to 32 | keeps every value (`packing`) |
| rounded minimums | 5.4 | keeps the levels of Q4_1 and Q4_K; rounds what zero points leave of minimums to 8 bits |
| int8 by 32 | 9 | rounds to 256 levels |
| int4 by 32, by 128 | 5.1, 4.3 | rounds to 16 levels |

A method's error is the sum of the squared differences from the file's weights divided by the sum of the squared
weights, over rows that are spread evenly over the matrix. What the file's own quantization lost is not part of it.
Decoding reads every weight once per token, so bits cost time as well as memory. Among the methods whose error is within
a bound, the one with the lowest price is taken: **bits * (1 + error / worth)**, where `worth` is the error that counts
as much as twice the bits. The error of exact storage is 0, so there always is such a method.

| | bound of most matrices | of head, embedding, attn_v, ffn_down | worth |
|---|---|---|---|
| balanced | 0.0075 | 0.001 | 0.01 |
| small | 0.02 | 0.009 | 0.05 |

Head, embedding, attn_v and ffn_down suffer most from rounding, which is why k-quant mixes (such as Q4_K_M) give them
more bits, too. packing/rounding.py says how weights are rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from edgedec.gguf.file import GGUF, TensorInfo
from edgedec_export.packing.rounding import round_rows
from edgedec_export.packing.rows import matrix_of, read_rows, sample_rows
from edgedec_export.packing.weights import (
    Matrix,
    Packed,
    Rows,
    assemble,
    dequantize,
    pack_exact,
    pack_levels,
    parse_rows,
    weights_of,
)
from edgedec_runtimes.weights.levels import F32, Levels

Quant = Literal["exact", "balanced", "small"]

EXACT, ROUNDED_MINIMUMS = "exact", "rounded minimums"


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the second table above: the two bounds of the error, and the error that counts as twice the bits."""

    usual: float
    sensitive: float
    worth: float


RULES = {"balanced": Rule(0.0075, 0.001, 0.01), "small": Rule(0.02, 0.009, 0.05)}
"""By the value of `quant`."""

ROUNDINGS = ((4, 128), (4, 32), (8, 32))
"""Bits and block of the methods that round weights. (With 2 bits, blocks of 16 or more have errors from 0.09 on.)"""

_SENSITIVE = ("token_embd.weight", "output.weight")
_SENSITIVE_IN_LAYERS = (".attn_v.weight", ".ffn_down.weight")
_MINIMUMS = {"bits": 8, "block": 16}
_SAMPLE_WEIGHTS, _LEAST_ROWS = 1 << 17, 16
_PIECE_WEIGHTS = 1 << 18  # fits into a processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix as it is stored.

    Attributes:
        method: A name of the first table above.
        error: Its measured error; 0 where the matrix is exact.
        bits_per_weight: Bits of storage per weight, including its share of scales, zero points and minimums.
    """

    matrix: Matrix
    method: str
    error: float
    bits_per_weight: float


def quantize(gguf: GGUF, name: str, quant: Quant) -> Quantized:
    """Return a matrix of a GGUF, stored by the method that the rule above chooses.

    The choice is deterministic. Beside the result, some millions of weights are in memory.

    Raises:
        ModelFormatError: There is no such matrix, it holds NaN or an infinity, or the file has become shorter.
        UnsupportedModelError: The export does not pack the matrix's type.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
        MemoryCapError: The system has too little memory for the result.
    """
    tensor = matrix_of(gguf, name)
    method, error = (EXACT, 0.0) if quant == "exact" else choose(gguf, tensor, quant)
    if method == EXACT:
        matrix = pack_exact(gguf, name)
    else:
        pieces = ((begin, parse_rows(gguf, tensor, rows)) for begin, rows in read_rows(gguf, tensor, _PIECE_WEIGHTS))
        matrix = assemble(tensor.shape[1], ((begin, methods(rows)[method](rows)) for begin, rows in pieces))
    return Quantized(matrix, method, error, 8 * matrix.nbytes / tensor.n_elements)


def bound(name: str, quant: Literal["balanced", "small"]) -> float:
    """Return the largest error that the rule allows for a tensor, by the tensor's name.

    >>> bound("blk.3.ffn_up.weight", "balanced"), bound("blk.3.ffn_down.weight", "balanced")
    (0.0075, 0.001)
    """
    is_sensitive = name in _SENSITIVE or name.endswith(_SENSITIVE_IN_LAYERS)
    return RULES[quant].sensitive if is_sensitive else RULES[quant].usual


def choose(gguf: GGUF, tensor: TensorInfo, quant: Literal["balanced", "small"]) -> tuple[str, float]:
    """Return the name of the method that the rule takes for a matrix, and the method's error on a sample of rows.

    Raises:
        ModelFormatError, UnsupportedModelError, ModelNotFoundError, StorageError: As `quantize`.
    """
    n_rows = max(_LEAST_ROWS, _SAMPLE_WEIGHTS // tensor.shape[0])
    sample = parse_rows(gguf, tensor, sample_rows(gguf, tensor, n_rows))
    weights = weights_of(sample)
    chosen, lowest = (EXACT, 0.0), 8 * _exact_bytes(sample) / weights.size
    for name, pack in methods(sample).items():
        packed = pack(sample)
        error = relative_error(dequantize(packed), weights)
        price = 8 * packed.nbytes / weights.size * (1 + error / RULES[quant].worth)
        if error <= bound(tensor.name, quant) and price < lowest:
            chosen, lowest = (name, error), price
    return chosen


def methods(rows: Rows) -> dict[str, Callable[[Rows], Packed]]:
    """Return by name the inexact methods that can store these rows, as functions from rows to packed rows."""
    n_in = rows.q[0].size if isinstance(rows, Levels) else rows.shape[1]
    by_name: dict[str, Callable[[Rows], Packed]] = {
        f"int{bits} by {block}": partial(_round, bits=bits, block=block)
        for bits, block in ROUNDINGS
        if n_in % block == 0
    }
    if isinstance(rows, Levels) and rows.minimums is not None:
        by_name[ROUNDED_MINIMUMS] = _round_minimums
    return by_name


def relative_error(actual: F32, expected: F32) -> float:
    """Return the sum of the squared differences divided by that of the squares; 0 where all numbers are 0."""
    total = float(np.square(expected, dtype=np.float64).sum())
    return float(np.square(actual - expected, dtype=np.float64).sum()) / total if total else 0.0


def _round(rows: Rows, *, bits: int, block: int) -> Packed:
    return round_rows(weights_of(rows), bits, block)


def _round_minimums(rows: Rows) -> Packed:
    """Pack levels exactly, but their minimums rounded to 8 bits."""
    assert isinstance(rows, Levels), "only levels have minimums"
    packed = pack_levels(rows)
    assert isinstance(packed.minimums, np.ndarray), "levels have minimums in float32"
    return replace(packed, minimums=round_rows(packed.minimums, **_MINIMUMS))


def _exact_bytes(rows: Rows) -> int:
    return pack_levels(rows).nbytes if isinstance(rows, Levels) else rows.nbytes


def bundled_text() -> str:
    """Return the text of calibration_text.txt beside this file."""
    return Path(__file__).with_name("calibration_text.txt").read_text(encoding="utf-8")
