"""Export to GGUF of another type, with llama.cpp's quantizer in its own process, and in several steps."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.forwards import all_logits, distance
from support.models.hf_checkpoints import TinyHF, write_checkpoint
from support.models.tiny_quantized import Tiny, write_tiny
from support.processes.command_line import run_here

from edgedec.errors import (
    CancelledError,
    EdgedecError,
    ModelFormatError,
    RequestError,
    RuntimeUnavailableError,
    StorageError,
)
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES
from edgedec.progress import CancelToken, Progress
from edgedec_export import requantize as module
from edgedec_export.requantize import TYPES, requantize
from edgedec_export.to_gguf import export_gguf
from edgedec_runtimes.cpu.runtime import Cpu

TOKENS = np.random.default_rng(1).integers(0, 260, 24).astype(np.int32)


def types_of(path: Path) -> set[str]:
    """Return the types of a file's matrices."""
    return {tensor.type.name for tensor in read_gguf(path).tensors.values() if len(tensor.shape) > 1}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model in F32."""
    return write_tiny(tmp_path_factory.mktemp("floats") / "floats.gguf", Tiny())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected", "bound"), [("q4_k_m", {"Q4_K", "Q6_K"}, 0.4), ("Q8_0", {"Q8_0"}, 0.06)])
def test_types_are_named_as_users_know_them(
    tmp_path: Path, floats: Path, name: str, expected: set[str], bound: float
) -> None:
    """The result has llama.cpp's mix of types, names it, and computes nearly the same; progress ends at the whole."""
    seen: list[Progress] = []
    out = requantize(floats, tmp_path / "m.gguf", name, on_progress=seen.append)
    assert types_of(out) == expected
    assert FILE_TYPE_NAMES[int(str(read_gguf(out).metadata["general.file_type"]))] == name.upper()
    assert distance(all_logits(Cpu(), out, TOKENS), all_logits(Cpu(), floats, TOKENS)) < bound
    total = sum(tensor.n_bytes for tensor in read_gguf(floats).tensors.values())
    assert (seen[0].done, seen[-1].done, seen[-1].total) == (0, total, total)
    assert {progress.detail for progress in seen} == {floats.name}  # one name: a bar for each tensor would stay
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.slow
def test_quantized_matrices_are_quantized_again_only_when_allowed(tmp_path: Path) -> None:
    """The refusal names a tensor and its type; if allowed, the quantizer takes them."""
    path = write_tiny(tmp_path / "q.gguf", Tiny(types=("Q8_0",)))
    with pytest.raises(RequestError, match=r"'token_embd.weight' is Q8_0 already.*allow_requantize"):
        requantize(path, tmp_path / "m.gguf", "Q4_0")
    assert types_of(requantize(path, tmp_path / "m.gguf", "Q4_0", allow_requantize=True)) == {"Q4_0", "Q6_K"}


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, floats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown types, types that need an importance matrix, a taken name and a missing library are refused."""
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("the quantizer ran"))
    for name in ("Q4", "IQ1_S", "Q2_K_S"):
        with pytest.raises(RequestError, match=f"type '{name}': expected one of F32"):
            requantize(floats, tmp_path / "m.gguf", name)
    with pytest.raises(RequestError, match="this is the model to export"):
        requantize(floats, floats, "Q8_0", force=True)
    monkeypatch.setattr(module, "installed", lambda: False)
    with pytest.raises(RuntimeUnavailableError, match=r'pip install "llama-cpp-python<0.3.37,>=0.3.36"'):
        requantize(floats, tmp_path / "m.gguf", "Q8_0")
    assert set(TYPES) <= set(FILE_TYPE_NAMES.values())


@pytest.mark.slow
def test_what_the_quantizer_says_is_in_the_error(tmp_path: Path, floats: Path) -> None:
    """An unknown model fails with the quantizer's reason and leaves no files."""
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(floats.read_bytes().replace(b"llama", b"lxama"))
    with pytest.raises(ModelFormatError, match=r"cannot quantize it \(unknown model architecture: 'lxama'\)"):
        requantize(damaged, tmp_path / "n.gguf", "Q8_0")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let this code run in place of the quantizer, with the same arguments in sys.argv."""
    script = tmp_path / "child.py"
    script.write_text("import os, sys, time\nsource, target = sys.argv[1:3]\n" + code)
    (tmp_path / "python").write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))


posix = pytest.mark.skipif(os.name != "posix", reason="a shell script stands for the interpreter")


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("code", "free", "error", "reason"),
    [
        ("os.abort()", 10**12, RuntimeUnavailableError, "ended with status -6"),
        ("print('GGML_ASSERT(x) failed', file=sys.stderr); os.abort()", 10**12, RuntimeUnavailableError, "GGML_ASSERT"),
        ("open(target, 'wb').write(b'GGUF'); sys.exit(0)", 10**12, ModelFormatError, "part"),
        ("print('failed to quantize: iostream error'); sys.exit(1)", 1000, StorageError, "the disk is full"),
    ],
)
def test_an_end_of_the_quantizer_is_an_error_here(
    tmp_path: Path,
    floats: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    free: int,
    error: type[EdgedecError],
    reason: str,
) -> None:
    """An abort with its output, an unreadable result and a full disk are errors that leave no file."""
    child(monkeypatch, tmp_path, code)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))
    with pytest.raises(error, match=reason):
        requantize(floats, tmp_path / "m.gguf", "Q8_0")
    assert not list(tmp_path.glob("m.gguf*"))


@pytest.mark.slow
@posix
def test_cancelling_ends_the_process(tmp_path: Path, floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the error is raised, the quantizer has ended and its file is gone."""
    child(monkeypatch, tmp_path, "open(target, 'wb').write(b'x')\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    cancel = CancelToken()

    def stop() -> None:
        while not list(tmp_path.glob("*.part")):
            time.sleep(0.01)
        cancel.cancel()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(CancelledError):
        requantize(floats, tmp_path / "m.gguf", "Q8_0", cancel=cancel)
    thread.join()
    assert not list(tmp_path.glob("m.gguf*"))


@pytest.mark.slow
@posix
def test_ctrl_c_ends_the_process(tmp_path: Path, floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches this process only, which ends the quantizer and cleans up."""
    child(monkeypatch, tmp_path, "open(target, 'wb').write(b'x')\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    pids: list[int] = []

    def follow(gguf: object, stdout: object, on_progress: object) -> object:
        pids.append(int(next(iter(stdout))))  # type: ignore[call-overload]  # it is a stream of lines
        signal.raise_signal(signal.SIGINT)
        return pytest.fail("the signal was not seen")

    monkeypatch.setattr(module, "_follow", follow)
    with pytest.raises(KeyboardInterrupt):
        requantize(floats, tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert not list(tmp_path.glob("m.gguf*"))


@pytest.mark.slow
def test_steps_follow_each_other(tmp_path: Path) -> None:
    """One call takes a checkpoint, keeps layers and converts to a type of llama.cpp; no files between are left."""
    write_checkpoint(tmp_path / "hf", TinyHF(n_layer=4, n_embd=256, n_ff=256, head_dim=64, dtype="BF16"))
    out = export_gguf(tmp_path / "hf", tmp_path / "m.gguf", type_name="q4_k_m", layers="0,2-3")
    assert types_of(out) <= {"Q4_K", "Q6_K"}
    assert read_gguf(out).metadata["llama.block_count"] == 3
    assert read_gguf(out).metadata["general.name"] == "hf (layers 0,2-3 of 4)"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_a_checkpoint_alone_keeps_its_types(tmp_path: Path) -> None:
    """A checkpoint is converted without options; a GGUF needs a type or layers."""
    write_checkpoint(tmp_path / "hf", TinyHF(dtype="F16"))
    assert types_of(export_gguf(tmp_path / "hf", tmp_path / "m.gguf")) == {"F16"}
    assert types_of(export_gguf(tmp_path / "hf", tmp_path / "q.gguf", type_name="Q8_0")) == {"Q8_0"}
    with pytest.raises(RequestError, match="nothing to do, expected a type"):
        export_gguf(tmp_path / "m.gguf", tmp_path / "n.gguf")
    with pytest.raises(RequestError, match="type 'Q9': expected one of"):
        export_gguf(tmp_path / "m.gguf", tmp_path / "n.gguf", type_name="Q9")
    with pytest.raises(RequestError, match="the file exists"):
        export_gguf(tmp_path / "hf", tmp_path / "m.gguf")


def test_the_command_says_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named after the model and the options; --json prints its facts."""
    write_checkpoint(tmp_path / "Tiny-0.1B", TinyHF(n_layer=3, dtype="F16"))
    monkeypatch.chdir(tmp_path)
    result = run_here("export", "Tiny-0.1B", "--to", "gguf", "--layers", "0, 2", "--type", "q8_0", "--json", "--quiet")
    assert (result.code, result.err) == (0, ""), result
    out = Path("Tiny-0.1B-layers-0,2-Q8_0.gguf")
    facts = {"model": "Tiny-0.1B", "file": str(out), "bytes": out.stat().st_size, "type": "Q8_0", "n_layer": 2}
    facts |= {"embeds": False}
    assert json.loads(result.out) == facts
    result = run_here("export", "Tiny-0.1B", "--to", "gguf", "--out", "m.gguf")
    assert (result.code, result.out) == (0, b""), result
    assert result.err.splitlines()[-1].endswith(", F16, 3 layers; run it with: edgedec run m.gguf")


def test_the_command_refuses_options_of_the_other_format(floats: Path) -> None:
    """--quant and --kv belong to ONNX, --type, --layers and --allow-requantize to GGUF; other formats are refused."""
    code = RequestError.exit_code
    run_here("export", floats, "--to", "gguf", "--kv", "int8").failed(
        code, "--quant, --kv and --target are for --to onnx"
    )
    run_here("export", floats, "--layers", "1").failed(code, "are for --to gguf")
    run_here("export", floats, "--to", "safetensors").failed(code, "it must be onnx or gguf")
    run_here("export", floats, "--to", "gguf").failed(code, "nothing to do, expected a type")
