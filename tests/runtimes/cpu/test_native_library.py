"""The native library by itself: the tables that Python shares with it, and its operations on a row of logits."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgedec.errors import RuntimeUnavailableError
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec.sampling import Noise, SamplingParams, distribution, draw, gumbel
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.cpu import library
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.logit_ops import NativeRowOps
from edgedec_runtimes.cpu.native_tables import NAMES, NUMBERS, STRUCTURES, header


def test_the_library_was_compiled_with_these_tables() -> None:
    """Sizes and names; the first of a table is 0."""
    library.compare(library.native())
    assert all(NUMBERS[names[0]] == 0 for names in NAMES.values())
    assert len(NUMBERS) == sum(map(len, NAMES.values())) + 10


def test_a_library_of_other_structures_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field too many in Python, and names in another order."""
    native = library.native()

    class Longer(ctypes.Structure):
        _fields_ = (("item", library.Item), ("more", ctypes.c_int32))

    with monkeypatch.context() as patch:
        patch.setitem(library.STRUCTURES, "ec_item", Longer)
        with pytest.raises(RuntimeUnavailableError, match=r"ec_item with \d+ bytes, expected"):
            library.compare(native)
    monkeypatch.setattr(library, "VERSION", 1)
    with pytest.raises(RuntimeUnavailableError, match=r"has interface \d+, expected 1;"):
        library.compare(native)


def test_every_declared_function_is_declared_to_ctypes() -> None:
    """Results and arguments of a few of them, with pointers, texts and numbers; one that is missing has its name."""
    native = library.native()
    assert native.ec_forward.argtypes == [*(ctypes.c_void_p,) * 2, ctypes.c_int32, *(ctypes.c_void_p,) * 3]
    assert native.ec_row_nucleus.argtypes[2:4] == [ctypes.c_int64, ctypes.c_double]
    assert (native.ec_last_error.restype, native.ec_model_destroy.restype) == (ctypes.c_char_p, None)
    with pytest.raises(RuntimeUnavailableError, match="has no ec_unheard_of"):
        library.declare(native, "EC_API int32_t ec_unheard_of(void);")


def test_a_switch_is_a_field_of_that_name() -> None:
    """So a new one is written in Switches, in ec_config and where it acts."""
    names = {declared.rsplit(" ", 1)[-1] for declared in STRUCTURES["ec_config"]}
    ours = {"rope", "rope_sliding", "sliding", "unrotated", "convolution_length", "recurrence"}  # of layers, or tensors
    assert set(Switches.__dataclass_fields__) - ours <= names
    assert "early_router;" in header()


OPS = {name: NativeRowOps(name.encode()) for name in instruction_sets()}
ROWS = st.tuples(st.integers(1, 2000), st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]), st.integers(0, 2**32 - 1))


def make(n: int, scale: float, seed: int) -> NDArray[np.float32]:
    """Return n logits of that spread, a few of them equal."""
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(n) * scale).astype(np.float32)
    return np.where(rng.random(n) < 0.2, np.round(row), row).astype(np.float32)


@pytest.fixture(params=list(OPS))
def ops(request: pytest.FixtureRequest) -> NativeRowOps:
    """The operations of one instruction set."""
    return OPS[request.param]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from(list(OPS)), st.integers(0, 2**32 - 1))
def test_tokens_are_those_that_numpy_finds(of: tuple[int, float, int], name: str, seed: int) -> None:
    """Top-k and thresholds exactly, ties included; log-sum-exp to float's rounding."""
    row, found = make(*of), OPS[name]
    k = seed % len(row) + 1
    assert found.top_k(row, k).tolist() == NUMPY_ROW_OPS.top_k(row, k).tolist()
    assert found.top_k(row, min(k, 5)).tolist() == NUMPY_ROW_OPS.top_k(row, min(k, 5)).tolist()
    threshold = float(row[seed % len(row)])
    assert found.above(row, threshold).tolist() == NUMPY_ROW_OPS.above(row, threshold).tolist()
    assert found.argmax(row) == int(row.argmax())
    total, expected = found.total(row), NUMPY_ROW_OPS.total(row)
    assert total.most == expected.most
    assert total.weight == pytest.approx(expected.weight, rel=1e-5)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from(list(OPS)), st.floats(0.001, 0.999))
def test_the_nucleus_is_numpys_but_for_rounding(of: tuple[int, float, int], name: str, top_p: float) -> None:
    """Where the sum passes top-p by more than rounding, the sets are equal; else they differ by one token."""
    row = make(*of)
    found, expected = OPS[name].nucleus(row, top_p), NUMPY_ROW_OPS.nucleus(row, top_p)
    assert found.tolist() == sorted(found.tolist())
    if found.tolist() != expected.tolist():
        few, many = sorted((set(found.tolist()), set(expected.tolist())), key=len)
        weights = np.exp(row.astype(np.float64) - float(row.max()))
        assert few < many
        assert weights[list(few)].sum() == pytest.approx(top_p * weights.sum(), rel=1e-5)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ROWS, st.sampled_from(list(OPS)), st.integers(0, 2**64 - 1), st.sampled_from([0.05, 0.7, 1.0, 3.0]))
def test_the_token_drawn_is_among_the_contenders(
    of: tuple[int, float, int], name: str, key: int, temperature: float
) -> None:
    """Few rows of few tokens apart, they are a small part of the vocabulary."""
    row = make(*of)
    found = OPS[name].contenders(row, temperature, key)
    keys = row.astype(np.float64) / temperature + gumbel(key, np.arange(len(row)))
    assert int(keys.argmax()) in found.tolist()
    assert found.tolist() == sorted(set(found.tolist()))
    assert len(found) <= 256 + len(row) // 4  # the first block passes whole where its best is not known yet


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1, "top_p": 1},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 40},
        {"temperature": 1, "top_p": 1, "min_p": 0.05},
        {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "logit_bias": {3: -float("inf"), 5: 2.0}},
        {"temperature": 1, "top_p": 1, "repetition_penalty": 1.3},
    ],
)
def test_draws_are_those_of_the_whole_distribution(ops: NativeRowOps, options: dict[str, float]) -> None:
    """For 300 positions: the token is the one that the plain definition gives."""
    params, noise, seen = SamplingParams(**options), Noise(11), [1, 2, 3]  # type: ignore[arg-type]
    ids_of_all = np.arange(3000)
    for position in range(300):
        row = make(3000, 3.0, position)
        dist = distribution(row, params, seen)
        keys = np.full(3000, -np.inf)
        keys[dist.token_ids] = np.log(dist.probs) + noise.gumbel(position, ids_of_all)[dist.token_ids]
        assert draw(row, params, seen, noise, position, ops) == int(keys.argmax())


def test_rows_that_hold_no_numbers_are_told(ops: NativeRowOps) -> None:
    """A sum over them is no number, and no nucleus is made of them."""
    for wrong in (np.nan, np.inf, -np.inf):
        row = make(700, 1.0, 1)
        row[600] = wrong
        assert np.isnan(ops.total(row).weight)
    row[600] = -np.inf  # as a logit bias leaves it
    assert ops.nucleus(row, 0.9).tolist() == NUMPY_ROW_OPS.nucleus(row, 0.9).tolist()


def test_other_rows_and_instruction_sets_are_refused(ops: NativeRowOps) -> None:
    """Nothing but float32 without gaps is read."""
    with pytest.raises(TypeError, match="float64"):
        ops.total(np.zeros(10))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strides"):
        ops.total(np.zeros((10, 2), np.float32)[:, 0])
    with pytest.raises(RuntimeUnavailableError, match="altivec"):
        NativeRowOps(b"altivec")
