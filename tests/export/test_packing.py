"""Packed matrices, and the graphs that compute with them, have exactly the weights of the GGUF."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks
from support.models.tiny_quantized import EXPORTED_TYPES, Tiny, tiny_metadata, tiny_tensors

from edgedec.errors import EdgedecError, MemoryCapError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec_export.packing import weights as packing
from edgedec_export.packing.rounding import round_rows
from edgedec_export.packing.weights import Matrix, Packed, assemble, dequantize, pack_bits, pack_exact, unpack_bits
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.onnx.library import load_library

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
TINY = Tiny(n_layer=1)
N_IN, N_OUT = TINY.n_embd, 260
EMBEDDING = "token_embd.weight"
WITH_MINIMUMS = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
# The bytes at which half-precision numbers are in a block: its scale, and the scale of its minimums.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def model(path: Path, kind: str, data: bytes) -> GGUF:
    """Write a tiny model with this embedding matrix, and open it."""
    matrix = RawTensor(GGMLType[kind], (N_IN, N_OUT), data)
    return read_gguf(write_gguf(path / "m.gguf", tiny_metadata(TINY), tiny_tensors(TINY) | {EMBEDDING: matrix}))


def weights(matrix: Matrix) -> F32:
    """Return the weights of a matrix, float32[n_out, n_in]."""
    return dequantize(matrix) if isinstance(matrix, Packed) else matrix


def looked_up(gguf: GGUF) -> F32:
    """Return the embedding matrix as the cpu runtime dequantizes it: hidden states that no layer has changed."""
    none = LayerSet.of(TINY.n_layer, [])
    with Cpu().load(gguf.paths[0], LoadOptions()) as loaded:
        session = loaded.session(N_OUT)
        halves = np.array_split(np.arange(N_OUT, dtype=np.int32), 2)
        rows = np.empty(0, np.int32)  # logits that are not finite would be an error
        parts = [session.forward(ids, n_past=0, layers=none, rows=rows, taps=(0,)).hidden[0].copy() for ids in halves]
        return np.concatenate(parts)


def half_bytes(values: NDArray[np.float64]) -> U8:
    """Return numbers in half precision as uint8[n, 2]."""
    with np.errstate(over="ignore"):
        return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def extreme_blocks(kind: str, rng: np.random.Generator) -> bytes:
    """Return random blocks whose scales and minimums have any size and proportion, and are sometimes 0."""
    layout = GGMLType[kind]
    blocks = rng.integers(0, 256, (N_IN * N_OUT // layout.block_size, layout.block_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        sizes = np.exp2(rng.uniform(-26, 15.9, len(blocks))) * rng.choice([-1.0, 0.0, 1.0, 1.0, 1.0], len(blocks))
        blocks[:, at : at + 2] = half_bytes(sizes)
    return blocks.tobytes()


def random_bytes(kind: str, rng: np.random.Generator) -> bytes:
    """Return blocks of random bytes, in which some scales are infinite or NaN."""
    layout = GGMLType[kind]
    n_bytes = N_OUT * N_IN // layout.block_size * layout.block_bytes
    return rng.integers(0, 256, n_bytes, dtype=np.uint8).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "data_of", "seed"),
    [
        *((kind, lambda kind, rng: random_blocks(kind, N_OUT, N_IN, rng), 1) for kind in EXPORTED_TYPES),
        *((kind, random_bytes, 2) for kind in EXPORTED_TYPES),
        *((kind, extreme_blocks, 3) for kind in EXPORTED_TYPES if kind.startswith("Q")),
    ],
)
def test_packed_weights_are_the_files(
    kind: str, data_of: Callable[[str, np.random.Generator], bytes], seed: int, tmp_path: Path
) -> None:
    """The weights are those that the cpu runtime reads, also where no zero point is near the minimums."""
    gguf = model(tmp_path, kind, data_of(kind, np.random.default_rng(seed)))
    np.testing.assert_array_equal(weights(pack_exact(gguf, EMBEDDING)), looked_up(gguf))


@pytest.mark.parametrize(
    ("kind", "bits", "block", "n_zero_points", "bits_per_weight"),
    [
        *(("Q4_0", 4, 32, 0, 5.0), ("Q4_1", 4, 32, 4, 6.125), ("Q4_K", 4, 32, 4, 6.125), ("Q8_0", 8, 32, 0, 9.0)),
        *(("Q5_0", 8, 32, 0, 9.0), ("Q5_1", 8, 32, 0, 10.0), ("Q5_K", 8, 32, 0, 10.0), ("Q6_K", 8, 16, 0, 10.0)),
    ],
)
def test_layouts(kind: str, bits: int, block: int, n_zero_points: int, bits_per_weight: float, tmp_path: Path) -> None:
    """Every type has the shapes of the operators' documentation, and the bits per weight that we state."""
    gguf = model(tmp_path, kind, random_blocks(kind, N_OUT, N_IN, np.random.default_rng(1)))
    packed = pack_exact(gguf, EMBEDDING)
    assert isinstance(packed, Packed)
    assert (packed.bits, packed.block, packed.shape) == (bits, block, (N_OUT, N_IN))
    assert packed.data.shape == (N_OUT, N_IN // block, block * bits // 8)
    assert packed.scales.shape == (N_OUT, N_IN // block)
    assert (0 if packed.zero_points is None else packed.zero_points.shape[1]) == n_zero_points
    assert (packed.minimums is None, packed.min_block) == ((kind not in WITH_MINIMUMS), 32 * (kind in WITH_MINIMUMS))
    assert 8 * packed.nbytes == N_OUT * N_IN * bits_per_weight
    if kind in WITH_MINIMUMS:  # zero points absorb what they can, so that weights are centred
        assert isinstance(packed.minimums, np.ndarray)
        near = np.abs(packed.minimums) <= np.abs(packed.scales) / 2
        assert near.mean() > 0.6  # of random 6-bit minimums and scales many are out of proportion


def test_pieces_make_the_matrix_that_one_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is packed in pieces of 7 rows equals one that is packed at once."""
    for kind in ("Q4_K", "Q6_K", "F16"):
        gguf = model(tmp_path, kind, random_blocks(kind, N_OUT, N_IN, np.random.default_rng(1)))
        whole = weights(pack_exact(gguf, EMBEDDING))
        with monkeypatch.context() as patch:
            patch.setattr(packing, "PIECE_WEIGHTS", 7 * N_IN)
            np.testing.assert_array_equal(weights(pack_exact(gguf, EMBEDDING)), whole)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bits_come_back(bits: int) -> None:
    """Unpacking gives what was packed, and zeros to the end of the last byte."""
    values = np.random.default_rng(0).integers(0, 2**bits, (3, 7), dtype=np.uint8)
    unpacked = unpack_bits(pack_bits(values, bits), bits)
    np.testing.assert_array_equal(unpacked[:, :7], values)
    assert not unpacked[:, 7:].any()


@pytest.fixture(scope="module")
def nodes() -> Any:
    """Return the module that makes nodes; tests of it are skipped where onnx is absent."""
    return pytest.importorskip("edgedec_export.packing.nodes", reason="onnx, of the extra `export`, is not installed")


def run(emitted: list[Any], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run nodes by onnxruntime and return their outputs."""
    onnx = pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")
    from onnx import TensorProto, helper, numpy_helper

    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    initializers: dict[str, NDArray[Any]] = {}
    for _, arrays, _ in emitted:
        for name, array in arrays:
            assert initializers.setdefault(name, array) is array or name.endswith(("shape", "axis"))
    graph = helper.make_graph(
        [node for nodes, _, _ in emitted for node in nodes],
        "graph",
        [helper.make_tensor_value_info(name, types[value.dtype], value.shape) for name, value in feeds.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for _, _, output in emitted],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    found = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnxruntime = load_library()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(found.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert onnx.__version__
    return list(session.run([output for _, _, output in emitted], feeds))


def random_inputs() -> F32:
    """Return float32[1, 5, N_IN]."""
    return np.random.default_rng(4).standard_normal((1, 5, N_IN)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTED_TYPES)
def test_graphs_compute_with_the_files_weights(nodes: Any, kind: str, tmp_path: Path) -> None:
    """Looked-up rows equal the weights; products in float32 are numpy's up to the order of additions."""
    gguf = model(tmp_path, kind, random_blocks(kind, N_OUT, N_IN, np.random.default_rng(5)))
    matrix, x, ids = pack_exact(gguf, EMBEDDING), random_inputs(), np.array([[0, N_OUT - 1, 7, 7]])
    emitted = [nodes.linear_nodes("t", "x", matrix, accuracy_level=1), nodes.gather_nodes("t", "ids", matrix)]
    y, rows = run(emitted, {"x": x, "ids": ids})
    np.testing.assert_array_equal(rows[0], looked_up(gguf)[ids[0]])
    expected = x.astype(np.float64) @ weights(matrix).T.astype(np.float64)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    (y_2d,) = run([nodes.linear_nodes("t", "x", matrix, accuracy_level=1)], {"x": x[0]})
    np.testing.assert_array_equal(y_2d.reshape(y[0].shape), y[0])


@pytest.mark.parametrize("n_in", [256, 512, 576])
def test_graphs_take_minimums_that_are_quantized_themselves(nodes: Any, n_in: int) -> None:
    """Blocks of minimums may be partly filled: 8, 16 and 18 minimums of a row in blocks of 16."""
    rng = np.random.default_rng(6)
    packed = round_rows(rng.standard_normal((40, n_in)).astype(np.float32), 4, 32)
    minimums = round_rows(rng.standard_normal((40, n_in // 32)).astype(np.float32), 8, 16)
    matrix = replace(packed, minimums=minimums, min_block=32)
    x, ids = rng.standard_normal((1, 3, n_in)).astype(np.float32), np.array([[39, 0, 5]])
    y, rows = run(
        [nodes.linear_nodes("t", "x", matrix, accuracy_level=1), nodes.gather_nodes("t", "ids", matrix)],
        {"x": x, "ids": ids},
    )
    np.testing.assert_array_equal(rows[0], dequantize(matrix)[ids[0]])
    expected = x.astype(np.float64) @ dequantize(matrix).T.astype(np.float64)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_rounded_inputs_cost_one_percent(nodes: Any, kind: str, tmp_path: Path) -> None:
    """With inputs in 8 bits, the default, products differ by about 0.5 % of their spread in every type."""
    gguf = model(tmp_path, kind, random_blocks(kind, N_OUT, N_IN, np.random.default_rng(5)))
    matrix, x = pack_exact(gguf, EMBEDDING), random_inputs()
    (y,) = run([nodes.linear_nodes("t", "x", matrix)], {"x": x})
    expected = x @ weights(matrix).T
    assert np.sqrt(np.square(y - expected).mean()) < 0.01 * expected.std()


def test_two_views_share_one_array(nodes: Any, tmp_path: Path) -> None:
    """The numbers for the look-up are those for the product in another shape, at the same address."""
    gguf = model(tmp_path, "Q6_K", random_blocks("Q6_K", N_OUT, N_IN, np.random.default_rng(5)))
    matrix = pack_exact(gguf, EMBEDDING)
    _, for_product, _ = nodes.linear_nodes("t", "x", matrix)
    _, for_look_up, _ = nodes.gather_nodes("t", "ids", matrix)
    data, rows = dict(for_product)["t.data"], dict(for_look_up)["t.rows"]
    assert (data.shape, rows.shape) == ((N_OUT, N_IN // 16, 16), (N_OUT, N_IN))
    assert data.ctypes.data == rows.ctypes.data


def test_sums_of_blocks_are_computed_once(nodes: Any, tmp_path: Path) -> None:
    """Matrices with a common dict share the sums of their input's blocks, and their results do not change."""
    gguf = model(tmp_path, "Q4_K", random_blocks("Q4_K", N_OUT, N_IN, np.random.default_rng(5)))
    matrix, x = pack_exact(gguf, EMBEDDING), random_inputs()
    sums: dict[tuple[str, int], str] = {}
    emitted = [nodes.linear_nodes(name, "x", matrix, block_sums=sums) for name in ("a", "b")]
    assert [[node.op_type for node in nodes] for nodes, _, _ in emitted] == [
        ["MatMulNBits", "Reshape", "ReduceSum", "Gemm", "Sub"],
        ["MatMulNBits", "Gemm", "Sub"],
    ]
    assert sums == {("x", 32): "a.sums"}
    a, b = run(emitted, {"x": x})
    (alone,) = run([nodes.linear_nodes("c", "x", matrix)], {"x": x})
    np.testing.assert_array_equal(a, alone)
    np.testing.assert_array_equal(b, alone)


NO_LAYOUT = r"tensor 'a' is Q2_K, .*Q4_K.*; export another quantization"


@pytest.mark.parametrize(
    ("tensor", "name", "error", "message"),
    [
        (RawTensor(GGMLType.Q2_K, (256, 2), bytes(168)), "a", UnsupportedModelError, NO_LAYOUT),
        (np.zeros(32, np.float32), "b", ModelFormatError, "expected a matrix 'b', found no such tensor"),
        (np.zeros(32, np.float32), "a", ModelFormatError, "expected a matrix 'a', found 1 dimensions"),
    ],
)
def test_what_can_not_be_packed_is_refused(
    tmp_path: Path, tensor: Any, name: str, error: type[EdgedecError], message: str
) -> None:
    """A type without a layout, with those that can be packed, a missing tensor and a vector."""
    with pytest.raises(error, match=message):
        pack_exact(read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": tensor})), name)


def test_a_matrix_larger_than_memory_is_refused() -> None:
    """The message says how much memory was needed."""
    piece = round_rows(np.zeros((1, 32), np.float32), 8, 32)
    with pytest.raises(MemoryCapError, match=r"the system has no .* for a packed matrix; close programs"):
        assemble(2**50, iter([(0, piece)]))


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    """A file that has become shorter since it was opened is refused, and so is a deleted one."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": np.zeros((64, 64), np.float32)})
    gguf = read_gguf(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match="tensor 'a' reaches beyond the file's end"):
        pack_exact(gguf, "a")
    path.unlink()
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        pack_exact(gguf, "a")
