"""Reading sound GGUF files: values, arrays, tensors, split files, and files that change after they were read."""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import struct
import tracemalloc
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models.gguf_writer import Claims, RawTensor, Typed, build_gguf, tiny_text_model, write_gguf
from support.models.real_models import real_model
from support.processes.bounded_work import at_most_lines

from edgedec.errors import MemoryCapError, ModelFormatError, ModelNotFoundError, StorageError
from edgedec.gguf.file import GGUFArray, TensorInfo, ValueType, read_gguf
from edgedec.gguf.header import read_header
from edgedec.gguf.tensor_types import REMOVED_TYPES, GGMLType
from edgedec.gguf.values import STRING_BLOCK_BYTES, show, string_offsets

SCALARS = [
    (Typed(ValueType.UINT8, 200), 200),
    (Typed(ValueType.INT8, -100), -100),
    (Typed(ValueType.UINT16, 60000), 60000),
    (Typed(ValueType.INT16, -30000), -30000),
    (Typed(ValueType.UINT32, 4_000_000_000), 4_000_000_000),
    (Typed(ValueType.INT32, -2_000_000_000), -2_000_000_000),
    (Typed(ValueType.UINT64, 2**64 - 1), 2**64 - 1),
    (Typed(ValueType.INT64, -(2**63)), -(2**63)),
    (Typed(ValueType.FLOAT32, 0.5), 0.5),
    (Typed(ValueType.FLOAT64, 0.1), 0.1),
    (Typed(ValueType.BOOL, True), True),
    (Typed(ValueType.STRING, "naïve\n"), "naïve\n"),
    (Typed(ValueType.STRING, ""), ""),
    (Typed(ValueType.STRING, b"a\xffb"), "a\ufffdb"),
]


@pytest.mark.parametrize(("written", "expected"), SCALARS, ids=lambda v: v.type.name if isinstance(v, Typed) else "")
def test_scalars_come_back_as_written(tmp_path: Path, written: Typed, expected: object) -> None:
    """A value of each type comes back equal and of Python's type; malformed UTF-8 becomes U+FFFD."""
    value = read_gguf(write_gguf(tmp_path / "m.gguf", {"key": written})).metadata["key"]
    assert value == expected
    assert type(value) is type(expected)


ARRAYS: list[tuple[Any, ValueType, list[Any]]] = [
    (["a", "", "ö" * 300], ValueType.STRING, ["a", "", "ö" * 300]),
    (Typed(ValueType.ARRAY, [], ValueType.STRING), ValueType.STRING, []),
    ([True, False], ValueType.BOOL, [True, False]),
    ([1.5, -2.0], ValueType.FLOAT32, [1.5, -2.0]),
    (np.array([-1, 2**40]), ValueType.INT64, [-1, 2**40]),
    (np.array([1, 255], np.uint8), ValueType.UINT8, [1, 255]),
    ([[1, 2], ["x", "yz"], [[3], []]], ValueType.ARRAY, [[1, 2], ["x", "yz"], [[3], []]]),
]


@pytest.mark.parametrize(("written", "element_type", "expected"), ARRAYS)
def test_arrays_come_back_as_written(
    tmp_path: Path, written: Any, element_type: ValueType, expected: list[Any]
) -> None:
    """Arrays of strings, numbers, booleans and arrays keep their element type, length and elements."""
    array = read_gguf(write_gguf(tmp_path / "m.gguf", {"key": written, "after": 7})).metadata["key"]
    assert isinstance(array, GGUFArray)
    assert (array.element_type, len(array), array.tolist()) == (element_type, len(expected), expected)
    assert [e.tolist() if isinstance(e, GGUFArray) else e for e in array] == expected


