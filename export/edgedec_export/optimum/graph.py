"""Rewrite a graph that optimum made to the form of our exports: model.onnx, and one file with all its weights.

Weights in external files are copied one at a time; a graph that contains its weights, up to 2 GB, is read as a whole. A
graph that our runtime could not run is refused.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx import GraphProto, TensorProto, ValueInfoProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import DATA, GRAPH
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.parts import Initializers
from edgedec_runtimes.onnx.foreign.contract import Contract, Port, read_contract
from edgedec_runtimes.onnx.graph_check import check_graph


def rewrite_graph(
    source: Path, folder: Path, *, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> tuple[Contract, str]:
    """Write model.onnx and model.onnx.data into a folder; return the graph's sizes and the data's SHA-256 (hex).

    Args:
        source: The graph; files with its external data are beside it.

    Raises:
        UnsupportedModelError: Inputs and outputs are not those of a decoder with a KV cache, or a tensor holds no
            numbers.
        ModelFormatError: The graph is missing or damaged.
        CancelledError: `cancel` was cancelled.
    """
    try:
        model = onnx.load(source, load_external_data=False)
    except (DecodeError, FileNotFoundError) as error:
        raise ModelFormatError(
            f"{source.name}: optimum wrote no readable graph ({error}); export the model again"
        ) from error
    contract = read_contract(_ports(model.graph.input), _ports(model.graph.output))
    for tensor in _attribute_tensors(model.graph):
        if uses_external_data(tensor):  # ONNX Runtime reads only initializers from files
            load_external_data_for_tensor(tensor, str(source.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    tensors = list(model.graph.initializer)
    del model.graph.initializer[:]
    with DataFile(folder / DATA) as data:
        initializers = Initializers(data)
        for i, tensor in enumerate(tensors):
            check_cancelled(cancel, "writing the weights")
            _move(tensor, source.parent, initializers)
            report_progress(on_progress, "write", i + 1, len(tensors), "tensors", DATA)
    model.graph.initializer.extend(initializers.tensors)
    content = model.SerializeToString(deterministic=True)
    check_graph(content, {DATA: data.n_bytes})
    (folder / GRAPH).write_bytes(content)
    return contract, data.sha256


def _move(tensor: TensorProto, folder: Path, initializers: Initializers) -> None:
    """Add a tensor to the initializers. What is read belongs to a copy of it, and is freed with the copy."""
    one = TensorProto()
    one.CopyFrom(tensor)
    array = numpy_helper.to_array(one, str(folder))
    if array.dtype.kind not in "biuf":
        raise UnsupportedModelError(
            f"tensor {tensor.name[:80]!r} holds {array.dtype}, expected numbers; take a GGUF of the model"
        )
    initializers.add(tensor.name, array)


def _attribute_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the tensors in attributes of nodes, including those of nodes in branches."""
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors
            for branch in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _attribute_tensors(branch)


def _ports(values: Iterable[ValueInfoProto]) -> list[Port]:
    """Return a graph's inputs or outputs as ONNX Runtime lists them."""
    names: dict[int, str] = {TensorProto.FLOAT: "tensor(float)", TensorProto.INT64: "tensor(int64)"}
    ports = []
    for value in values:
        of_tensor = value.type.tensor_type
        shape = tuple(axis.dim_value if axis.HasField("dim_value") else axis.dim_param for axis in of_tensor.shape.dim)
        kind = names.get(of_tensor.elem_type) or f"tensor({TensorProto.DataType.Name(of_tensor.elem_type).lower()})"
        ports.append(Port(value.name, kind, shape))
    return ports
