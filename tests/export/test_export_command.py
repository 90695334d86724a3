"""Exports to ONNX, from Python and from the command line: the folder, refusals, and that no half-written file stays."""

import errno
import hashlib
import json
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.processes.command_line import PATIENCE_S, names, run_here
from support.processes.installed import with_plugin
from support.processes.rights import as_anybody

from edgedec import __version__, plugins
from edgedec.errors import (
    CancelledError,
    EdgedecError,
    ModelFormatError,
    ModelNotFoundError,
    OfflineError,
    RequestError,
    RuntimeUnavailableError,
    StorageError,
    UnsupportedModelError,
)
from edgedec.gguf.file import DATA, MANIFEST, read_gguf
from edgedec.progress import CancelToken, Progress
from edgedec_export import positions
from edgedec_export.folder import new_folder, read_manifest
from edgedec_export.npu.export import export_npu
from edgedec_export.onnx_graph.external_data import ALIGNMENT, DataFile
from edgedec_export.to_onnx import export_onnx
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.architectures.architecture import SINKS, Architecture
from edgedec_runtimes.trained_heads.target import exported_hashes, target_of

onnx = pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

SUNKEN = Architecture(vectors=frozenset({SINKS}))
FILES = ["edgedec.json", "model.onnx", "model.onnx.data", "vocabulary.gguf"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "Tiny Model.gguf", n_layer=1)


def test_the_folder_and_its_manifest(model: Path, tmp_path: Path) -> None:
    """An export has four files; the manifest's sizes, hashes and facts of the model are true."""
    folder = export_onnx(model, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(folder) == FILES
    facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name, entry in facts.pop("files").items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {entry["method"] for entry in facts.pop("matrices").values()} == {"exact"}
    gguf = read_gguf(model)
    assert facts == {
        "format": 1,
        "target": "cpu",
        "quant": "exact",
        "kv": "f32",
        "edgedec": __version__,
        "source": {"name": "Tiny Model.gguf", "sha256_of_header": gguf.header_hash, "bytes": gguf.n_bytes},
        "architecture": "llama",
        "n_layer": 1,
        "n_vocab": 260,
        "n_embd": 64,
        "n_head_kv": 2,
        "head_dim": 16,
        "local_layers": [],
    }


@pytest.mark.slow
def test_two_exports_have_the_same_bytes(tmp_path: Path) -> None:
    """Two exports of a model with matrices of several types are equal in every file."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(types=("Q4_K", "Q6_K", "Q8_0"), tied=True))
    first, second = (export_onnx(path, tmp_path / name, quant="balanced") for name in ("first", "second"))
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_vocabulary_has_all_metadata_and_no_tensors(tmp_path: Path) -> None:
    """It has every key with its type and value, except keys of a split, and the hashes of the source's weights."""
    metadata = tiny_metadata(Tiny()) | {"split.count": 1, "general.alignment": 64, "general.languages": ["en", "fr"]}
    path = write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors(Tiny()))
    source, found = read_gguf(path), read_gguf(export_onnx(path, tmp_path / "out") / "vocabulary.gguf")
    expected = {key: value for key, value in source.metadata.items() if key != "split.count"}
    assert found.metadata == expected | exported_hashes(source, "")
    assert target_of(found) == replace(target_of(source), name=target_of(found).name)
    assert found.tensors == {}