def test_numeric_arrays_give_numpy(tmp_path: Path) -> None:
    """A numeric array is a read-only numpy array of its own type; one of strings says that it has no numbers."""
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", {"n": np.array([3, -1], np.int32), "s": ["x"]}))
    numbers, texts = gguf.metadata["n"], gguf.metadata["s"]
    assert isinstance(numbers, GGUFArray)
    assert isinstance(texts, GGUFArray)
    assert numbers.numpy().dtype == np.int32
    assert numbers.numpy().tolist() == [3, -1]
    assert not numbers.numpy().flags.writeable
    with pytest.raises(ModelFormatError, match="STRING elements, expected numbers"):
        texts.numpy()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 128])
def test_tensors_are_where_the_file_has_them(tmp_path: Path, version: int, alignment: int | None) -> None:
    """Shapes, types, sizes, offsets and bytes of tensors are those written, for any alignment."""
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    second = RawTensor(GGMLType.Q8_0, (64, 3), bytes(range(204)))
    metadata = {} if alignment is None else {"general.alignment": alignment}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"first": first, "second": second}, Claims(version=version))
    gguf = read_gguf(path)
    assert (gguf.version, gguf.alignment, gguf.n_bytes) == (version, alignment or 32, path.stat().st_size)
    assert gguf.paths == (path,)
    assert list(gguf.tensors) == ["first", "second"]
    start = gguf.tensors["first"].offset
    step = max(32, gguf.alignment)
    assert start % gguf.alignment == 0
    assert gguf.tensors["first"] == TensorInfo("first", (3, 2), GGMLType.F32, start, 24, 0)
    assert gguf.tensors["second"] == TensorInfo(
        "second", (64, 3), GGMLType.Q8_0, start + (24 if alignment == 8 else step), 204, 0
    )
    assert gguf.tensors["second"].n_elements == 192
    assert np.frombuffer(gguf.read_tensor_bytes("first"), np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert gguf.read_tensor_bytes("second") == bytes(range(204))


def test_a_tensor_without_dimensions_is_one_element(tmp_path: Path) -> None:
    """A tensor with no dimensions has one element, as in ggml."""
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"scale": np.array(2.5, np.float32)}))
    assert (gguf.tensors["scale"].shape, gguf.tensors["scale"].n_bytes) == ((), 4)


def test_the_header_hash_is_that_of_the_header_bytes(tmp_path: Path) -> None:
    """The hash is SHA-256 of the bytes up to the last tensor info: it sees names, not weights."""
    built = build_gguf({"k": 1}, {"t": np.zeros(8, np.float32)})
    n_header_bytes = built.fields[-1].start + built.fields[-1].n_bytes
    (tmp_path / "m.gguf").write_bytes(built.data)
    gguf = read_gguf(tmp_path / "m.gguf")
    other_weights = write_gguf(tmp_path / "w.gguf", {"k": 1}, {"t": np.ones(8, np.float32)})
    other_name = write_gguf(tmp_path / "n.gguf", {"k": 1}, {"u": np.zeros(8, np.float32)})
    assert gguf.header_hash == hashlib.sha256(built.data[:n_header_bytes]).hexdigest()
    assert gguf.header_hash == read_gguf(other_weights).header_hash
    assert gguf.header_hash != read_gguf(other_name).header_hash


@pytest.mark.slow
def test_a_header_larger_than_the_first_read_is_whole(tmp_path: Path) -> None:
    """Strings and arrays across the borders of the pieces that are read come back whole."""
    tokens = [f"token {i}" * (i % 50) for i in range(20_000)]
    metadata = {"text": "x" * 300_000, "tokens": tokens, "numbers": np.arange(200_000), "last": "end"}
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", metadata))
    found, numbers = gguf.metadata["tokens"], gguf.metadata["numbers"]
    assert isinstance(found, GGUFArray)
    assert isinstance(numbers, GGUFArray)
    assert found.tolist() == tokens
    assert numbers.numpy()[[0, -1]].tolist() == [0, 199_999]
    assert (gguf.metadata["text"], gguf.metadata["last"]) == ("x" * 300_000, "end")


