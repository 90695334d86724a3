"""The pieces that ONNX graphs are put together from: nodes of one scope, and initializers that go to a file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from edgedec.gguf.formats import DATA
from edgedec_export.onnx_graph.external_data import DataFile, Place

INLINE_BYTES = 1024
"""Largest initializer that stays inside the graph."""

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
_CONTRIB_OPERATORS = frozenset({"GroupQueryAttention", "QuickGelu", "RotaryEmbedding"})


class Scope:
    """Nodes of a graph or of a branch, in order; every value is named after the scope and the node that makes it.

    Attributes:
        nodes: The nodes so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.add_many(operator, inputs, [name], **attributes)[0]

    def add_many(self, operator: str, inputs: list[str], names: list[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs and return their names."""
        outputs = [f"{self.name}/{name}" for name in names]
        domain = CONTRIB if operator in _CONTRIB_OPERATORS else ""
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs

    def output(self, value: str, name: str) -> str:
        """Give a value a name that does not begin with the scope's, such as a graph's output has."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        return name


class Initializers:
    """Constants of the outermost graph: small ones inside it, all others in its data file.

    Attributes:
        tensors: What the graph lists, in the order they came.
    """

    def __init__(self, data: DataFile | None) -> None:
        """Begin without any; with no file, all of them stay inside the graph."""
        self._data = data
        self._places: dict[str, Place | None] = {}
        self.tensors: list[TensorProto] = []

    def continued_inside(self) -> "Initializers":
        """Return a copy: what is added to it stays inside the graph, and is not added here."""
        copy = Initializers(None)
        copy._places, copy.tensors = dict(self._places), list(self.tensors)
        return copy

    def add(self, name: str, array: NDArray[Any], *, same_as: str | None = None) -> str:
        """Write an array, once for a name, and return the name.

        Args:
            same_as: Name of an initializer of the same bytes: if there is one, both share their place in the file.
        """
        if name in self._places:
            return name
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        place = self._places.get(same_as) if same_as is not None else None
        if self._data is None or array.nbytes <= INLINE_BYTES:
            tensor.raw_data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        else:
            place = place or self._data.append(array)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", DATA), ("offset", place.offset), ("length", place.n_bytes)):
                tensor.external_data.add(key=key, value=str(value))
        self._places[name] = place
        self.tensors.append(tensor)
        return name