def test_arrays_lie_aligned_one_behind_the_other(tmp_path: Path) -> None:
    """Each array begins at the next multiple of 4,096; a tied head takes no bytes of its own."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(types=("Q4_K",), tied=True, n_layer=1))
    folder = export_onnx(path, tmp_path / "out")
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    places = {}
    for tensor in external:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == DATA
        places[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    assert places["token_embd.weight.rows"] == places["token_embd.weight.data"]
    end = 0
    for offset, length in sorted(set(places.values())):
        assert offset == -(-end // ALIGNMENT) * ALIGNMENT
        end = offset + length
    assert (folder / DATA).stat().st_size == end
    assert all(len(tensor.raw_data) <= 1024 for tensor in graph.initializer)


def test_a_data_file_writes_any_array(tmp_path: Path) -> None:
    """An array is written little endian and in C order, whatever its byte order and strides in memory are.

    The hash is that of the file.
    """
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    with DataFile(tmp_path / "data") as data:
        assert data.append(np.zeros(3, np.uint8)).offset == 0
        place = data.append(array)
    written = (tmp_path / "data").read_bytes()
    assert (place.offset, place.n_bytes) == (ALIGNMENT, 24)
    assert np.frombuffer(written[ALIGNMENT:], "<i4").tolist() == [0, 3, 1, 4, 2, 5]
    assert data.sha256 == hashlib.sha256(written).hexdigest()


def test_progress_ends_with_all_bytes(model: Path, tmp_path: Path) -> None:
    """Progress grows, and the last report counts the whole model."""
    seen: list[Progress] = []
    export_onnx(model, tmp_path / "out", on_progress=seen.append)
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total == sum(tensor.n_bytes for tensor in read_gguf(model).tensors.values())


def test_cancelling_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """An export that is cancelled leaves no files, and an earlier export as it is."""
    kept = export_onnx(model, tmp_path / "out")
    before = {name: (kept / name).read_bytes() for name in FILES}
    cancel = CancelToken()

    def stop(progress: Progress) -> None:
        if progress.done > progress.total // 2:  # type: ignore[operator]  # the total is known
            cancel.cancel()

    for out in ("out", "other"):
        with pytest.raises(CancelledError, match="exporting Tiny Model"):
            export_onnx(model, tmp_path / out, force=True, on_progress=stop, cancel=cancel)
    assert names(tmp_path) == ["out"]
    assert {name: (kept / name).read_bytes() for name in FILES} == before


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "No space left.*; make room"), (errno.EIO, "cannot be written: Input/output")]
)
def test_a_failing_disk_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """An error of the system while the third array is written leaves no files."""
    append, calls = DataFile.append, []

    def failing(self: DataFile, array: Any) -> Any:
        calls.append(array)
        if len(calls) == 3:
            raise OSError(code, "Input/output error" if code == errno.EIO else "No space left on device")
        return append(self, array)

    monkeypatch.setattr(DataFile, "append", failing)
    with pytest.raises(StorageError, match=words):
        export_onnx(model, tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of folders are a matter of POSIX")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """The error names the folder and says what to do."""
    closed = tmp_path / "closed"
    closed.mkdir(0o555)
    with (
        as_anybody(),
        pytest.raises(StorageError, match=r"cannot be written: Permission denied.*--out"),
        new_folder(closed / "out", force=False),
    ):
        raise AssertionError("it could be made")


def test_what_is_there_stays(model: Path, tmp_path: Path) -> None:
    """A file, another folder, an export without force and a link to an export are not replaced."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    export_onnx(model, tmp_path / "export")
    (tmp_path / "link").symlink_to("export")
    for name in ("file", "folder", "link"):
        with pytest.raises(RequestError, match="exists and is not an export"):
            export_onnx(model, tmp_path / name, force=True)
    with pytest.raises(RequestError, match="already holds an export; replace it with --force"):
        export_onnx(model, tmp_path / "export")
    assert names(tmp_path) == ["export", "file", "folder", "link"]


def test_force_replaces_an_export(model: Path, tmp_path: Path) -> None:
    """With force an export is replaced, and so are other files in its folder."""
    out = export_onnx(model, tmp_path / "out")
    (out / "report.md").write_text("old")
    export_onnx(model, out, quant="small", force=True)
    facts = read_manifest(out)
    assert facts is not None
    assert facts["quant"] == "small"
    assert (names(out), names(tmp_path)) == (FILES, ["out"])


def test_what_the_cpu_runtime_refuses_is_refused(tmp_path: Path) -> None:
    """Architectures, keys, tensors and types that the cpu runtime does not know are refused; nothing is written."""
    tensors, metadata = tiny_tensors(Tiny()), tiny_metadata(Tiny())
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("the architecture is 'mamba'", {"general.architecture": "mamba"}, {}),
        ("does not know 'llama.expert_count'", {"llama.expert_count": 8}, {}),
        ("no use for tensor 'blk.9.attn_q.weight'", {}, {"blk.9.attn_q.weight": tensors["blk.0.attn_q.weight"]}),
        ("'blk.0.attn_q.weight' is Q2_K", {}, {"blk.0.attn_q.weight": RawTensor(10, (256, 256), bytes(84 * 256))}),
    ]
    for words, keys, others in cases:
        path = write_gguf(tmp_path / "m.gguf", metadata | keys, tensors | others)
        with pytest.raises(UnsupportedModelError, match=words):
            export_onnx(path, tmp_path / "out")
        assert names(tmp_path) == ["m.gguf"]