def test_ggml_types_match_the_library() -> None:
    """Names, block sizes and removed numbers are those of the libggml that llama-cpp-python brings."""
    spec = importlib.util.find_spec("llama_cpp")
    directory = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else Path()
    found = [p for p in directory.glob("*ggml-base.*") if p.suffix in {".so", ".dylib", ".dll"}]
    if not found:
        pytest.skip("llama-cpp-python is not installed")
    library = ctypes.CDLL(str(found[0]))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    for t in GGMLType:
        assert library.ggml_type_name(int(t)).decode().upper() == t.name.upper()
        assert (library.ggml_blck_size(int(t)), library.ggml_type_size(int(t))) == (t.block_size, t.block_bytes)
    for number in REMOVED_TYPES:
        assert library.ggml_blck_size(number) == 0
    assert sorted([*GGMLType, *REMOVED_TYPES]) == list(range(43))


def write_parts(directory: Path, n_parts: int = 3, **changes: Any) -> list[Path]:
    """Write a model in parts, as gguf-split does; `changes` replaces metadata of the second part."""
    paths = []
    for i in range(n_parts):
        metadata: dict[str, Any] = {"general.architecture": "llama"} if i == 0 else {}
        metadata |= {"split.no": Typed(ValueType.UINT16, i), "split.count": Typed(ValueType.UINT16, n_parts)}
        metadata["split.tensors.count"] = Typed(ValueType.INT32, n_parts - 1)
        if i == 1:
            metadata |= {f"split.{name}": value for name, value in changes.items()}
        tensors = {f"t{i}": np.full(4, i, np.float32)} if i else {}
        paths.append(write_gguf(directory / f"m-{i + 1:05}-of-{n_parts:05}.gguf", metadata, tensors))
    return paths


def test_a_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    """The first part finds the others; tensors know their shard; sizes add up; the hash covers all headers."""
    paths = write_parts(tmp_path)
    gguf = read_gguf(paths[0])
    assert gguf.paths == tuple(paths)
    assert {name: tensor.shard for name, tensor in gguf.tensors.items()} == {"t1": 1, "t2": 2}
    assert gguf.n_bytes == sum(path.stat().st_size for path in paths)
    assert np.frombuffer(gguf.read_tensor_bytes("t2"), np.float32).tolist() == [2, 2, 2, 2]
    write_gguf(paths[2], {"split.no": 2, "split.count": 3, "extra": 1}, {"t2": np.full(4, 2, np.float32)})
    assert read_gguf(paths[0]).header_hash != gguf.header_hash


def test_a_later_part_asks_for_the_first(tmp_path: Path) -> None:
    """Given part 2 of 3, the refusal names the file to pass."""
    with pytest.raises(ModelFormatError, match=r"part 2 of a model in 3 parts.*pass m-00001-of-00003\.gguf"):
        read_gguf(write_parts(tmp_path)[1])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Without its last part, a split model is not found, and the message has the name that is missing."""
    paths = write_parts(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00003-of-00003\.gguf"):
        read_gguf(paths[0])


def test_a_renamed_first_part_is_told_its_name(tmp_path: Path) -> None:
    """A first part whose name does not lead to the others says what it must be called."""
    renamed = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFormatError, match=r"model-00001-of-00003\.gguf.*rename"):
        read_gguf(renamed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no": 2}, "says part 3 of 3, expected part 2 of 3"),
        ({"count": 4}, "says part 2 of 4, expected part 2 of 3"),
        ({"no": "1"}, "split.no is '1', expected 0 to"),
        ({"count": -1}, "split.count is -1"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A part whose metadata contradicts its name is refused."""
    with pytest.raises(ModelFormatError, match=message):
        read_gguf(write_parts(tmp_path, **changes)[0])


def test_parts_of_two_models_are_refused(tmp_path: Path) -> None:
    """A tensor in two parts, or another number of tensors than the first part says, is refused."""
    paths = write_parts(tmp_path)
    part = {"split.no": 2, "split.count": 3}
    write_gguf(paths[2], part, {"t1": np.zeros(4, np.float32)})
    with pytest.raises(ModelFormatError, match="tensor 't1' is in an earlier part"):
        read_gguf(paths[0])
    write_gguf(paths[2], part, {"t2": np.zeros(4, np.float32), "t3": np.zeros(4, np.float32)})
    with pytest.raises(ModelFormatError, match="3 parts hold 3 tensors, expected 2"):
        read_gguf(paths[0])


