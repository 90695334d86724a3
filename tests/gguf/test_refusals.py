"""Every kind of file that read_gguf refuses, and that nothing but an EdgedecError comes out of a damaged one."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.gguf_writer import Claims, RawTensor, Typed, build_gguf, tiny_text_model, write_gguf
from support.processes.bounded_work import at_most_lines

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGUFArray, ValueType, read_gguf
from edgedec.gguf.formats import HEAD_BYTES, name_format
from edgedec.gguf.tensor_types import GGMLType

F32 = GGMLType.F32
MOST_LINES = 100_000
"""More than any header of these tests takes."""
SAFETENSORS = struct.pack("<Q", 60) + json.dumps({"a": {"dtype": "F32", "shape": [1]}}).encode()

OTHER_FORMATS = [
    (b"", "an empty file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    (b"<!DOCTYPE html><html></html>", "web page saved instead"),
    (b"\n <HTML><body>Log in</body>", "web page saved instead"),
    (b"PK\x03\x04" + bytes(40), "zip archive or a PyTorch checkpoint"),
    (SAFETENSORS, "safetensors"),
    (b"\x08\x08\x12\x07pytorch" + bytes(60), "ONNX"),
    (b"lmgg" + bytes(60), "old ggml format"),
    (b"fmgg" + bytes(60), "old ggmf format"),
    (b"tjgg" + bytes(60), "old ggjt format"),
    (b"algg" + bytes(60), "LoRA adapter in the old"),
    (b"\x80\x02}q\x00", "Python pickle"),
    (b"\x1f\x8b\x08" + bytes(60), "gzip"),
    (bytes(257) + b"ustar", "a tar archive"),
    (bytes(100), "zeros only"),
    (b'{"error": "Repository not found"}', "JSON text"),
    ("Ein Text, größer als nötig. ".encode() * 40, "a text file"),
    (b"\x01\x02\xfe\xff" * 20, "starts with the bytes 01 02 fe ff"),
    (b"GG", "the magic number needs 4 bytes at byte 0, but the file has 2"),
    (b"GGUF", "the version needs 4 bytes"),
    (b"GGUF is a format for models, described here.", "GGUF version is 544434464, expected 2 or 3"),
]


@pytest.mark.parametrize(("content", "message"), OTHER_FORMATS, ids=[m for _, m in OTHER_FORMATS])
def test_other_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    """A file of another format is refused with what it is and what to do."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=message) as refusal:
        read_gguf(path)
    assert str(refusal.value).startswith(str(path))


@pytest.mark.parametrize("cut", range(4))
def test_text_cut_inside_a_character_is_text(cut: int) -> None:
    """A text file counts as text wherever the first bytes end."""
    text = "x" * cut + "🙂" * 200
    assert "a text file" in name_format(text.encode()[:HEAD_BYTES])


