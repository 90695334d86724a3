"""Make ONNX of a plan for NPUs: a float graph for calibration, or a quantized one with QuantizeLinear nodes.

An activation x is quantized by a QuantizeLinear node and read through a DequantizeLinear node; a runtime turns such
pairs and the operator between them into one integer operator (Jacob et al. 2017, arXiv:1712.05877). Matrices are int8
with one scale per column; the other constants have 16 bits.

The hardware multiplies the sums of a product by input scale * weight scale / output scale, for which it has 11 bits.
Rounding that factor is off by up to 20 steps of the output (the same in every row, as it acts on the zero point). So
scales of activations are powers of two and those of weights are short numbers, and nothing is left to round. Zero
points of 16 bits are multiples of 256, as the hardware adds up upper and lower halves of an activation apart and
truncates the sum of the lower ones: with another zero point a row of zeros would not give zeros.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from edgedec_export.npu.graph import Op, Plan
from edgedec_export.npu.weights import Weights
from edgedec_export.onnx_graph.parts import Initializers
from edgedec_runtimes.npu.facts import LOW_ZERO, Quantizer, spanning

OPSET, IR_VERSION = 23, 10

# The quantization in which the hardware returns a sigmoid, and a softmax too.
_UNIT = Quantizer(1 / 65536, 0)
FIXED = {"Sigmoid": _UNIT, "Softmax": _UNIT}
"""By operator, the quantization of its result where the hardware fixes it, whatever calibration saw."""


_SCALE_BITS = 10
_FINER = 8
_HALF = 256


def quantizers(plan: Plan, weights: Weights, ranges: Mapping[str, tuple[float, float]]) -> dict[str, Quantizer]:
    """Return how every activation and every input is quantized.

    One number hides the empty slots in all layers: it is so low that every score, even the largest possible one, falls
    to the lowest end of its range.

    Args:
        plan: The operators.
        weights: Holds the matrices' scales.
        ranges: Smallest and largest value of each input except masks, and of each result that is computed, not moved.
    """
    by_name = {name: spanning(*ranges[name]) for name in plan.inputs if name in ranges}
    readers = {source: past for past, (_, source) in plan.derived.items() if past in plan.inputs}
    for op in plan.ops:
        if op.output in plan.derived:
            relation, other = plan.derived[op.output]
            by_name[op.output] = _derived(relation, by_name[other])
        elif op.same:
            by_name[op.output] = by_name[op.inputs[0]]
        elif op.operator in FIXED:
            by_name[op.output] = FIXED[op.operator]
        elif op.output in plan.limits:
            by_name[op.output] = Quantizer(plan.limits[op.output] / 2**15, 2**15)  # clipped at the end of the range
        else:
            least = _least_step(op, by_name, weights) if op.output in plan.coarse else 0.0
            by_name[op.output] = exact(*ranges[op.output], least)
        if op.output in readers:
            by_name[readers[op.output]] = by_name[op.output]
    masked = [(by_name[op.inputs[0]].highest, by_name[op.output].lowest) for op in plan.ops if op.output in plan.masked]
    drop = max(highest - lowest for highest, lowest in masked)
    return by_name | {name: spanning(-drop, 0.0) for name in plan.inputs if name.startswith("mask")}


def _derived(relation: str, other: Quantizer) -> Quantizer:
    """Return the quantizer of an activation that stands in a relation of `Plan.derived` to one of 16 bits."""
    if relation == "high":
        return Quantizer(other.scale * _HALF, other.zero_point // _HALF, 8)
    if relation == "low":
        return Quantizer(other.scale, LOW_ZERO, 8)
    return Quantizer(other.scale / _FINER, 2**15) if relation == "finer" else other  # of both signs


def _least_step(op: Op, by_name: Mapping[str, Quantizer], weights: Weights) -> float:
    """Return a step that hides what the hardware makes of 0: half a step of rounding, or a truncated sum."""
    first, second = op.inputs
    if op.operator == "MatMul":
        return 3 * _HALF * by_name[first].scale * float(weights.scales[second].max())
    return 2 * by_name[first].scale


def exact(lowest: float, highest: float, least: float = 0.0) -> Quantizer:
    """Return a quantizer for a range, with a power of two from `least` on as scale and a multiple of 256 as zero point.

    >>> exact(-100.0, 200.0)
    Quantizer(scale=0.0078125, zero_point=12800, bits=16)
    >>> exact(-100.0, 200.0, 0.125)
    Quantizer(scale=0.125, zero_point=1024, bits=16)
    """
    quantizer = spanning(lowest, highest, mantissa_bits=1)
    while True:
        up = replace(quantizer, zero_point=-(-quantizer.zero_point // _HALF) * _HALF)
        if up.highest >= max(highest, 0.0) and up.scale >= least:
            return up
        quantizer = replace(quantizer, scale=2 * quantizer.scale, zero_point=-(-quantizer.zero_point // 2))


def emit(plan: Plan, weights: Weights, constants: Initializers, how: Mapping[str, Quantizer] | None) -> ModelProto:
    """Return the graph of a plan, with all of `constants` as initializers.

    Args:
        plan: The operators.
        weights: Scales of the matrices, and the vectors.
        constants: Holds the matrices' data; scales, vectors and sizes are added to it.
        how: The quantization of every activation; None for a float graph, of which all results are outputs.
    """
    writer = _Writer(plan, weights, constants, how)
    writer.constants_of_plan()
    for op in plan.ops:
        writer.operator(op)
    graph = helper.make_graph(writer.nodes, "decoder", writer.inputs(), writer.outputs())
    graph.initializer.extend(constants.tensors)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, producer_name="edgedec", opset_imports=opsets, ir_version=IR_VERSION)


class _Writer:
    """The nodes of a graph, added one by one."""

    def __init__(
        self, plan: Plan, weights: Weights, constants: Initializers, how: Mapping[str, Quantizer] | None
    ) -> None:
        self.nodes: list[NodeProto] = []
        self._plan = plan
        self._weights = weights
        self._constants = constants
        self._how = how
        self._readable: dict[str, str] = {}

    def constants_of_plan(self) -> None:
        """Add sizes and scales, and the nodes through which matrices and vectors are read."""
        for name, numbers in self._plan.constants.items():
            self._readable[name] = self._constants.add(name, numbers)
        for name, values in self._weights.vectors.items():
            self._readable[name] = self._vector(name, values)
        for name, scales in self._weights.scales.items():
            scale = self._constants.add(f"{name}/scales", _short(scales))
            self._readable[name] = self._node("DequantizeLinear", [name, scale], f"{name}/values", axis=1)

    def operator(self, op: Op) -> None:
        """Add an operator and the quantization of its result."""
        inputs = [self._read(name) for name in op.inputs]
        if self._how is None:
            self._float_operator(op, inputs)
            return
        result = inputs[0]
        if op.operator != "Recast":
            result = self._node(op.operator, inputs, f"{op.output}/float", **op.attributes)
        self._node("QuantizeLinear", [result, *self._parameters(self._how[op.output])], op.output)

    def _float_operator(self, op: Op, inputs: list[str]) -> None:
        """Add an operator to a float graph; what quantization would clip is clipped by a node."""
        operator, limit = op.operator, self._plan.limits.get(op.output)
        if operator == "Recast":
            operator = "Identity"
        if limit is not None:
            ends = [self._constants.add(f"limit/{end!r}", np.array(end, np.float32)) for end in (-limit, limit)]
            inputs, operator = [self._node(operator, inputs, f"{op.output}/whole"), *ends], "Clip"
        self._node(operator, inputs, op.output, **op.attributes)

    def inputs(self) -> list[ValueInfoProto]:
        """Return the graph's inputs; all are quantized except the numbers of rows."""
        plan = self._plan
        infos = [helper.make_tensor_value_info(name, self._type(name), shape) for name, shape in plan.inputs.items()]
        return [*infos, helper.make_tensor_value_info("logit_rows", TensorProto.INT32, ["logit_rows"])]

    def outputs(self) -> list[ValueInfoProto]:
        """Return the graph's outputs; of a float graph, also every result that has a range of its own."""
        plan = self._plan
        infos = [helper.make_tensor_value_info(name, self._type(name), shape) for name, shape in plan.outputs.items()]
        if self._how is None:
            names = (op.output for op in plan.ops if not op.same and op.output not in plan.outputs)
            infos += [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        return infos

    def _type(self, name: str) -> int:
        if self._how is None:
            return int(TensorProto.FLOAT)
        return int(TensorProto.UINT8 if self._how[name].bits == 8 else TensorProto.UINT16)

    def _read(self, name: str) -> str:
        """Return the name under which operators read a value."""
        if self._how is None or name not in self._how:
            return self._readable.get(name, name)
        if name not in self._readable:
            parameters = self._parameters(self._how[name])
            self._readable[name] = self._node("DequantizeLinear", [name, *parameters], f"{name}/read")
        return self._readable[name]

    def _vector(self, name: str, values: NDArray[np.float32]) -> str:
        if self._how is None:
            return self._constants.add(name, values)
        how = spanning(float(values.min()), float(values.max()))
        stored = self._constants.add(name, how.quantize(values))
        return self._node("DequantizeLinear", [stored, *self._parameters(how)], f"{name}/values")

    def _parameters(self, how: Quantizer) -> list[str]:
        scale, zero = np.float32(how.scale), np.array(how.zero_point, how.dtype)
        return [
            self._constants.add(f"scale/{scale!s}", np.array(scale, np.float32)),
            self._constants.add(f"zero/{how.bits}/{how.zero_point}", zero),
        ]

    def _node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


def _short(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the nearest numbers of 10 bits. Weights change by at most a 2,000th, less than by their rounding."""
    mantissas, exponents = np.frexp(scales)
    short: NDArray[np.float32] = np.ldexp(np.rint(mantissas * 2**_SCALE_BITS) / 2**_SCALE_BITS, exponents)
    return short.astype(np.float32)
