"""Refuses a graph that reads any file but the export's own data file, before ONNX Runtime opens the graph.

An ONNX graph names files: a tensor may have its data in a file (`external_data`), and some operators read a file
themselves. Every tensor of the graph, of its attributes and of their branches is checked. Refused are all parts that
exports never have (functions, sparse tensors, unknown fields, foreign operators), and messages that have a single field
twice, as readers differ in which of the two they take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from edgedec.errors import ModelFormatError
from edgedec_runtimes.onnx.protobuf import BYTES, VARINT, damaged, fields, whole_numbers

MOST_GRAPH_BYTES = 64 << 20
_DEEPEST = 16
_MOST_ELEMENTS = 1 << 48
_DOMAINS = frozenset({b"", b"ai.onnx", b"com.microsoft"})
_READ_FILES = frozenset({b"EPContext"})

# The fields of each message by number, as in onnx.proto: the name of a field that is checked, "-" for one that is
# skipped. A "*" marks a field that may be repeated.
_SCHEMA: Mapping[str, Mapping[int, str]] = {
    "model": {**dict.fromkeys(range(1, 7), "-"), 7: "graph", **dict.fromkeys((8, 14), "-*")},
    "graph": {1: "node*", 5: "tensor*", **dict.fromkeys((2, 10), "-"), **dict.fromkeys((11, 12, 13, 16), "-*")},
    "node": {
        **dict.fromkeys((3, 6, 8), "-"),
        **dict.fromkeys((1, 2, 9), "-*"),
        4: "operator",
        5: "attribute*",
        7: "domain",
    },
    "attribute": {
        **dict.fromkeys((1, 2, 3, 4, 13, 14, 20, 21), "-"),
        **dict.fromkeys((7, 8, 9, 15), "-*"),
        5: "tensor",
        6: "graph",
        10: "tensor*",
        11: "graph*",
    },
}
# Bits of an element by TensorProto.DataType; exports have no tensors of text.
_BITS = {
    **dict.fromkeys((11, 7, 13, 14), 64),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
}
_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14
_TYPED_DATA = frozenset({4, 5, 7, 10, 11})
_TENSOR_TEXT = frozenset({_NAME, 12, 16})


@dataclass(frozen=True, slots=True)
class External:
    """A tensor's name, and its place in the data file in bytes."""

    name: str
    offset: int
    n_bytes: int


def check_graph(graph: bytes | memoryview, files: Mapping[str, int], most: int = MOST_GRAPH_BYTES) -> list[External]:
    """Return the tensors that lie outside the graph, all of them within `files`.

    Args:
        graph: The bytes of the graph, an ONNX ModelProto, at most `most`.
        files: The size in bytes of each data file, by its plain name beside the graph.

    Raises:
        ModelFormatError: The graph is damaged, or reads another file.
    """
    message, externals = memoryview(graph), list[External]()
    if len(message) > most:
        raise damaged(f"the graph has {len(message)} bytes, more than {most}")
    _walk(message, "model", 0, files, externals)
    return externals


def _walk(message: memoryview, kind: str, depth: int, data_files: Mapping[str, int], externals: list[External]) -> None:
    if depth > _DEEPEST:
        raise damaged("its branches are nested too deep")
    schema, seen = _SCHEMA[kind], set()
    for number, _, value in fields(message):
        what = schema.get(number)
        if what is None:
            raise damaged(f"a {kind} has the field {number}, which exports don't have")
        if not what.endswith("*"):
            if number in seen:
                raise damaged(f"a {kind} has the field {number} twice")
            seen.add(number)
        what = what.rstrip("*")
        if what == "-":
            continue
        if not isinstance(value, memoryview):
            raise damaged(f"field {number} of a {kind} is a number")
        if what == "tensor":
            external = _tensor(value, data_files)
            if external is not None:
                externals.append(external)
        elif what in ("operator", "domain"):
            _require_known(bytes(value), what)
        else:
            _walk(value, what, depth + 1, data_files, externals)