@pytest.mark.parametrize("name", ["absent.gguf", "file.gguf/inside", "nul\0byte.gguf", "long" * 1000])
def test_a_path_without_a_file_is_not_found(tmp_path: Path, name: str) -> None:
    """A path that leads nowhere, or that no file can have, is ModelNotFoundError."""
    write_gguf(tmp_path / "file.gguf", {})
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_gguf(tmp_path / name)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    """A directory is refused with the advice to pass a file."""
    with pytest.raises(ModelFormatError, match="a directory, expected a file"):
        read_gguf(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """A named pipe, whose opening could wait for ever, is refused at once."""
    os.mkfifo(tmp_path / "m.gguf")
    # Enough to read, so that this test would fail and not wait.
    pipe = os.open(tmp_path / "m.gguf", os.O_RDWR)
    try:
        os.write(pipe, b"x" * 4096)
        with pytest.raises(ModelFormatError, match="a device, pipe or socket"):
            read_gguf(tmp_path / "m.gguf")
    finally:
        os.close(pipe)


ZEROS = np.zeros(8, np.float32)
BIG = Typed(ValueType.UINT32, 2**31)
DAMAGED: list[tuple[Any, Any, Claims, str]] = [
    ({}, {}, Claims(version=0), "GGUF version is 0"),
    ({}, {}, Claims(n_tensors=2**18 + 1), "at most 262144 and 65536"),
    ({}, {}, Claims(n_keys=2**16 + 1), "at most 262144 and 65536"),
    ({}, {"t": ZEROS}, Claims(n_tensors=4), "4 tensors needs 100 bytes at byte 24"),
    ([("k", 1), ("k", 2)], {}, Claims(), "metadata key 'k' is there twice"),
    ({}, [("t", ZEROS), ("t", ZEROS)], Claims(), "tensor 't' is there twice"),
    ({"": 1}, {}, Claims(), "metadata key 0 is 0 bytes long"),
    ({"k" * 65536: 1}, {}, Claims(), "is 65536 bytes long, expected 1 to 65535"),
    ({b"\xff": 1}, {}, Claims(), "which is no UTF-8"),
    ({"a\x1b[2J": 1}, {}, Claims(), "characters that no name has"),
    ({}, {"": ZEROS}, Claims(), "the name of tensor 0 is 0 bytes long"),
    ({}, {b"\xc3": ZEROS}, Claims(), "which is no UTF-8"),
    ({}, {"n" * 256: ZEROS}, Claims(), "is 256 bytes long, expected 1 to 255"),
    ({"general.alignment": 0}, {}, Claims(), "general.alignment is 0, expected a power of two"),
    ({"general.alignment": 48}, {}, Claims(), "general.alignment is 48"),
    ({"general.alignment": BIG}, {}, Claims(), "general.alignment is 2147483648"),
    ({"general.alignment": True}, {}, Claims(), "general.alignment is True"),
    ({"general.alignment": "32"}, {}, Claims(), "general.alignment is '32'"),
    ({"a": [[[[[1]]]]]}, {}, Claims(), "nests 4 arrays, at most"),
    ({}, {"t": RawTensor(F32, (1, 1, 1, 1, 1), bytes(4))}, Claims(), "5 dimensions, at most 4"),
    ({}, {"t": RawTensor(F32, (0, 4), b"")}, Claims(), r"shape \(0, 4\)"),
    ({}, {"t": RawTensor(F32, (2**32, 2**32), b"")}, Claims(), "expected 1 to 2"),
    ({}, {"t": RawTensor(F32, (2**64 - 1,) * 4, b"")}, Claims(), "expected 1 to 2"),
    ({}, {"t": RawTensor(GGMLType.Q4_0, (33, 2), bytes(36))}, Claims(), "rows of 33, expected a multiple of Q4_0's 32"),
    ({}, {"t": RawTensor(GGMLType.Q4_0, (16, 2), bytes(18))}, Claims(), "rows of 16, expected a multiple of Q4_0's 32"),
    ({}, {"t": RawTensor(GGMLType.Q4_K, (), bytes(144))}, Claims(), "rows of 1, expected a multiple of Q4_K's 256"),
    ({}, {"t": ZEROS}, Claims(offsets={"t": 4}), "offset 4, expected a multiple of 32"),
    ({}, {"t": ZEROS}, Claims(offsets={"t": 32}), "tensor 't' ends at byte"),
    ({}, {"t": ZEROS}, Claims(offsets={"t": 2**64 - 32}), "tensor 't' ends at byte"),
    ({}, {"t": RawTensor(F32, (2**40,), bytes(32))}, Claims(), "tensor 't' ends at byte"),
    ({}, {"t": ZEROS, "u": ZEROS}, Claims(offsets={"u": 0}), "tensors 't' and 'u' overlap"),
]


@pytest.mark.parametrize(("metadata", "tensors", "claims", "message"), DAMAGED, ids=[d[-1] for d in DAMAGED])
def test_contradictions_are_refused(tmp_path: Path, metadata: Any, tensors: Any, claims: Claims, message: str) -> None:
    """A header that contradicts the file, or itself, is refused with what was found and what was expected."""
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, claims)
    with pytest.raises(ModelFormatError, match=message):
        read_gguf(path)


