"""ONNX of a plan for NPUs: in float, to calibrate with, or quantized, every activation between two nodes that say how.

An activation x is quantized by a QuantizeLinear and read through a DequantizeLinear; a runtime makes of such a pair and
the operator between them one integer operator (Jacob et al. 2017, arXiv:1712.05877). Matrices are int8, one scale a
column, the other constants 16 bits.

A product's sums are multiplied by input scale * weight scale / output scale, for which the hardware has 11 bits: what
is rounded there is off by up to 20 steps of the output (the same in every row, as it acts on the zero point). So scales
of 16-bit activations are powers of two, and those of weights and of keys and values are short numbers: no more is left
to round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec_export.npu_graph import KV_BITS, Op, Plan
from edgedec_runtimes.onnx_npu.facts import Quantizer, spanning

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 23, 10

# What the hardware's sigmoid returns, and a softmax of whole numbers as well.
_UNIT = Quantizer(1 / 65536, 0)
FIXED = {"Sigmoid": _UNIT, "Softmax": _UNIT}
"""Quantization of the results of some operators, whatever they were calibrated to."""


_SHORT_BITS = 8
_SCALE_BITS = 10
_COARSER = 2


class Constants(Protocol):
    """Where the constants of a graph go; every name once."""

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Store an array and return its name."""


@dataclass(frozen=True, slots=True)
class Network:
    """A plan and its weights.

    Attributes:
        plan: The operators.
        scales: f32[n_out] of each matrix, which is an initializer int8[n_in, n_out].
        vectors: f32 of each vector.
    """

    plan: Plan
    scales: Mapping[str, NDArray[np.float32]]
    vectors: Mapping[str, NDArray[np.float32]]


def quantizers(plan: Plan, ranges: Mapping[str, tuple[float, float]]) -> dict[str, Quantizer]:
    """Return how every activation and input is quantized.

    Hidden slots of all layers are ruled out by one number: so far down that every score, were it the largest there
    is, falls to the lowest end of its range.

    Args:
        plan: The operators.
        ranges: Smallest and largest value of each input but masks, and of each result that is computed rather than
            moved.
    """

    def narrow(name: str) -> Quantizer:
        return spanning(*ranges[name], KV_BITS, mantissa_bits=_SHORT_BITS)

    found = {name: spanning(*ranges[name]) for name in plan.inputs if name in ranges}
    found |= {past: narrow(name) for past, name in plan.cached.items()}
    for op in plan.ops:
        if op.same:
            found[op.output] = found[op.inputs[0]]
        elif op.operator in FIXED:
            found[op.output] = FIXED[op.operator]
        elif op.output in plan.narrow:
            found[op.output] = narrow(op.output)
        elif op.operator == "Saturate":
            limit = plan.limits[op.output]
            found[op.output] = Quantizer(limit / 2**15, 2**15)  # hardware cuts off at the range's end
        elif op.output in plan.coarse:
            lowest, highest = ranges[op.output]
            found[op.output] = spanning(_COARSER * lowest, _COARSER * highest, mantissa_bits=1)
        else:
            found[op.output] = spanning(*ranges[op.output], mantissa_bits=1)
    masked = [(found[op.inputs[0]].highest, found[op.output].lowest) for op in plan.ops if op.output in plan.masked]
    drop = max(highest - lowest for highest, lowest in masked)
    return found | {name: spanning(-drop, 0.0) for name in plan.inputs if name.startswith("mask")}


def emit(network: Network, constants: Constants, how: Mapping[str, Quantizer] | None) -> "onnx.ModelProto":
    """Return the graph, without the constants that `constants` kept elsewhere.

    Args:
        network: The plan and its weights.
        constants: Takes scales, vectors and sizes; the caller adds them to the graph.
        how: Quantization of every activation; None for a graph in float, whose results are all outputs.
    """
    from onnx import helper

    writer = _Writer(network, constants, how)
    writer.constants_of_plan()
    for op in network.plan.ops:
        writer.operator(op)
    graph = helper.make_graph(writer.nodes, "decoder", writer.inputs(), writer.outputs())
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, producer_name="edgedec", opset_imports=opsets, ir_version=IR_VERSION)