@pytest.mark.slow
def test_what_graphs_do_not_have_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divisors for short and long contexts, sinks, experts, a later switch."""
    folder = tmp_path_factory.mktemp("plugins")
    with_plugin(monkeypatch, folder, plugins.ARCHITECTURES, "sunken", f"{__name__}:SUNKEN")
    monkeypatch.setattr(positions, "_HONOURED", positions._HONOURED - {"residual_scale"})
    for tiny, words in (
        (ARCHITECTURES["phi3"], r"it has 'rope_factors_short\.weight', by which positions turn otherwise"),
        (Tiny("sunken", vectors=(SINKS,)), r"it has 'blk\.0\.attn_sinks\.weight', for which graphs have no operation"),
        (ARCHITECTURES["olmoe"], r"it has 'blk\.0\.ffn_gate_inp\.weight', for which graphs have no operation"),
        (ARCHITECTURES["nanbeige"], "its layers run 2 times, and a graph runs them once"),
        (ARCHITECTURES["granite"], "the architecture 'granite' sets 'residual_scale', which graphs do not have"),
    ):
        path = write_tiny(tmp_path / "m.gguf", tiny)
        with pytest.raises(UnsupportedModelError, match=words):
            export_onnx(path, tmp_path / "out")
        assert names(tmp_path) == ["m.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith(("llama", "qwen"))])
def test_architectures_of_few_users(tmp_path: Path, name: str) -> None:
    """The export for an NPU names the architecture, those it takes and what runs the file; trainers take more."""
    tiny = replace(ARCHITECTURES[name], n_layer=8, types=("Q4_0",))
    path = write_tiny(tmp_path / "m.gguf", tiny)
    with pytest.raises(UnsupportedModelError, match=f"is '{tiny.architecture}'; this export takes llama, qwen2, qwen3"):
        export_npu(path, tmp_path / "out")
    assert names(tmp_path) == ["m.gguf"]
    if tiny.architecture == "mamba2":
        with pytest.raises(UnsupportedModelError, match="no layer of mamba2 has attention"):
            TargetParts.of(read_gguf(path))
        return
    if tiny.architecture not in ("granite", "granitehybrid", "granitemoe", "gemma2", "gemma4", "minicpm"):
        assert TargetParts.of(read_gguf(path)).network.architecture == tiny.architecture
        return
    with pytest.raises(UnsupportedModelError, match=f"{tiny.architecture} scales or caps its logits"):
        TargetParts.of(read_gguf(path))


def test_an_npu_takes_no_yarn(tmp_path: Path) -> None:
    """As its graphs multiply no rotated element."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(), metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModelError, match="its rope scaling is yarn or longrope"):
        export_npu(path, tmp_path / "out")


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    """A missing file, a text, a missing tensor and a vector with NaN are refused."""
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        export_onnx(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelFormatError, match="expected a GGUF model"):
        export_onnx(tmp_path / "text.gguf", tmp_path / "out")
    tensors = tiny_tensors(Tiny())
    broken = np.full(256, np.nan, np.float32)
    cases = {"no tensor 'output_norm": {}, "holds NaN or an infinity": {"output_norm.weight": broken}}
    for words, others in cases.items():
        rest = {name: tensor for name, tensor in tensors.items() if name != "output_norm.weight"}
        path = write_gguf(tmp_path / "m.gguf", tiny_metadata(Tiny()), rest | others)
        with pytest.raises(ModelFormatError, match=words):
            export_onnx(path, tmp_path / "out")
    assert names(tmp_path) == ["m.gguf", "text.gguf"]


def test_without_onnx_the_extra_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package onnx, the error names the extra before anything is read or written."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(RuntimeUnavailableError, match=r'pip install "onnx>=1.17"'):
        export_onnx(model, tmp_path / "out")
    assert names(tmp_path) == []


def test_the_command_says_where_the_export_is(model: Path, tmp_path: Path) -> None:
    """The command prints the folder on standard error, and nothing on standard output."""
    result = run_here("export", model, "--out", tmp_path / "out", "--no-report")
    assert (result.code, result.out) == (0, b""), result
    assert result.err.splitlines()[-1].startswith(f"{tmp_path / 'out'}: ")
    assert result.err.splitlines()[-1].endswith(f"run it with: edgedec run {tmp_path / 'out'}")


