"""Exports that were cut short, changed or made by somebody else are refused before ONNX Runtime sees them.

The reader of graphs survives any bytes, and finds every tensor that lies outside.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.cut_files import cut_in_a_forward
from support.models.onnx_exports import DATA, GRAPH, Exporter, copied, load, manifest, rewritten

from edgedec.errors import CancelledError, EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken
from edgedec_runtimes.onnx.exported import read_export, verify_files
from edgedec_runtimes.onnx.graph_check import External, check_graph
from edgedec_runtimes.onnx.protobuf import fields
from edgedec_runtimes.onnx.runtime import Onnx


def with_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what edgedec.json says."""
    facts = manifest(folder)
    change(facts)
    (folder / "edgedec.json").write_text(json.dumps(facts), encoding="utf-8")


def refused(folder: Path, error: type[EdgedecError], said: str) -> None:
    """Assert that the export is refused with that error."""
    with pytest.raises(error, match=said):
        load(folder)


def flip(path: Path, at: int) -> None:
    """Change a byte of a file, whose size stays."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
@pytest.mark.parametrize("name", [GRAPH, DATA, "vocabulary.gguf"])
def test_a_changed_or_truncated_file_is_refused(exported: Exporter, tmp_path: Path, name: str) -> None:
    """A byte less, a byte changed and no file at all: each is told by the file's name."""
    folder = copied(exported().folder, tmp_path)
    whole = (folder / name).read_bytes()
    flip(folder / name, len(whole) - 1)
    refused(folder, EdgedecError, name.replace(".", r"\."))
    (folder / name).write_bytes(whole[:-1])
    refused(folder, EdgedecError, name.replace(".", r"\."))
    (folder / name).unlink()
    refused(folder, ModelNotFoundError, name.replace(".", r"\."))


def test_contents_are_read_once(exported: Exporter, tmp_path: Path) -> None:
    """With a cache the data file is read at the first load only, and again when its time of change differs."""
    folder, read = copied(exported().folder, tmp_path), list[str]()
    options = LoadOptions(cache_dir=tmp_path / "cache", on_progress=lambda p: read.append(p.detail))
    for times in (1, 1, 2):
        if times == 2:
            (folder / DATA).touch()
        export = read_export(folder)
        verify_files(export.folder, export.files, options)
        assert read.count(DATA) == times


def test_checking_can_be_cancelled(exported: Exporter) -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        load(exported().folder, cancel=token)


def test_links_out_of_the_folder_are_not_followed(exported: Exporter, tmp_path: Path) -> None:
    """A data file that is a link to another folder is refused; a link within the folder is none out of it."""
    folder = copied(exported().folder, tmp_path)
    (folder / DATA).rename(tmp_path / DATA)
    (folder / DATA).symlink_to(tmp_path / DATA)
    refused(folder, ModelFormatError, "link out of the folder")
    (folder / DATA).unlink()
    (tmp_path / DATA).rename(folder / "weights")
    (folder / DATA).symlink_to("weights")
    load(folder).close()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("location", "../model.onnx.data", "would read another file"),
        ("location", "/etc/passwd", "would read another file"),
        ("location", "*/_ORT_MEM_ADDR_/*", "would read another file"),
        ("location", "vocabulary.gguf", "would read another file"),
        ("offset", "99999999", "in a file of"),
        ("offset", "-4096", "in a file of"),
        ("length", "8", "in a file of"),
        ("checksum", "x", ""),
    ],
)
def test_weights_are_read_from_the_data_file_only(
    exported: Exporter, tmp_path: Path, key: str, value: str, said: str
) -> None:
    """A tensor that points elsewhere is refused although the manifest, forged as well, has the right hash."""
    import onnx

    folder = copied(exported().folder, tmp_path)
    graph = onnx.load(folder / GRAPH, load_external_data=False)
    tensor = next(t for t in graph.graph.initializer if t.external_data)
    entry = next((entry for entry in tensor.external_data if entry.key == key), None) or tensor.external_data.add()
    entry.key, entry.value = key, value
    rewritten(folder, GRAPH, graph.SerializeToString())
    if said:
        refused(folder, ModelFormatError, said)
    else:
        load(folder).close()


