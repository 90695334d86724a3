"""The reader of graphs survives any bytes, and finds every tensor that lies outside."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.onnx_exports import Exporter

from edgedec.errors import ModelFormatError
from edgedec_runtimes.onnx.graph_check import External, check_graph
from edgedec_runtimes.onnx.protobuf import fields

SIZES = {"model.onnx.data": 4096}


def field(number: int, content: bytes | int) -> bytes:
    """Return a field of a protobuf message: a number, or bytes."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def entry(key: str, value: str) -> bytes:
    """Return an entry of a tensor's external data."""
    return field(13, field(1, key.encode()) + field(2, value.encode()))


def outside(location: str = "model.onnx.data", offset: str = "0", length: str = "16") -> bytes:
    """Return a tensor f32[4] that lies in a file."""
    place = entry("location", location) + entry("offset", offset) + entry("length", length)
    return field(1, 4) + field(2, 1) + field(8, b"w") + place + field(14, 1)


def model(*tensors: bytes) -> bytes:
    """Return a graph with these initializers."""
    return field(1, 10) + field(7, b"".join(field(5, tensor) for tensor in tensors))


def test_a_tensor_outside_is_found() -> None:
    """Name, place and length come back; one inside the graph does not."""
    inside = field(1, 2) + field(2, 1) + field(8, b"v") + field(9, bytes(8))
    assert check_graph(model(outside(offset="4080"), inside), SIZES) == [External("w", 4080, 16)]
    assert check_graph(b"", SIZES) == []


@pytest.mark.parametrize(
    "graph",
    [
        model(outside(offset="4081")),
        model(outside(offset="18446744073709551616")),
        model(outside(offset="０")),
        model(outside(length="")),
        model(outside("MODEL.ONNX.DATA")),
        model(outside("./model.onnx.data")),
        model(outside() + entry("location", "/etc/passwd")),
        model(outside() + field(9, bytes(16))),
        model(outside() + field(14, 0)),
        model(outside()[:-2]),  # external data without the location flag
        model(field(1, 4) + field(2, 1) + field(14, 1)),  # the flag alone
        model(field(1, 2**64 - 1) + field(2, 1) + field(9, b"")),
        model(*[field(1, 2**31)] * 1),
        model(field(1, 2**40) + field(2, 1)),  # inside, without its data
        model(field(1, 4) + field(2, 8) + field(6, b"text")),
        field(7, b"") * 2,
        field(20, b""),
        field(25, b""),
        field(7, field(15, b"")),
        field(7, field(1, field(5, field(5, outside()) * 2))),
        field(7, field(1, field(5, field(22, b"")))),
        b"\x0b",
        b"\x07",
        b"\x3a\x05",
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x00\x00",
    ],
)
def test_what_is_not_sound_is_refused(graph: bytes) -> None:
    """Places beyond the file or elsewhere, things said twice, and bytes that are no message."""
    with pytest.raises(ModelFormatError):
        check_graph(graph, SIZES)


def test_branches_are_entered_but_not_without_end() -> None:
    """A tensor in a branch in a branch is found; a hundred branches in one another are refused."""

    def nested(depth: int) -> bytes:
        graph = field(5, outside())
        for _ in range(depth):
            graph = field(1, field(5, field(6, graph)))
        return field(7, graph)

    assert check_graph(nested(3), SIZES) == [External("w", 0, 16)]
    with pytest.raises(ModelFormatError, match="nested too deep"):
        check_graph(nested(100), SIZES)


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(content: bytes) -> None:
    """Nothing but ModelFormatError comes out of the reader, and no value is larger than the bytes at hand."""
    try:
        for _, _, value in fields(memoryview(content)):
            assert isinstance(value, int) or len(value) <= len(content)
        check_graph(content, SIZES)
    except ModelFormatError:
        pass


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_a_spoiled_graph_reads_nothing_else(graph_bytes: bytes, data: st.DataObject) -> None:
    """Bytes of a real graph changed, cut or doubled: it is refused, or all its tensors lie within the file."""
    content = bytearray(graph_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "double"]))
        if kind == "set":
            content[at] = data.draw(st.integers(0, 255))
        else:
            stop = min(len(content), at + data.draw(st.integers(1, 40)))
            content[at:stop] = b"" if kind == "cut" else content[at:stop] * 2
    try:
        found = check_graph(bytes(content), {"model.onnx.data": 1 << 20})
    except ModelFormatError:
        return
    assert all(0 <= one.offset <= one.offset + one.n_bytes <= 1 << 20 for one in found)


@pytest.fixture(scope="module")
def graph_bytes(exported: Exporter) -> bytes:
    """A real graph."""
    return Path(exported(n_layer=1).folder / "model.onnx").read_bytes()