def test_a_file_that_shrank_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Reading a tensor from a file that was cut after it was opened is a ModelFormatError; so is a lost file."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": np.zeros(1000, np.float32)})
    gguf = read_gguf(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelFormatError, match="got shorter since it was opened"):
        gguf.read_tensor_bytes("t")
    path.unlink()
    with pytest.raises(ModelNotFoundError, match="no such file"):
        gguf.read_tensor_bytes("t")
    with pytest.raises(ModelFormatError, match="no tensor 'other'"):
        gguf.read_tensor_bytes("other")


@pytest.mark.skipif(os.name == "nt", reason="sparse files need a file system that makes them")
def test_a_lost_tensor_costs_no_memory(tmp_path: Path) -> None:
    """A tensor of 1 GB that is no longer in the file is refused before memory for it is taken."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": RawTensor(GGMLType.F32, (2**28,), b"")})
    os.truncate(path, 2**30 + 1000)
    gguf = read_gguf(path)
    os.truncate(path, 1000)
    tracemalloc.start()
    with pytest.raises(ModelFormatError, match="got shorter"):
        gguf.read_tensor_bytes("t")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.parametrize("n_left", [10, 30, 100])
def test_a_header_that_shrinks_while_it_is_read_is_refused(n_left: int) -> None:
    """When fewer bytes arrive than the size promised at the start, the header is refused."""
    data = build_gguf({"general.name": "x" * 200}).data
    with pytest.raises(ModelFormatError, match="got shorter while it was read"):
        read_header(BytesIO(data[:n_left]), len(data), "m.gguf")


@contextlib.contextmanager
def failing_reads(path: Path, error: Exception) -> Iterator[None]:
    """Let every read of a file opened meanwhile raise `error`."""

    class BrokenFile(BytesIO):
        def fileno(self) -> int:
            return file.fileno()

        def read(self, size: int | None = -1, /) -> bytes:
            raise error

    with path.open("rb") as file, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Path, "open", lambda self, mode: BrokenFile())
        yield


def test_a_failing_disk_is_a_storage_error(tmp_path: Path) -> None:
    """An I/O error while reading becomes a StorageError that says what the system said."""
    path = write_gguf(tmp_path / "m.gguf", {})
    with failing_reads(path, OSError(5, "Input/output error")), pytest.raises(StorageError, match="Input/output error"):
        read_gguf(path)


def test_a_tensor_too_large_for_the_memory_is_a_memory_cap_error(tmp_path: Path) -> None:
    """When the system has no memory for a tensor, MemoryCapError names it and its size."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": np.zeros(4, np.float32)})
    gguf = read_gguf(path)
    with failing_reads(path, MemoryError()), pytest.raises(MemoryCapError, match="16 bytes for tensor 't'"):
        gguf.read_tensor_bytes("t")


