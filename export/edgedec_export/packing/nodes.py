"""Nodes of an ONNX graph that compute with packed matrices.

    nodes, initializers, y = linear_nodes("blk.0.attn_q", "x", matrix)  # y = x @ matrix^T
    nodes, initializers, e = gather_nodes("token_embd", "input_ids", matrix)  # e = matrix[input_ids]

Initializers are pairs (name, array). A name always stands for the same array, so a matrix that serves as embedding and
as head has its initializers once, whichever call comes first. Only the numbers q are needed in two shapes: NAME.data
with three dimensions, for MatMulNBits, and NAME.rows with two, for GatherBlockQuantized, as neither operator takes the
other's shape. Both are views of one array and get the same offset and length in an external file, which onnxruntime
accepts; with a Reshape in place of the second initializer it would keep a copy for the look-up in memory.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto
from onnx.helper import make_node

from edgedec_export.onnx_graph.parts import CONTRIB
from edgedec_export.packing.weights import Matrix, Packed

Initializer = tuple[str, NDArray[np.generic]]
Emitted = tuple[list[NodeProto], list[Initializer], str]
"""Nodes, initializers, and the name of the output."""

INT8_INPUTS = 4
"""The accuracy_level at which MatMulNBits rounds its input to 8 bits, block by block, which is fast on a CPU."""


def linear_nodes(
    name: str,
    x: str,
    matrix: Matrix,
    *,
    accuracy_level: int = INT8_INPUTS,
    block_sums: dict[tuple[str, int], str] | None = None,
) -> Emitted:
    """Return the nodes and initializers that compute x @ matrix^T.

    Args:
        name: Prefix of the names of nodes, initializers and output; the output is NAME.y.
        x: Name of a tensor, float32[1, n, n_in] or float32[n, n_in]. The output has the same rank, or three dimensions.
        matrix: [n_out, n_in].
        accuracy_level: Attribute of MatMulNBits; 1 computes in float32.
        block_sums: Names of sums of blocks that the graph already computes, by tensor and block; this call adds those
            that it computes. Passing one dict for all matrices with the same x computes its sums once.
    """
    if not isinstance(matrix, Packed):
        return _float_nodes(name, x, matrix)
    n_out, n_in = matrix.shape
    inputs = [x, f"{name}.data", f"{name}.scales"]
    initializers: list[Initializer] = [(f"{name}.data", matrix.data), *_scales(name, matrix)]
    if matrix.zero_points is not None:
        inputs.append(f"{name}.zero_points")
    product = f"{name}.y" if matrix.minimums is None else f"{name}.product"
    options: dict[str, Any] = {
        "K": n_in,
        "N": n_out,
        "bits": matrix.bits,
        "block_size": matrix.block,
        "accuracy_level": accuracy_level,
    }
    nodes = [make_node("MatMulNBits", inputs, [product], name=name, domain=CONTRIB, **options)]
    if matrix.minimums is None:
        return nodes, initializers, product
    shared_sums = {} if block_sums is None else block_sums
    if (x, matrix.min_block) not in shared_sums:
        sum_nodes, constants, shared_sums[x, matrix.min_block] = _block_sums(name, x, n_in, matrix.min_block)
        nodes, initializers = nodes + sum_nodes, initializers + constants
    sums = shared_sums[x, matrix.min_block]
    if isinstance(matrix.minimums, Packed):
        emitted = linear_nodes(f"{name}.minimums", sums, matrix.minimums, accuracy_level=accuracy_level)
    else:
        emitted = _product(f"{name}.minimums", sums, matrix.minimums)
    share_nodes, arrays, share = emitted
    nodes += [*share_nodes, make_node("Sub", [product, share], [f"{name}.y"], name=f"{name}.y")]
    return nodes, initializers + arrays, f"{name}.y"


def _product(name: str, x: str, matrix: NDArray[np.float32]) -> Emitted:
    """Return x @ matrix^T for x of two dimensions: a Gemm, as no provider for GPUs has a FusedMatMul."""
    node = make_node("Gemm", [x, f"{name}.weight"], [f"{name}.y"], name=name, transB=1)
    return [node], [(f"{name}.weight", matrix)], f"{name}.y"


def _float_nodes(name: str, x: str, matrix: NDArray[np.float32]) -> Emitted:
    """Return x @ matrix^T for x of two or three dimensions; the output is float32[1, n, n_out]."""
    rows, rows_shape, shape = f"{name}.rows_of_x", f"shape_rows_{matrix.shape[1]}", f"shape_{matrix.shape[0]}"
    nodes = [
        make_node("Reshape", [x, rows_shape], [rows], name=rows),
        make_node("Gemm", [rows, f"{name}.weight"], [f"{name}.product"], name=name, transB=1),
        make_node("Reshape", [f"{name}.product", shape], [f"{name}.y"], name=f"{name}.y"),
    ]
    shapes = ((rows_shape, [-1, matrix.shape[1]]), (shape, [1, -1, matrix.shape[0]]))
    initializers: list[Initializer] = [(f"{name}.weight", matrix)]
    initializers += [(key, np.array(value, np.int64)) for key, value in shapes]
    return nodes, initializers, f"{name}.y"


def gather_nodes(name: str, ids: str, matrix: Matrix) -> Emitted:
    """Return the nodes and initializers that look up rows of a matrix, bit for bit as `dequantize` gives them.

    Args:
        name: Prefix of the names of nodes, initializers and output; the output is NAME.looked_up.
        ids: Name of a tensor of row numbers, int64[1, n].
        matrix: [n_out, n_in]; the output is float32[1, n, n_in].
    """
    output = f"{name}.looked_up"
    if not isinstance(matrix, Packed):
        node = make_node("Gather", [f"{name}.weight", ids], [output], name=output)
        return [node], [(f"{name}.weight", matrix)], output
    if matrix.minimums is None:
        return *_look_up(name, ids, matrix, output), output
    levels, blocks, n_in = f"{output}.levels", f"{output}.level_blocks", matrix.shape[1]
    nodes, initializers = _look_up(name, ids, matrix, levels)
    minimum_nodes, arrays, minimums = gather_nodes(f"{name}.minimums", ids, matrix.minimums)
    nodes += [
        *minimum_nodes,
        make_node("Unsqueeze", [minimums, f"{name}.axis"], [f"{minimums}.column"], name=f"{minimums}.column"),
        make_node("Reshape", [levels, f"{name}.block_shape"], [blocks], name=blocks),
        make_node("Sub", [blocks, f"{minimums}.column"], [f"{output}.blocks"], name=f"{output}.blocks"),
        make_node("Reshape", [f"{output}.blocks", f"{name}.row_shape"], [output], name=output),
    ]
    initializers += [
        *arrays,
        (f"{name}.block_shape", np.array([0, 0, n_in // matrix.min_block, matrix.min_block], np.int64)),
        (f"{name}.row_shape", np.array([0, 0, n_in], np.int64)),
        (f"{name}.axis", np.array([-1], np.int64)),
    ]
    return nodes, initializers, output


def _look_up(name: str, ids: str, matrix: Packed, output: str) -> tuple[list[NodeProto], list[Initializer]]:
    """Return what looks up rows without their minimums, without the padding of the last block."""
    n_out, n_in = matrix.shape
    inputs = [f"{name}.rows", ids, f"{name}.scales"]
    initializers: list[Initializer] = [(f"{name}.rows", matrix.data.reshape(n_out, -1)), *_scales(name, matrix)]
    if matrix.zero_points is not None:
        inputs.append(f"{name}.zero_points")
    whole = f"{name}.whole_blocks" if matrix.n_unused else output
    options: dict[str, Any] = {"bits": matrix.bits, "block_size": matrix.block, "gather_axis": 0, "quantize_axis": 1}
    nodes = [make_node("GatherBlockQuantized", inputs, [whole], name=f"{name}.look_up", domain=CONTRIB, **options)]
    if matrix.n_unused:
        bounds = ((f"{name}.first", 0), (f"{name}.end", n_in), (f"{name}.along", -1))
        initializers += [(key, np.array([value], np.int64)) for key, value in bounds]
        nodes.append(make_node("Slice", [whole, *(key for key, _ in bounds)], [output], name=output))
    return nodes, initializers


def _block_sums(name: str, x: str, n_in: int, block: int) -> Emitted:
    """Return what sums up the blocks of each row of x: float32[n, n_in / block]."""
    blocks, sums = f"{name}.blocks", f"{name}.sums"
    nodes = [
        make_node("Reshape", [x, f"{blocks}_shape"], [blocks], name=blocks),
        make_node("ReduceSum", [blocks, f"{blocks}_axis"], [sums], name=sums, keepdims=0),
    ]
    shape, axis = np.array([-1, n_in // block, block], np.int64), np.array([-1], np.int64)
    return nodes, [(f"{blocks}_shape", shape), (f"{blocks}_axis", axis)], sums


def _scales(name: str, matrix: Packed) -> list[Initializer]:
    """Return the initializers that product and look-up share in one shape: scales and zero points."""
    fields = ("scales", "zero_points")
    arrays = ((field, getattr(matrix, field)) for field in fields)
    return [(f"{name}.{field}", array) for field, array in arrays if array is not None]