@pytest.mark.parametrize(
    ("claims", "number", "message"),
    [
        (Claims(version=1), 0, "GGUF version 1; edgedec reads versions 2 and 3: convert"),
        (Claims(version=4), 0, "GGUF version 4; edgedec reads versions 2 and 3: update"),
        (Claims(version=3 << 24), 0, "big-endian"),
        (Claims(), 4, r"tensor 't' has the type number 4 \(Q4_2, which ggml no longer has\)"),
        (Claims(), 31, r"31 \(Q4_0_4_4"),
        (Claims(), 43, "type number 43, which edgedec does not know"),
        (Claims(), 2**32 - 1, "type number 4294967295"),
    ],
)
def test_other_versions_and_types_are_unsupported(tmp_path: Path, claims: Claims, number: int, message: str) -> None:
    """Another version, byte order or tensor type is UnsupportedModelError, with the number and the tensor."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": RawTensor(number, (8,), bytes(32))}, claims)
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(path)


def patched(key: str, kind: str, index: int, value: int) -> bytes:
    """Return a file with one value, in which the index-th field of a kind has another value."""
    values: dict[str, Any] = {"text": "abc", "texts": ["a", "b"], "numbers": [1, 2], "flags": [True], "nested": [[1]]}
    built = build_gguf({"k": values[key]})
    # Fields before the value: version, two counts, and the length of the key.
    field = [f for f in built.fields[4:] if f.kind == kind][index]
    data = bytearray(built.data)
    data[field.start : field.start + field.n_bytes] = value.to_bytes(field.n_bytes, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (patched("text", "type", 0, 13), "value type 13, expected 0 to 12"),
        (patched("text", "length", 0, 4), "metadata 'k' needs 4 bytes"),
        (patched("text", "length", 0, 2**64 - 1), "needs 18446744073709551615 bytes"),
        (patched("texts", "type", 1, 99), "value type 99"),
        (patched("texts", "length", 0, 2**61), "array of 2305843009213693952 strings"),
        (patched("texts", "length", 0, 3), "array of 3 strings"),
        (patched("texts", "length", 1, 2**63), "the file has"),
        (patched("texts", "length", 2, 2), "a string of metadata 'k' needs 2 bytes"),
        (patched("numbers", "length", 0, 2**62), "needs 18446744073709551616 bytes"),
        (patched("nested", "length", 0, 2**60), "array of 1152921504606846976 arrays"),
        (patched("nested", "type", 2, 50), "value type 50"),
        (build_gguf({"k": [True]}).data[:-1] + b"\x02", "a boolean that is neither 0 nor 1"),
        (build_gguf({"k": True}).data[:-1] + b"\xff", "a boolean that is neither 0 nor 1"),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """A value whose type or length is not possible is refused."""
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.slow
def test_more_nested_arrays_than_any_model_are_refused(tmp_path: Path) -> None:
    """The number of nested arrays is bounded, as each costs a loop in Python."""
    nested = Typed(ValueType.ARRAY, [[]] * (2**16 + 1), ValueType.ARRAY)
    with pytest.raises(ModelFormatError, match="nests 65537 arrays"):
        read_gguf(write_gguf(tmp_path / "m.gguf", {"k": nested}))


def read_soon(path: Path) -> GGUF:
    """Read a header without much work, whatever it claims to hold."""
    with at_most_lines(MOST_LINES):
        return read_gguf(path)


@pytest.mark.skipif(os.name == "nt", reason="sparse files need a file system that makes them")
def test_a_header_larger_than_any_model_is_refused(tmp_path: Path) -> None:
    """In a file of 1 TB, a string of 512 GB is refused at once and not read."""
    path = tmp_path / "m.gguf"
    path.write_bytes(patched("text", "length", 0, 2**39))
    try:
        os.truncate(path, 2**40)
    except OSError as error:
        pytest.skip(f"this file system has no such files: {error}")
    with pytest.raises(ModelFormatError, match="would make the header larger than"):
        read_soon(path)


@pytest.mark.slow
@pytest.mark.parametrize("n_left", range(0, 700, 7))
def test_every_truncation_is_refused(tmp_path: Path, n_left: int) -> None:
    """A model cut anywhere before its last tensor's end is refused as damaged."""
    path = write_gguf(tmp_path / "m.gguf", *tiny_text_model())
    assert path.stat().st_size > 700
    os.truncate(path, n_left)
    with pytest.raises(ModelFormatError):
        read_gguf(path)


TINY = build_gguf(*tiny_text_model())


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_gives_an_answer_or_an_edgedec_error(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever numbers and bytes of a header change, reading it succeeds or raises an EdgedecError."""
    damaged = bytearray(TINY.data)
    for field in data.draw(st.lists(st.sampled_from(TINY.fields), max_size=3)):
        top = 2 ** (8 * field.n_bytes)
        extreme = st.sampled_from([0, 1, top - 1, top // 2, top // 2 - 1, len(damaged), 2**31])
        value = data.draw(extreme | st.integers(0, 300)) % top
        damaged[field.start : field.start + field.n_bytes] = value.to_bytes(field.n_bytes, "little")
    for position, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=4)
    ):
        damaged[position] = byte
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    try:
        gguf = read_soon(path)
    except EdgedecError:
        return
    for value in gguf.metadata.values():
        if isinstance(value, GGUFArray):
            assert len(value.tolist()) == len(value)
    for name, tensor in gguf.tensors.items():
        assert len(gguf.read_tensor_bytes(name)) == tensor.n_bytes


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), start=st.sampled_from([b"", b"GGUF", b"GGUF\x03\0\0\0"]))
def test_arbitrary_bytes_are_refused(tmp_path: Path, content: bytes, start: bytes) -> None:
    """Bytes that were never a model give an EdgedecError, or an empty GGUF where they happen to be one."""
    path = tmp_path / "m.gguf"
    path.write_bytes(start + content)
    try:
        gguf = read_soon(path)
    except EdgedecError:
        return
    assert not gguf.tensors
