"""The method that is chosen for a matrix is the cheapest within its bound, and its error is measured."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export import quantizing
from edgedec_export.packing.rounding import round_rows
from edgedec_export.packing.weights import Matrix, Packed, dequantize, pack_exact, unpack_bits
from edgedec_export.quantizing import ROUNDINGS, RULES, Rule, bound, choose, methods, quantize, relative_error

F32 = NDArray[np.float32]
Choice = Literal["balanced", "small"]
UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"


def model(path: Path, **tensors: RawTensor | F32) -> GGUF:
    """Write a file with these tensors, as blk.0.NAME.weight, and open it."""
    return read_gguf(
        write_gguf(path / "m.gguf", {}, {f"blk.0.{name}.weight": tensor for name, tensor in tensors.items()})
    )


def normal(n_out: int, n_in: int, seed: int = 0) -> F32:
    """Return a matrix of normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal((n_out, n_in)).astype(np.float32)


def blocks(kind: str, n_out: int = 64, n_in: int = 512) -> RawTensor:
    """Return a random matrix of a type."""
    return RawTensor(GGMLType[kind], (n_in, n_out), random_blocks(kind, n_out, n_in, np.random.default_rng(1)))


def weights_of(matrix: Matrix) -> F32:
    """Return the weights of a matrix, float32[n_out, n_in]."""
    return dequantize(matrix) if isinstance(matrix, Packed) else matrix


def plainly_rounded(weights: F32, bits: int, block: int) -> F32:
    """Round to levels that span each block's range, without fitting."""
    rows = weights.reshape(-1, block)
    if bits == 8:
        step = np.abs(rows).max(axis=1, keepdims=True) / 127
        rounded: F32 = np.rint(rows / step) * step
        return rounded.reshape(weights.shape)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    step = (high - low) / 15
    zero = np.rint(-low / step)
    rounded = (np.clip(np.rint(rows / step) + zero, 0, 15) - zero) * step
    return rounded.reshape(weights.shape)


@pytest.mark.parametrize(("bits", "block"), ROUNDINGS)
def test_fitted_scales_are_closer_than_plain_rounding(bits: int, block: int) -> None:
    """The error is below that of rounding to levels that span the range."""
    weights = normal(64, 512)
    fitted = relative_error(dequantize(round_rows(weights, bits, block)), weights)
    assert fitted < 0.99 * relative_error(plainly_rounded(weights, bits, block), weights)


