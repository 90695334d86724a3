"""Export with optimum, where a stand-in for the packages writes a handmade graph; everything else is real.

`test_optimum_itself.py` runs the real packages.
"""

import json
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from support.models.foreign_graphs import counting_graph, counting_logits
from support.models.hf_checkpoints import N_VOCAB
from support.models.optimum_checkpoints import N_CTX, whole_tokenizer, write_config
from support.processes.command_line import PATIENCE_S, names, run_here

from edgedec.errors import (
    CancelledError,
    EdgedecError,
    ModelFormatError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken, Progress
from edgedec_export.optimum.environment import python_of
from edgedec_export.optimum.export import export_via_optimum, find_checkpoint
from edgedec_runtimes.onnx.runtime import Onnx

onnx = pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

FILES = ["edgedec.json", "model.onnx", "model.onnx.data", "vocabulary.gguf"]
WORDS = "hello world, hello world, hello"

# What stands in for transformers and optimum: it copies files that the checkpoint's folder holds.
TRANSFORMERS = """
import json, shutil
from pathlib import Path


class AutoConfig:
    def from_pretrained(folder, **options):
        assert options["trust_remote_code"] is False and options["local_files_only"] is True, options
        config = AutoConfig()
        config._commit_hash = None
        vars(config).update(json.loads((Path(folder) / "config.json").read_text()))
        return config

    def get_text_config(self):
        return self


class AutoTokenizer:
    def from_pretrained(folder, **options):
        tokenizer = AutoTokenizer()
        tokenizer.folder = Path(folder)
        return tokenizer

    def save_pretrained(self, out):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.folder / name, out)
"""
OPTIMUM = """
import shutil, subprocess, sys, time
from pathlib import Path

ASLEEP = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX)\\n"
ASLEEP += "f.write('asleep'); f.flush(); time.sleep(600)"


def main_export(folder, *, output, task, trust_remote_code, **options):
    assert (task, trust_remote_code) == ("text-generation-with-past", False)
    folder = Path(folder)
    if (folder / "asleep").exists():
        subprocess.run([sys.executable, "-c", ASLEEP, folder / "asleep"])
    if not (folder / "model.onnx").exists():
        raise ValueError("Trying to export a strange model,\\nthat is not supported")
    shutil.copy(folder / "model.onnx", output)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ready environment that has a stand-in for the packages."""
    folder = tmp_path_factory.mktemp("environments") / "stand-in"
    venv.create(folder, with_pip=False, symlinks=sys.platform != "win32")
    command = [str(python_of(folder)), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    for name in ("optimum", "optimum-onnx", "transformers", "torch", "onnx"):
        about = packages / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (packages / "transformers.py").write_text(TRANSFORMERS)
    (packages / "optimum" / "exporters").mkdir(parents=True)
    (packages / "optimum" / "exporters" / "onnx.py").write_text(OPTIMUM)
    (folder / "ready.json").write_text("[]")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder that the stand-in exports."""
    folder = tmp_path / "Tiny Counter"
    write_config(folder, "counter")
    onnx.save(counting_graph(n_vocab=N_VOCAB), folder / "model.onnx")
    return folder


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_runs(checkpoint: Path, stand_in: Path, tmp_path: Path) -> None:
    """There are four files; the manifest names the source; logits are the graph's, texts the tokenizer's."""
    seen: list[Progress] = []
    folder = export_via_optimum(checkpoint, tmp_path / "out", environment=stand_in, on_progress=seen.append)
    assert (names(folder), names(tmp_path)) == (FILES, ["Tiny Counter", "out"])
    assert [progress.phase for progress in seen if progress.done == progress.total] == ["describe", "export", "write"]
    facts = json.loads((folder / "edgedec.json").read_text(encoding="utf-8"))
    expected = {"target": "cpu", "kind": "optimum", "quant": "float32", "kv": "f32", "architecture": "counter"}
    sizes = {"n_layer": 2, "n_vocab": N_VOCAB, "n_embd": 64, "n_head_kv": 2, "head_dim": 2}
    assert {key: facts[key] for key in expected | sizes} == expected | sizes
    assert facts["made_with"] == dict.fromkeys(("optimum", "optimum-onnx", "transformers", "torch", "onnx"), "1.0")
    assert facts["source"]["name"] == "Tiny Counter"
    assert read_gguf(folder / "vocabulary.gguf").metadata["counter.attention.key_length"] == 2
    with Onnx().load(folder, LoadOptions(n_ctx=64)) as model:
        tokens = model.tokenizer.encode(WORDS)
        assert tokens[:4] == [260, 258, 111, 259]  # <|begin|>, hell, o, " w"
        assert model.tokenizer.is_end(261)
        found = model.session(64).forward(np.array(tokens, np.int32), n_past=0, rows="all").logits
        assert np.array_equal(found, counting_logits(tokens, n_vocab=N_VOCAB))
        assert model.card.n_ctx_train == N_CTX


@pytest.mark.slow
def test_the_command_exports_and_runs(
    checkpoint: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--json prints the manifest; without --out the folder is named after the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgedec_export.optimum.environment.environment_folder", lambda _: stand_in)
    result = run_here("export", checkpoint, "--via", "optimum", "--json", "--quiet")
    assert (result.code, result.err) == (0, ""), result
    found = json.loads(result.out)
    assert (found["folder"], found["kind"], found["report"]) == ("Tiny-Counter-onnx", "optimum", None)
    result = run_here("run", "Tiny-Counter-onnx", WORDS, "-n", "5", "-t", "0", "--method=ignore-end", "--quiet")
    assert result.code == 0, result
    assert result.out
    run_here("export", checkpoint, "--via", "optimum").failed(RequestError.exit_code, "--force")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda f: (f / "model.onnx").unlink(), UnsupportedModelError, "a strange model, that is not supported"),
        (lambda f: (f / "tokenizer.json").unlink(), UnsupportedModelError, "FileNotFoundError"),
        (lambda f: (f / "model.onnx").write_bytes(b"\xff" * 50), ModelFormatError, "optimum wrote no readable graph"),
        (lambda f: write_config(f, "counter", vocab_size=None), EdgedecError, "has None as n_vocab"),
        (lambda f: write_config(f, "counter", vocab_size=300), EdgedecError, "264 logits, but config.json says 300"),
    ],
)
def test_what_fails_is_said_and_leaves_nothing(
    checkpoint: Path, stand_in: Path, tmp_path: Path, spoil: Any, error: type[EdgedecError], said: str
) -> None:
    """The error has the last line of the other process; sizes that are missing, or not the graph's, are refused."""
    spoil(checkpoint)
    with pytest.raises(error, match=said):
        export_via_optimum(checkpoint, tmp_path / "out", environment=stand_in)
    assert names(tmp_path) == ["Tiny Counter"]


@pytest.mark.slow
def test_a_tokenizer_that_is_not_known_is_refused_before_the_export(
    checkpoint: Path, stand_in: Path, tmp_path: Path
) -> None:
    """The error names the checkpoint, not the folder that it was copied to."""
    (checkpoint / "model.onnx").unlink()  # the export would fail
    tokenizer = whole_tokenizer() | {"pre_tokenizer": {"type": "Whitespace"}}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModelError, match=r"^Tiny Counter/tokenizer.json: its pre_tokenizer is unknown"):
        export_via_optimum(checkpoint, tmp_path / "out", environment=stand_in)


def test_a_checkpoint_has_a_folder_or_a_name(tmp_path: Path) -> None:
    """A folder, or hf:OWNER/REPO with a revision, is taken; a file and a file of a repository are refused."""
    hub = find_checkpoint("hf:someone/some-model@v2")
    assert (hub.where, hub.revision, hub.is_folder) == ("someone/some-model", "v2", False)
    (tmp_path / "model.gguf").touch()
    for source, error, said in (
        (tmp_path / "model.gguf", RequestError, "this is a file, expected a Hugging Face checkpoint"),
        (tmp_path / "none", ModelNotFoundError, "there is no folder of this name with a config.json"),
        (tmp_path, ModelNotFoundError, "there is no folder of this name with a config.json"),
        ("hf:someone/some-model:Q4_0", RequestError, "leave out ':Q4_0'"),
        ("hf:nothing", ModelNotFoundError, "not the name of a model on a hub"),
    ):
        with pytest.raises(error, match=said):
            find_checkpoint(source)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and locks")
def test_cancelling_ends_all_processes(checkpoint: Path, stand_in: Path, tmp_path: Path) -> None:
    """Cancelling an export ends the child and what the child started, and leaves no files."""
    lock = checkpoint / "asleep"  # held by the grandchild
    lock.touch()
    cancel = CancelToken()

    def cancel_when_asleep() -> None:
        wait_for(lambda: lock.read_text() == "asleep")
        cancel.cancel()

    watch = Thread(target=cancel_when_asleep)
    watch.start()
    with pytest.raises(CancelledError, match="exporting Tiny Counter: cancelled"):
        export_via_optimum(checkpoint, tmp_path / "out", environment=stand_in, cancel=cancel)
    watch.join()
    with lock.open("rb") as file:
        wait_for(lambda: is_free(file.fileno()))
    assert names(tmp_path) == ["Tiny Counter"]


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_free(fd: int) -> bool:
    """Tell whether nobody holds the lock of a file."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
