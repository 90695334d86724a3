"""A small GGUF writer for tests: exact bytes, any value type, and headers that claim what is not so.

    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"a": np.zeros((2, 3), np.float32)})

Values are typed by what they are (bool, int as UINT32, or INT32 and UINT64 where that does not hold it, float as
FLOAT32, str or bytes, lists and numpy arrays) or by `Typed`. Metadata and tensors may be lists of pairs, so that
names can repeat. A numpy array of shape (rows, columns) becomes a tensor of ggml's shape (columns, rows).
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import ValueType
from edgedec.gguf.tensor_types import GGMLType

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_ARRAY_TYPES = {
    np.dtype("u1"): ValueType.UINT8,
    np.dtype("i1"): ValueType.INT8,
    np.dtype("u2"): ValueType.UINT16,
    np.dtype("i2"): ValueType.INT16,
    np.dtype("u4"): ValueType.UINT32,
    np.dtype("i4"): ValueType.INT32,
    np.dtype("f4"): ValueType.FLOAT32,
    np.dtype("?"): ValueType.BOOL,
    np.dtype("u8"): ValueType.UINT64,
    np.dtype("i8"): ValueType.INT64,
    np.dtype("f8"): ValueType.FLOAT64,
}
_TENSOR_TYPES = {
    np.dtype("f4"): GGMLType.F32,
    np.dtype("f2"): GGMLType.F16,
    np.dtype("f8"): GGMLType.F64,
    np.dtype("i1"): GGMLType.I8,
    np.dtype("i2"): GGMLType.I16,
    np.dtype("i4"): GGMLType.I32,
    np.dtype("i8"): GGMLType.I64,
}


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with its type spelled out; for an array, element_type and a list."""

    type: ValueType
    value: Any
    element_type: ValueType | None = None


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor given by its type number, its shape in ggml's order and its bytes."""

    type: int
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Claims:
    """What the header says where that is not the truth; None or an absent name for the truth."""

    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Field:
    """A number in a written header: its kind (count, length, type, dimension, offset), first byte and size."""

    kind: str
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Built:
    """The bytes of a GGUF file, and where the numbers of its header are."""

    data: bytes
    fields: tuple[Field, ...]


_TRUTH = Claims()


def write_gguf(path: Path, metadata: Pairs, tensors: Pairs = (), claims: Claims = _TRUTH) -> Path:
    """Write a GGUF file and return its path."""
    path.write_bytes(build_gguf(metadata, tensors, claims).data)
    return path


def build_gguf(metadata: Pairs, tensors: Pairs = (), claims: Claims = _TRUTH) -> Built:
    """Return the bytes of a GGUF file."""
    keys = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    infos = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
    alignment = dict(keys).get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and 0 < alignment <= 4096 else 32
    out = _Writer()
    out.raw(claims.magic)
    out.number("version", "I", claims.version)
    out.number("count", "Q", len(infos) if claims.n_tensors is None else claims.n_tensors)
    out.number("count", "Q", len(keys) if claims.n_keys is None else claims.n_keys)
    for key, value in keys:
        out.text(key)
        out.value(typed(value))
    data = bytearray()
    for name, content in infos:
        tensor = content if isinstance(content, RawTensor) else _raw_tensor(content)
        out.text(name)
        out.number("count", "I", len(tensor.shape))
        for length in tensor.shape:
            out.number("dimension", "Q", length)
        out.number("type", "I", tensor.type)
        out.number("offset", "Q", claims.offsets.get(name, len(data)))
        data += tensor.data
        data += bytes(-len(data) % alignment)
    if infos:
        out.raw(bytes(-len(out.data) % alignment))
    return Built(bytes(out.data + data), tuple(out.fields))


def typed(value: Any) -> Typed:
    """Give a Python value the type it is written as."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, np.ndarray):
        return Typed(ValueType.ARRAY, value.tolist(), _ARRAY_TYPES[value.dtype])
    if isinstance(value, list):
        return Typed(ValueType.ARRAY, value, typed(value[0]).type if value else ValueType.UINT32)
    if isinstance(value, bool):
        return Typed(ValueType.BOOL, value)
    if isinstance(value, int):
        narrow = ValueType.INT32 if value < 0 else ValueType.UINT32
        return Typed(narrow if value < 2**32 else ValueType.UINT64, value)
    if isinstance(value, float):
        return Typed(ValueType.FLOAT32, value)
    assert isinstance(value, str | bytes), f"no GGUF value type for {value!r}"
    return Typed(ValueType.STRING, value)


def tiny_text_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors of a text model with 2 layers, 4 heads of 2 (2 KV heads), 8 wide, 5 tokens."""
    metadata = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny",
        "general.license": "apache-2.0",
        "general.file_type": 0,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 8,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1], np.int32),
        "tokenizer.chat_template": "{{ messages }}",
    }
    tensors: dict[str, Any] = {"token_embd.weight": np.arange(40, dtype=np.float32).reshape(5, 8)}
    for i in range(2):
        tensors[f"blk.{i}.attn_norm.weight"] = np.ones(8, np.float32)
        tensors[f"blk.{i}.attn_q.weight"] = np.ones((8, 8), np.float16)
    return metadata, tensors


def _raw_tensor(array: NDArray[Any]) -> RawTensor:
    return RawTensor(_TENSOR_TYPES[array.dtype], array.shape[::-1], array.tobytes())


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()
        self.fields: list[Field] = []

    def raw(self, data: bytes) -> None:
        self.data += data

    def number(self, kind: str, code: str, value: int) -> None:
        packed = struct.pack("<" + code, value)
        self.fields.append(Field(kind, len(self.data), len(packed)))
        self.data += packed

    def text(self, text: str | bytes) -> None:
        raw = text.encode() if isinstance(text, str) else text
        self.number("length", "Q", len(raw))
        self.data += raw

    def value(self, value: Typed) -> None:
        self.number("type", "I", value.type)
        self._content(value)

    def _content(self, value: Typed) -> None:
        if value.type is ValueType.STRING:
            self.text(value.value)
        elif value.type is ValueType.ARRAY:
            assert value.element_type is not None, "an array needs the type of its elements"
            self.number("type", "I", value.element_type)
            self.number("length", "Q", len(value.value))
            for element in value.value:
                is_array = value.element_type is ValueType.ARRAY
                self._content(typed(element) if is_array else Typed(value.element_type, element))
        else:
            self.data += struct.pack("<" + _FORMATS[value.type], value.value)