def test_tensors_of_attributes_and_branches_are_looked_at(exported: Exporter, tmp_path: Path) -> None:
    """A constant inside a branch of an If that lies outside the folder is refused, too."""
    import onnx

    folder = copied(exported().folder, tmp_path)
    graph = onnx.load(folder / GRAPH, load_external_data=False)
    branch = next(node for node in graph.graph.node if node.op_type == "If").attribute[0].g
    constant = onnx.TensorProto(name="c", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    constant.external_data.add(key="location", value="/etc/passwd")
    branch.node.append(onnx.helper.make_node("Constant", [], ["c"], value=constant))
    rewritten(folder, GRAPH, graph.SerializeToString())
    refused(folder, ModelFormatError, "'/etc/passwd'")


def test_operators_that_read_files_are_refused(exported: Exporter, tmp_path: Path) -> None:
    """EPContext names a file of its own; operators of foreign domains may do anything."""
    import onnx

    folder = copied(exported().folder, tmp_path)
    original = (folder / GRAPH).read_bytes()
    for operator, domain in (("EPContext", "com.microsoft"), ("Thing", "com.example")):
        graph = onnx.load_from_string(original)
        graph.graph.node.append(onnx.helper.make_node(operator, [], ["c"], domain=domain))
        rewritten(folder, GRAPH, graph.SerializeToString())
        refused(folder, ModelFormatError, "which exports don't have")


def test_a_foreign_onnx_model_is_told_what_to_do(exported: Exporter, tmp_path: Path) -> None:
    """A graph without our manifest, in a folder or alone, is refused with the command that makes one of ours."""
    shutil.copy(exported().folder / GRAPH, tmp_path / "other.onnx")
    for path in (tmp_path, tmp_path / "other.onnx"):
        with pytest.raises(UnsupportedModelError, match="edgedec export MODEL --to onnx"):
            read_export(path)
        assert "edgedec export" in (Onnx().accepts(path) or "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFormatError, match="a folder without an ONNX model"):
        read_export(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda facts: facts.update(format=2), UnsupportedModelError, "format 2, expected 1"),
        (lambda facts: facts.update(target="npu"), UnsupportedModelError, "target 'npu'"),
        (lambda facts: facts.update(n_layer=0), ModelFormatError, "n_layer is 0"),
        (lambda facts: facts.update(n_layer="2"), ModelFormatError, "n_layer is '2'"),
        (lambda facts: facts.update(n_layer=3), ModelFormatError, "inputs and outputs"),
        (lambda facts: facts.update(head_dim=32), ModelFormatError, "sizes are not those"),
        (lambda facts: facts.update(n_vocab=9), ModelFormatError, "sizes are not those"),
        (lambda facts: facts.update(local_layers=[9]), ModelFormatError, "local_layers"),
        (lambda facts: facts.update(architecture="gpt2"), ModelFormatError, "architecture"),
        (lambda facts: facts["files"].pop(GRAPH), ModelFormatError, "files is"),
        (lambda facts: facts["files"].pop(DATA), ModelFormatError, "expected no file beside the graph"),
        (lambda facts: facts["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}), ModelFormatError, r"\.\./x"),
        (lambda facts: facts["files"].update({"x": None}), ModelFormatError, "files"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(
    exported: Exporter, tmp_path: Path, change: Callable[[Any], None], error: type[EdgedecError], said: str
) -> None:
    """What it says is checked by itself, and against the graph."""
    folder = copied(exported().folder, tmp_path)
    with_manifest(folder, change)
    refused(folder, error, said)


def test_a_damaged_manifest_is_told(exported: Exporter, tmp_path: Path) -> None:
    """No JSON, and JSON of another kind."""
    folder = copied(exported().folder, tmp_path)
    for text, error in (("{", ModelFormatError), ("[1]", UnsupportedModelError), ("[" * 100000, ModelFormatError)):
        (folder / "edgedec.json").write_text(text, encoding="utf-8")
        refused(folder, error, "edgedec.json")


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
    return field(13, field(1, key.encode()) + field(2, value.encode()))


def outside(location: str = "model.onnx.data", offset: str = "0", length: str = "16") -> bytes:
    """Return a tensor f32[4] that lies in a file."""
    place = entry("location", location) + entry("offset", offset) + entry("length", length)
    return field(1, 4) + field(2, 1) + field(8, b"w") + place + field(14, 1)


def graph_with(*tensors: bytes) -> bytes:
    """Return a graph with these initializers."""
    return field(1, 10) + field(7, b"".join(field(5, tensor) for tensor in tensors))


def test_a_tensor_outside_is_found() -> None:
    """Name, place and length come back; one inside the graph does not."""
    inside = field(1, 2) + field(2, 1) + field(8, b"v") + field(9, bytes(8))
    assert check_graph(graph_with(outside(offset="4080"), inside), SIZES) == [External("w", 4080, 16)]
    assert check_graph(b"", SIZES) == []


@pytest.mark.parametrize(
    "graph",
    [
        graph_with(outside(offset="4081")),
        graph_with(outside(offset="18446744073709551616")),
        graph_with(outside(offset="０")),
        graph_with(outside(length="")),
        graph_with(outside("MODEL.ONNX.DATA")),
        graph_with(outside("./model.onnx.data")),
        graph_with(outside() + entry("location", "/etc/passwd")),
        graph_with(outside() + field(9, bytes(16))),
        graph_with(outside() + field(14, 0)),
        graph_with(outside()[:-2]),  # external data without the location flag
        graph_with(field(1, 4) + field(2, 1) + field(14, 1)),  # the flag alone
        graph_with(field(1, 2**64 - 1) + field(2, 1) + field(9, b"")),
        graph_with(*[field(1, 2**31)] * 1),
        graph_with(field(1, 2**40) + field(2, 1)),  # inside, without its data
        graph_with(field(1, 4) + field(2, 8) + field(6, b"text")),
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
    return Path(exported(n_layer=1).folder / "model.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file short")
def test_a_file_cut_short_in_a_forward_is_an_error(exported: Exporter, tmp_path: Path) -> None:
    """The forward that meets the missing pages fails, and so do all later ones."""
    folder = copied(exported(types=("Q4_K", "Q6_K")).folder, tmp_path)
    first, second = cut_in_a_forward("onnx", folder, folder / DATA)
    assert first == second
    assert first.startswith(f"{folder / DATA} was cut short or written to since it was loaded; ")