class _Writer:
    """Nodes of a graph as they come.

    Attributes:
        nodes: The nodes so far.
    """

    def __init__(self, network: Network, constants: Constants, how: Mapping[str, Quantizer] | None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._network = network
        self._constants = constants
        self._how = how
        self._readable: dict[str, str] = {}

    def constants_of_plan(self) -> None:
        """Store sizes and scales, and make matrices and vectors readable."""
        for name, numbers in self._network.plan.constants.items():
            self._readable[name] = self._constants.add(name, numbers)
        for name, values in self._network.vectors.items():
            self._readable[name] = self._vector(name, values)
        for name, scales in self._network.scales.items():
            scale = self._constants.add(f"{name}/scales", _short(scales))
            self._readable[name] = self._node("DequantizeLinear", [name, scale], f"{name}/values", axis=1)

    def operator(self, op: Op) -> None:
        """Add an operator and the quantization of its result."""
        inputs = [self._read(name) for name in op.inputs]
        if self._how is None:
            self._float_operator(op, inputs)
            return
        result = inputs[0]
        if op.operator == "Saturate":
            result = self._node("Clip", [*inputs, *self._limits(op)], f"{op.output}/float")
        elif op.operator != "Recast":
            result = self._node(op.operator, inputs, f"{op.output}/float", **op.attributes)
        self._node("QuantizeLinear", [result, *self._parameters(self._how[op.output])], op.output)

    def _float_operator(self, op: Op, inputs: list[str]) -> None:
        """Add an operator, with what only quantization does spelled out."""
        if op.operator == "Recast":
            self._node("Identity", inputs, op.output)
        elif op.operator == "Saturate":
            self._node("Clip", [*inputs, *self._limits(op)], op.output)
        else:
            self._node(op.operator, inputs, op.output, **op.attributes)

    def _limits(self, op: Op) -> list[str]:
        limit = self._network.plan.limits[op.output]
        return [self._constants.add(f"limit/{end!r}", np.array(end, np.float32)) for end in (-limit, limit)]

    def inputs(self) -> list["onnx.ValueInfoProto"]:
        """Return the graph's inputs; all of them are quantized but the numbers of rows."""
        from onnx import TensorProto, helper

        plan = self._network.plan
        found = [helper.make_tensor_value_info(name, self._type(name), shape) for name, shape in plan.inputs.items()]
        return [*found, helper.make_tensor_value_info("logit_rows", TensorProto.INT32, ["logit_rows"])]

    def outputs(self) -> list["onnx.ValueInfoProto"]:
        """Return the graph's outputs; in a float graph, every result that has a range of its own."""
        from onnx import TensorProto, helper

        plan = self._network.plan
        found = [helper.make_tensor_value_info(name, self._type(name), shape) for name, shape in plan.outputs.items()]
        if self._how is None:
            own = (op.output for op in plan.ops if not op.same and op.output not in plan.outputs)
            found += [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in own]
        return found

    def _type(self, name: str) -> int:
        from onnx import TensorProto

        if self._how is None:
            return int(TensorProto.FLOAT)
        return int(TensorProto.UINT8 if self._how[name].bits == 8 else TensorProto.UINT16)

    def _read(self, name: str) -> str:
        """Return the name under which an operator reads a value."""
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
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


def _short(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the nearest numbers of 10 bits: weights change by a 2,000th at most, less than they were rounded by."""
    mantissas, exponents = np.frexp(scales)
    short: NDArray[np.float32] = np.ldexp(np.rint(mantissas * 2**_SCALE_BITS) / 2**_SCALE_BITS, exponents)
    return short.astype(np.float32)