@pytest.mark.slow
def test_the_commands_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--json prints the manifest and the folder; without --out that is named after the model, in the current folder."""
    path = write_tiny(tmp_path / "gemma.gguf", ARCHITECTURES["gemma3"])
    monkeypatch.chdir(tmp_path)
    result = run_here("export", path, "--quant", "balanced", "--no-report", "--json", "--quiet")
    assert (result.code, result.err) == (0, ""), result
    found = json.loads(result.out)
    assert (found["folder"], found["quant"], found["local_layers"]) == ("gemma-onnx", "balanced", [0, 1, 2, 3, 4])
    assert found["bytes"] == sum((tmp_path / "gemma-onnx" / name).stat().st_size for name in FILES[1:])


@pytest.mark.slow
def test_the_report(tmp_path: Path) -> None:
    """The report compares with the source; exact weights differ only by the rounding of activations."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(types=("Q4_0",)))
    result = run_here("export", path, "-o", tmp_path / "out")
    assert (result.code, result.out) == (0, b""), result
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["bytes"] == sum((tmp_path / "out" / name).stat().st_size for name in FILES[1:])
    assert report["source_bytes"] == path.stat().st_size
    assert 0 < report["quality"]["kl_mean"] < 0.01
    assert report["quality"]["n_positions"] > 900
    assert list(report["seconds"]) == list("1248")
    assert all(sorted(times) == ["export", "source"] for times in report["seconds"].values())
    lines = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").splitlines()
    shown = f"{100 * report['quality']['top1']:.2f} % of {report['quality']['n_positions']}"
    assert f"| same most probable token | {shown} |" in lines
    assert shown in result.err
    assert names(tmp_path / "out") == sorted([*FILES, "report.json", "report.md"])


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no program that fails")
def test_an_export_that_can_not_be_measured_is_complete(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If measuring fails in its process, the error is printed, and the export stays without a report."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    result = run_here("export", model, "-o", tmp_path / "out")
    assert result.code == 0
    assert "the export is complete, but could not be measured: exit code 1" in result.err
    assert names(tmp_path / "out") == FILES


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the weights are written leaves no files."""
    append, cancel, seen = DataFile.append, CancelToken.cancel, threading.Event()

    def note(token: CancelToken) -> None:
        cancel(token)
        seen.set()

    def interrupting(self: DataFile, array: Any) -> Any:
        if self.n_bytes and not seen.is_set():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            assert seen.wait(PATIENCE_S)
        return append(self, array)

    monkeypatch.setattr(CancelToken, "cancel", note)

    monkeypatch.setattr(DataFile, "append", interrupting)
    result = run_here("export", model, "-o", tmp_path / "out", "--quiet")
    result.failed(CancelledError.exit_code, "exporting Tiny Model.gguf: cancelled")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("model_name", "args", "error", "words"),
    [
        ("MODEL", "--to tflite", RequestError, ["--to is 'tflite'", "onnx"]),
        ("MODEL", "--quant best", RequestError, ["quant is 'best'", "balanced"]),
        ("none.gguf", "--offline", ModelNotFoundError, ["none.gguf"]),
        ("MODEL", "--target gpu", RequestError, ["must be cpu or npu"]),
        ("MODEL", "--target npu --quant small", RequestError, ["are for --target cpu"]),
        ("MODEL", "--to gguf --target npu", RequestError, ["are for --to onnx"]),
        ("MODEL", "--via magic", RequestError, ["--via is 'magic'; it must be optimum"]),
        ("MODEL", "--via optimum --to gguf", RequestError, ["leave out --to"]),
        ("MODEL", "--via optimum --quant small", RequestError, ["leave out --to, --quant"]),
        ("hf:a/b", "--via optimum --offline", OfflineError, ["optimum is not installed in"]),
    ],
)
def test_the_command_refuses(
    model: Path, tmp_path: Path, model_name: str, args: str, error: type[EdgedecError], words: list[str]
) -> None:
    """Unknown values, options of another kind of export, and fetching when offline; nothing is written."""
    name = model_name.replace("MODEL", str(model))
    run_here("export", name, *args.split(), "--out", tmp_path / "out").failed(error.exit_code, *words)
    assert names(tmp_path) == []


def test_info_of_an_export(model: Path, tmp_path: Path) -> None:
    """`edgedec info` shows the source's facts, the folder's size and its kind; it refuses a wrong manifest by name."""
    folder = export_onnx(model, tmp_path / "out")
    result = run_here("info", folder, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    sizes = [(folder / name).stat().st_size for name in FILES if name != MANIFEST]
    assert found["size_bytes"] == sum(sizes)
    assert found["quantization"] == "ONNX export for cpu, exact, KV cache f32"
    assert found["runtime_chosen"] == "onnx"
    assert found["n_layer"] == 1
    (folder / MANIFEST).write_text("{}", encoding="utf-8")
    run_here("info", folder).failed(ModelFormatError.exit_code, "edgedec.json can't be read")
