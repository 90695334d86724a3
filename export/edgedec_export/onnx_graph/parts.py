"""The building blocks of ONNX graphs: nodes with names, and initializers that go to a data file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from edgedec.gguf.file import DATA
from edgedec_export.onnx_graph.external_data import DataFile, DataPlace

INLINE_BYTES = 1024
"""Largest initializer, in bytes, that is stored in the graph."""

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
_CONTRIB_OPERATORS = frozenset({"GroupQueryAttention", "QuickGelu", "RotaryEmbedding"})


class Scope:
    """The nodes of a graph or of a branch, in order. A value's name is the scope's name and that of its node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        return self.add_many(operator, inputs, [name], **attributes)[0]

    def add_many(self, operator: str, inputs: list[str], names: list[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs, and return their names."""
        outputs = [f"{self.name}/{name}" for name in names]
        domain = CONTRIB if operator in _CONTRIB_OPERATORS else ""
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs

    def output(self, value: str, name: str) -> str:
        """Give a value another name, without the scope's: that of an output of the graph. Return the name."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        return name


class Initializers:
    """The constants of the outermost graph: small ones are stored in the graph, all others in its data file.

    Attributes:
        tensors: The graph's list of initializers, in the order in which they were added.
    """

    def __init__(self, data: DataFile | None) -> None:
        """Start with none. Without a data file, all constants are stored in the graph."""
        self._data = data
        self._places: dict[str, DataPlace | None] = {}
        self.tensors: list[TensorProto] = []

    def continued_inside(self) -> "Initializers":
        """Return a copy; what is added to the copy is stored in its graph, and not here."""
        copy = Initializers(None)
        copy._places, copy.tensors = dict(self._places), list(self.tensors)
        return copy

    def add(self, name: str, array: NDArray[Any], *, same_as: str | None = None) -> str:
        """Store an array under a name, unless the name is taken already, and return the name.

        Args:
            same_as: Name of an initializer with the same bytes: where it exists, both share one place in the file.
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
