"""Finds tensors and operators of an export's outermost graph by their names, without ONNX Runtime.

The graph was checked before (graph_check.py): its tensors lie in the graph or in the export's own data file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import reading
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.protobuf import damaged, fields, signed, whole_numbers

FLOAT, UINT8 = 1, 2
"""TensorProto.DataType."""
_DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT: np.dtype("<f4"), UINT8: np.dtype("u1"), 7: np.dtype("<i8")}

_GRAPH = 7  # of a model
_NODE, _INITIALIZER = 1, 5  # of a graph
_NODE_NAME, _ATTRIBUTE = 3, 5
_ATTRIBUTE_NAME, _NUMBER = 1, 3
_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL = 1, 2, 8, 9, 13


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a graph.

    Attributes:
        shape: Its sizes.
        dtype: Type of its elements, little endian.
        offset: Where it begins in the data file, in bytes.
        inside: Its bytes where they are in the graph, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0
    inside: NDArray[np.uint8] | None = None

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GraphParts:
    """What was found in a graph.

    Attributes:
        tensors: Tensors by name.
        numbers: For each operator by its name: its attributes that are whole numbers.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)


def read_parts(export: Export, prefixes: tuple[str, ...]) -> GraphParts:
    """Return the tensors and operators of an export's graph whose names begin with one of some prefixes.

    Raises:
        ModelFormatError: The graph is damaged, or a tensor lies beyond the data file.
        StorageError: The graph can't be read.
    """
    with reading(export.graph):
        graph = memoryview(export.graph.read_bytes())
    parts = GraphParts()
    try:
        for kind, message in _outermost(graph):
            if kind == _INITIALIZER:
                _add_tensor(parts, message, prefixes, export.data_bytes)
            else:
                _add_operator(parts, message, prefixes)
    except ModelFormatError as error:
        raise ModelFormatError(f"{export.graph}: {error}") from error
    return parts


def _outermost(graph: memoryview) -> list[tuple[int, memoryview]]:
    """Return the nodes and the initializers of a model's graph: the number of the field, and its bytes."""
    parts: list[tuple[int, memoryview]] = []
    for number, _, value in fields(graph):
        if number == _GRAPH and isinstance(value, memoryview):
            parts += [(n, v) for n, _, v in fields(value) if n in (_NODE, _INITIALIZER) and isinstance(v, memoryview)]
    return parts


def _add_tensor(parts: GraphParts, message: memoryview, prefixes: tuple[str, ...], data_bytes: int) -> None:
    message_fields = list(fields(message))
    name = _text(next((value for number, _, value in message_fields if number == _NAME), b""))
    if not name.startswith(prefixes):
        return
    shape: list[int] = []
    dtype, inside, place = None, None, {}
    for number, _, value in message_fields:
        if number == _DIMS:
            shape += whole_numbers(value)
        elif number == _TYPE and isinstance(value, int):
            dtype = _DTYPES.get(value)
        elif number == _RAW and isinstance(value, memoryview):
            inside = np.frombuffer(value, np.uint8)
        elif number == _EXTERNAL and isinstance(value, memoryview):
            entry = {n: _text(v) for n, _, v in fields(value)}
            place[entry.get(1, "")] = entry.get(2, "")
    if dtype is None:
        return
    offset = place.get("offset", "0")
    if not (offset.isascii() and offset.isdigit() and len(offset) < 20) or any(size < 0 for size in shape):
        raise damaged(f"the tensor {name[:80]!r} has the shape {shape[:8]}, or no place")
    tensor = Tensor(name, tuple(shape), dtype, int(offset), inside)
    if tensor.n_bytes != len(inside) if inside is not None else tensor.offset + tensor.n_bytes > data_bytes:
        raise damaged(f"the tensor {name[:80]!r} of {tensor.n_bytes} bytes lies beyond what holds it")
    parts.tensors[name] = tensor


def _add_operator(parts: GraphParts, message: memoryview, prefixes: tuple[str, ...]) -> None:
    message_fields = list(fields(message))
    name = _text(next((value for number, _, value in message_fields if number == _NODE_NAME), b""))
    if not name.startswith(prefixes):
        return
    numbers: dict[str, int] = {}
    for number, _, value in message_fields:
        if number == _ATTRIBUTE and isinstance(value, memoryview):
            attribute = {n: v for n, _, v in fields(value)}
            if isinstance(whole := attribute.get(_NUMBER), int):
                numbers[_text(attribute.get(_ATTRIBUTE_NAME, b""))] = signed(whole)
    parts.numbers[name] = numbers


def _text(value: object) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, memoryview | bytes) else ""