@pytest.mark.parametrize(("bits", "block", "bits_per_weight"), [(4, 128, 4.28125), (4, 32, 5.125), (8, 32, 9.0)])
def test_layouts(bits: int, block: int, bits_per_weight: float) -> None:
    """Arrays have the operators' shapes."""
    packed = round_rows(normal(64, 512), bits, block)
    assert packed.shape == (64, 512)
    assert packed.data.shape == (64, 512 // block, block * bits // 8)
    assert packed.scales.shape == (64, 512 // block)
    assert packed.minimums is None
    assert (packed.zero_points is None) == (bits == 8)
    assert 8 * packed.nbytes == 64 * 512 * bits_per_weight


@pytest.mark.parametrize(("bits", "block"), ROUNDINGS)
def test_weights_on_levels_are_kept(bits: int, block: int) -> None:
    """A matrix whose blocks are integers that use all levels is unchanged."""
    lowest, highest = int(bits == 8), 2**bits - 1
    levels = np.random.default_rng(0).integers(lowest, highest + 1, (8, 4, block))
    levels[..., 0], levels[..., 1] = lowest, highest
    zero = 128 if bits == 8 else np.array([0, 3, 8, 15])[:, None]
    weights = (levels - zero).reshape(8, -1).astype(np.float32)
    np.testing.assert_allclose(dequantize(round_rows(weights, bits, block)), weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "block"), ROUNDINGS)
def test_blocks_without_a_range(bits: int, block: int) -> None:
    """Zeros stay zeros; a constant and a single weight keep their value."""
    weights = np.zeros((4, block), np.float32)
    weights[1], weights[2], weights[3, 5] = 0.3, -0.3, 1e-30
    np.testing.assert_allclose(dequantize(round_rows(weights, bits, block)), weights, rtol=1e-6, atol=0)
    assert relative_error(np.zeros(3, np.float32), np.zeros(3, np.float32)) == 0


def test_a_last_block_is_filled_up() -> None:
    """Rows of 18 in blocks of 16 have 14 zeros at the end of the second block, which are no weights."""
    weights = normal(5, 18)
    packed = round_rows(weights, 8, 16)
    assert (packed.shape, packed.n_unused, packed.data.shape) == ((5, 18), 14, (5, 2, 16))
    assert (packed.data[:, 1, 2:] == 128).all()
    assert relative_error(dequantize(packed), weights) < 1e-4


def test_zero_points_are_whole_levels() -> None:
    """A block of positive weights has the zero point 0, of negative weights 15, a symmetric one 8 or 7."""
    positive = np.linspace(0, 1, 32, dtype=np.float32)
    packed = round_rows(np.stack((positive, -positive, positive - 0.5)), 4, 32)
    assert packed.zero_points is not None
    first, second, third = unpack_bits(packed.zero_points, 4)[:, 0]
    assert (first, second) == (0, 15)
    assert third in (7, 8)


@pytest.mark.parametrize("quant", ["balanced", "small"])
def test_the_bound_of_a_tensor_follows_its_name(quant: Choice) -> None:
    """Head, embedding, attn_v and ffn_down have smaller bounds."""
    rule = RULES[quant]
    assert rule.sensitive < rule.usual
    for name in ("token_embd.weight", "output.weight", "blk.11.attn_v.weight", "blk.0.ffn_down.weight"):
        assert bound(name, quant) == rule.sensitive
    for name in ("blk.0.attn_q.weight", "blk.0.attn_output.weight", "blk.0.ffn_up.weight"):
        assert bound(name, quant) == rule.usual


@pytest.mark.parametrize(
    ("kind", "name", "balanced", "small"),
    [
        ("Q4_K", "ffn_up", "rounded minimums", "int4 by 128"),
        ("Q4_K", "ffn_down", "rounded minimums", "int4 by 128"),
        ("Q4_1", "attn_v", "rounded minimums", "int4 by 128"),
        ("Q4_0", "ffn_up", "exact", "int4 by 128"),
        ("Q5_K", "ffn_up", "int4 by 32", "int4 by 128"),
        ("Q5_0", "ffn_down", "exact", "int4 by 128"),
        ("Q6_K", "ffn_up", "int4 by 32", "int4 by 128"),
        ("Q6_K", "ffn_down", "int8 by 32", "int4 by 128"),
        ("Q8_0", "attn_v", "exact", "int4 by 128"),
        ("F16", "ffn_up", "int4 by 32", "int4 by 128"),
        ("BF16", "attn_v", "int8 by 32", "int4 by 32"),
    ],
)
def test_what_is_chosen(kind: str, name: str, balanced: str, small: str, tmp_path: Path) -> None:
    """The expected method is chosen for random matrices of each type, in sensitive places and others."""
    gguf = model(tmp_path, **{name: blocks(kind)})
    tensor = gguf.tensors[f"blk.0.{name}.weight"]
    assert (choose(gguf, tensor, "balanced")[0], choose(gguf, tensor, "small")[0]) == (balanced, small)


def test_the_lowest_price_within_the_bound_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bound or price get stricter: 4 bits in long blocks, in short ones, 8 bits, exact."""
    gguf = model(tmp_path, ffn_up=normal(64, 512))
    found = []
    for rule in (
        *(Rule(1.0, 1.0, 1.0), Rule(0.008, 1.0, 1.0), Rule(0.001, 1.0, 1.0), Rule(0.0, 1.0, 1.0)),
        *(Rule(1.0, 1.0, 0.02), Rule(1.0, 1.0, 0.003)),
    ):
        monkeypatch.setitem(RULES, "small", rule)
        method, error = choose(gguf, gguf.tensors[UP], "small")
        assert error <= rule.usual
        found.append(method)
    assert found == ["int4 by 128", "int4 by 32", "int8 by 32", "exact", "int4 by 128", "int8 by 32"]


def test_blocks_must_divide_a_row(tmp_path: Path) -> None:
    """576 is no multiple of 128, so for rows of 576 short blocks are the smallest choice."""
    assert list(methods(normal(8, 576))) == ["int4 by 32", "int8 by 32"]
    assert list(methods(normal(8, 512))) == ["int4 by 128", "int4 by 32", "int8 by 32"]


@pytest.mark.parametrize("quant", ["balanced", "small"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0"])
def test_the_error_of_the_whole_is_within_the_bound(kind: str, quant: Choice, tmp_path: Path) -> None:
    """The stored matrix has about the error of the sample, and is no larger than exact storage."""
    gguf = model(tmp_path, ffn_up=blocks(kind), ffn_down=blocks(kind))
    for name in (UP, DOWN):
        exact, stored = quantize(gguf, name, "exact"), quantize(gguf, name, quant)
        error = relative_error(weights_of(stored.matrix), weights_of(exact.matrix))
        assert error == pytest.approx(stored.error, rel=0.2)
        assert stored.error <= bound(name, quant)
        assert stored.bits_per_weight <= exact.bits_per_weight
        assert (stored.method == "exact") == (stored.error == 0)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_rounded_minimums_are_nearly_exact(kind: str, tmp_path: Path) -> None:
    """Levels and scales stay and only rests of minimums are rounded, so errors are below 1e-5."""
    gguf = model(tmp_path, ffn_up=blocks(kind))
    stored, exact = quantize(gguf, UP, "balanced"), pack_exact(gguf, UP)
    assert stored.method == "rounded minimums"
    assert 0 < stored.error < 1e-5
    assert isinstance(stored.matrix, Packed)
    assert isinstance(exact, Packed)
    np.testing.assert_array_equal(stored.matrix.data, exact.data)
    np.testing.assert_array_equal(stored.matrix.scales, exact.scales)
    assert isinstance(stored.matrix.minimums, Packed)
    assert stored.matrix.minimums.shape == (64, 16)
    assert (stored.bits_per_weight, exact.nbytes * 8 / (64 * 512)) == (5.4375, 6.125)


def test_exact_is_exact(tmp_path: Path) -> None:
    """`exact` gives what pack_exact gives, for every matrix."""
    gguf = model(tmp_path, ffn_up=blocks("Q4_K"))
    stored, packed = quantize(gguf, UP, "exact"), pack_exact(gguf, UP)
    assert (stored.method, stored.error, stored.bits_per_weight) == ("exact", 0.0, 6.125)
    assert isinstance(stored.matrix, Packed)
    assert isinstance(packed, Packed)
    np.testing.assert_array_equal(stored.matrix.data, packed.data)


def test_pieces_make_the_matrix_that_one_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is quantized in pieces of 3 rows equals one that is quantized at once."""
    gguf = model(tmp_path, ffn_up=normal(64, 512))
    whole = quantize(gguf, UP, "small").matrix
    monkeypatch.setattr(quantizing, "_PIECE_WEIGHTS", 3 * 512)
    pieces = quantize(gguf, UP, "small").matrix
    assert isinstance(whole, Packed)
    assert isinstance(pieces, Packed)
    np.testing.assert_array_equal(dequantize(pieces), dequantize(whole))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    """A matrix with NaN is refused, as its error cannot be measured; exact storage takes it."""
    weights = normal(4, 128)
    weights[1, 7] = value
    gguf = model(tmp_path, ffn_up=weights)
    with pytest.raises(ModelFormatError, match=r"tensor 'blk.0.ffn_up.weight' holds NaN or an infinity"):
        quantize(gguf, UP, "balanced")
    kept = quantize(gguf, UP, "exact").matrix
    assert not isinstance(kept, Packed)
    np.testing.assert_array_equal(kept, weights)


def test_refusals(tmp_path: Path) -> None:
    """A type without levels, and a missing matrix, are refused."""
    gguf = model(tmp_path, ffn_up=RawTensor(GGMLType.Q2_K, (256, 2), bytes(168)))
    with pytest.raises(UnsupportedModelError, match="is Q2_K"):
        quantize(gguf, UP, "small")
    with pytest.raises(ModelFormatError, match="no such tensor"):
        quantize(gguf, DOWN, "small")