def test_a_file_without_permission_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be opened is a StorageError that says so."""

    def refuse(self: Path, mode: str) -> BinaryIO:
        raise PermissionError(13, "Permission denied")

    path = write_gguf(tmp_path / "m.gguf", {})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=r"no permission to read it \(Permission denied\)"):
        read_gguf(path)


def test_long_values_are_short_in_messages() -> None:
    """What a message shows of a value is one short line, whatever the file holds."""
    assert show("a\n" * 1000) == repr("a\n" * 30)
    assert len(show(GGUFArray(ValueType.STRING, 0, bytes(10**6)))) < 100


@pytest.mark.parametrize(("n_tensors", "n_keys"), [(2**60, 0), (0, 2**60), (2**63, 2**64 - 1), (5, 5)])
def test_claims_cost_nothing(tmp_path: Path, n_tensors: int, n_keys: int) -> None:
    """A 100-byte file that claims 2^60 entries is refused at once, without memory for them."""
    path = write_gguf(tmp_path / "m.gguf", {"k": "x" * 60}, (), Claims(n_tensors=n_tensors, n_keys=n_keys))
    tracemalloc.start()
    with at_most_lines(1000), pytest.raises(ModelFormatError):
        read_gguf(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.model
def test_smollm2_reads_as_gguf_dump_shows_it() -> None:
    """The real SmolLM2 135M has the tensors and values that llama.cpp's gguf-dump prints."""
    gguf = read_gguf(real_model("smollm2-135m.gguf"))
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    assert (gguf.version, gguf.alignment, len(gguf.tensors), len(gguf.metadata)) == (3, 32, 272, 33)
    assert gguf.metadata["llama.attention.head_count_kv"] == 3
    assert isinstance(tokens, GGUFArray)
    assert (len(tokens), tokens.tolist()[:3]) == (49152, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert gguf.tensors["token_embd.weight"] == TensorInfo(
        "token_embd.weight", (576, 49152), GGMLType.Q8_0, 1785664, 30081024, 0
    )
    norm = np.frombuffer(gguf.read_tensor_bytes("output_norm.weight"), np.float32)
    assert norm.shape == (576,)
    assert np.isfinite(norm).all()


def test_the_tiny_model_of_the_tests_is_sound(tmp_path: Path) -> None:
    """The writer's own tiny model reads back with all of its tensors."""
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", *tiny_text_model()))
    assert len(gguf.tensors) == 5


def one_by_one(buffer: bytes, start: int, n: int) -> list[int]:
    """Return what string_offsets does, by its definition."""
    offsets = [start]
    for _ in range(n):
        head = buffer[offsets[-1] : offsets[-1] + 8]
        end = offsets[-1] + 8 + int.from_bytes(head, "little")
        if len(head) < 8 or end > len(buffer):
            break
        offsets.append(end)
    return offsets


def packed(strings: list[bytes]) -> bytes:
    """Return strings as a GGUF has them."""
    return b"".join(struct.pack("<Q", len(string)) + string for string in strings)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.text().map(str.encode), st.integers(0, 300).map(bytes)), max_size=60),
    st.binary(max_size=9),
    st.integers(0, 400),
    st.integers(-2, 2),
)
@example([b"a", b"", b"\0", b"b" * 255, b"c" * 256, b"d"], b"", 0, 0)
@example([b"\0" * 8] * 40, b"\0", 3, 1)
def test_offsets_are_those_of_single_steps(strings: list[bytes], before: bytes, cut: int, more: int) -> None:
    """Empty, long and zero-filled strings, a start in the middle, a cut buffer and a wrong count change nothing."""
    whole = before + packed(strings)
    for buffer in (whole, whole[: max(len(before), len(whole) - cut)]):
        n = max(0, len(strings) + more)
        assert string_offsets(buffer, len(before), n).tolist() == one_by_one(buffer, len(before), n)


@pytest.mark.slow
def test_more_strings_than_a_block_holds() -> None:
    """Blocks and steps join without a gap, in ordinary vocabularies and in ones made to defeat the search."""
    n = 3 * STRING_BLOCK_BYTES // 16
    for strings in ([b"token"] * n, [b"\0" * 8] * n, [b"x", b"\0\0", b"y" * 600] * (n // 3), [b""] * n):
        buffer = packed(strings)
        assert string_offsets(buffer, 0, len(strings)).tolist() == one_by_one(buffer, 0, len(strings))


@pytest.mark.slow
def test_a_length_beyond_all_bounds_ends_the_search() -> None:
    """2^64 - 1 does not wrap around."""
    buffer = packed([b"ab"]) + b"\xff" * 8 + bytes(100)
    assert string_offsets(buffer, 0, 5).tolist() == [0, 10]
    assert string_offsets(buffer, len(buffer) + 7, 5).tolist() == [len(buffer) + 7]
