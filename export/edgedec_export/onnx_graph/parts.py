"""The pieces that ONNX graphs are put together from: nodes of one scope, and initializers that go to a file."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec.gguf.formats import DATA
from edgedec_export.onnx_graph.external_data import DataFile, Place

if TYPE_CHECKING:
    import onnx

INLINE_BYTES = 1024
"""Largest initializer that stays inside the graph."""

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
_CONTRIB_OPERATORS = frozenset({"GroupQueryAttention", "QuickGelu", "RotaryEmbedding"})


def require_onnx() -> None:
    """Import `onnx`, which writes the graph.

    Raises:
        RuntimeUnavailableError: It is not installed, or broken.
    """
    try:
        import onnx.helper  # noqa: F401  # to see whether it works
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"the export to ONNX needs the package onnx, which can't be imported ({error}); {install_command('export')}"
        ) from error


class Scope:
    """Nodes of a graph or of a branch, in order; every value is named after the scope and the node that makes it.

    Attributes:
        nodes: The nodes so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[onnx.NodeProto] = []

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.add_many(operator, inputs, [name], **attributes)[0]

    def add_many(self, operator: str, inputs: list[str], names: list[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs and return their names."""
        from onnx import helper

        outputs = [f"{self.name}/{name}" for name in names]
        domain = CONTRIB if operator in _CONTRIB_OPERATORS else ""
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs

    def output(self, value: str, name: str) -> str:
        """Give a value a name that does not begin with the scope's, such as a graph's output has."""
        from onnx import helper

        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        return name


class Initializers:
    """Constants of the outermost graph: small ones inside it, all others in its data file.

    Attributes:
        tensors: What the graph lists, in the order they came.
    """

    def __init__(self, data: DataFile) -> None:
        self._data = data
        self._places: dict[str, Place | None] = {}
        self.tensors: list[onnx.TensorProto] = []

    def add(self, name: str, array: NDArray[Any], *, same_as: str | None = None) -> str:
        """Write an array, once for a name, and return the name.

        Args:
            same_as: Name of an initializer of the same bytes: if there is one, both share their place in the file.
        """
        from onnx import TensorProto, helper

        if name in self._places:
            return name
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        place = self._places.get(same_as) if same_as is not None else None
        if array.nbytes <= INLINE_BYTES:
            tensor.raw_data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        else:
            place = place or self._data.append(array)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", DATA), ("offset", place.offset), ("length", place.n_bytes)):
                tensor.external_data.add(key=key, value=str(value))
        self._places[name] = place
        self.tensors.append(tensor)
        return name