def _require_known(name: bytes, what: str) -> None:
    if (what == "domain" and name not in _DOMAINS) or name in _READ_FILES:
        raise damaged(f"it has the {what} {name[:80].decode(errors='replace')!r}, which exports don't have")


def _tensor(message: memoryview, data_files: Mapping[str, int]) -> External | None:
    """Return where a tensor lies, or None where its data is in the message itself."""
    dims: list[int] = []
    seen: set[int] = set()
    entries: dict[str, str] = {}
    name, data_type, location, n_raw, has_data = "", 0, 0, None, False
    for number, kind, value in fields(message):
        if number in seen and number not in (_DIMS, _EXTERNAL, *_TYPED_DATA, 16):
            raise damaged(f"a tensor has the field {number} twice")
        seen.add(number)
        if number == _DIMS:
            dims += whole_numbers(value)
        elif number in (_TYPE, _LOCATION) and kind == VARINT and isinstance(value, int):
            data_type, location = (value, location) if number == _TYPE else (data_type, value)
        elif number in (_RAW, _EXTERNAL, *_TENSOR_TEXT) and kind == BYTES and isinstance(value, memoryview):
            if number == _NAME:
                name = bytes(value).decode(errors="replace")
            elif number == _RAW:
                n_raw = len(value)
            elif number == _EXTERNAL:
                _add_entry(entries, value)
        elif number in _TYPED_DATA:
            has_data = True
        else:
            raise damaged(f"a tensor has the field {number}, which exports don't have")
    n_bytes = _n_bytes(name, dims, data_type)
    if location == 0 and not entries:
        limit = 4 * len(message)  # a byte holds at most 4 elements, a varint one, of at most 16 bytes
        if (n_raw is not None and n_raw != n_bytes) or (n_raw is None and n_bytes > 16 * limit):
            raise damaged(f"the tensor {name[:80]!r} of {n_bytes} bytes holds others")
        return None
    if location != 1 or n_raw is not None or has_data:
        raise damaged(f"the tensor {name[:80]!r} is both inside and outside the graph")
    return _place(name, entries, n_bytes, data_files)


def _n_bytes(name: str, dims: list[int], data_type: int) -> int:
    if data_type not in _BITS:
        raise damaged(f"the tensor {name[:80]!r} has the type {data_type}, which exports don't have")
    n_elements = prod(dims) if len(dims) <= 16 else -1
    if any(dim < 0 for dim in dims) or not 0 <= n_elements <= _MOST_ELEMENTS:
        raise damaged(f"the tensor {name[:80]!r} has the shape {dims[:16]}")
    return -(-n_elements * _BITS[data_type] // 8)


def _add_entry(entries: dict[str, str], message: memoryview) -> None:
    """Add the key and the value of a StringStringEntryProto to `entries`."""
    texts: dict[int, str] = {}
    for number, kind, value in fields(message):
        if number not in (1, 2) or number in texts or kind != BYTES or not isinstance(value, memoryview):
            raise damaged("the place of a tensor is spelled in another way than key and value")
        texts[number] = bytes(value).decode(errors="replace")
    key = texts.get(1, "")
    if key in entries or key not in ("location", "offset", "length", "checksum"):
        raise damaged(f"the place of a tensor says {key[:80]!r} twice, or at all")
    entries[key] = texts.get(2, "")


def _place(name: str, entries: dict[str, str], n_bytes: int, data_files: Mapping[str, int]) -> External:
    location = entries.get("location", "")
    if location not in data_files:
        raise ModelFormatError(
            f"the tensor {name[:80]!r} lies in {location[:200]!r}, expected {' or '.join(data_files) or 'no file'} "
            "beside the graph; this graph would read another file: don't use it, and export the model again"
        )
    offset, length = (_whole(entries.get(key, "0" if key == "offset" else "")) for key in ("offset", "length"))
    if offset is None or length != n_bytes or offset + length > data_files[location]:
        raise damaged(
            f"the tensor {name[:80]!r} of {n_bytes} bytes lies at {entries.get('offset', '0')[:20]!r} with the length "
            f"{entries.get('length', '')[:20]!r} in a file of {data_files[location]}"
        )
    return External(name, offset, length)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
