"""Tiny checkpoints of architectures without code of ours are exported by the real optimum and torch, and run.

    EDGEDEC_OPTIMUM=1 pytest tests/export/test_optimum_itself.py

The packages are installed into the user's cache, where `edgedec export --via optimum` finds them. Without the variable
these tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.runtime import check_runtime
from support.models.onnx_exports import load
from support.models.optimum_checkpoints import write_config

from edgedec.gguf.file import DATA
from edgedec.storage.cache_files import cache_folder
from edgedec.testing import raise_failures
from edgedec_export.optimum.environment import ensure_environment, environment_folder
from edgedec_export.optimum.export import export_via_optimum
from edgedec_runtimes.onnx.foreign.model import ForeignModel

pytestmark = pytest.mark.skipif(not os.environ.get("EDGEDEC_OPTIMUM"), reason="EDGEDEC_OPTIMUM is not set")
pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

ENVIRONMENT = environment_folder(cache_folder())  # the user's: fixtures set another cache later
TOKENS = np.random.default_rng(0).integers(0, 260, 330).astype(np.int32)
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_hidden_layers": 3, "intermediate_size": 128, "rotary_pct": 0.25},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 512},
    "opt": {"num_hidden_layers": 2, "ffn_dim": 128, "word_embed_proj_dim": 64},
}

# Gives a checkpoint random weights, and writes torch's logits of the tokens in a file.
MAKE = """
import sys, numpy, torch, transformers

folder, tokens, logits = sys.argv[1:]
torch.manual_seed(0)
config = transformers.AutoConfig.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
model.save_pretrained(folder)
with torch.no_grad():
    found = model(torch.from_numpy(numpy.load(tokens).astype(numpy.int64))[None]).logits[0]
numpy.save(logits, found.numpy())
"""


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a checkpoint, and torch's logits."""
    folder = tmp_path_factory.mktemp("optimum")
    checkpoint = folder / f"tiny-{request.param}"
    spread = {"initializer_range": 0.2, "init_std": 0.2}  # weights that make texts differ
    write_config(checkpoint, request.param, **CONFIGS[request.param], **spread)
    np.save(folder / "tokens.npy", TOKENS)
    files = [checkpoint, folder / "tokens.npy", folder / "logits.npy"]
    subprocess.run([ensure_environment(ENVIRONMENT), "-I", "-c", MAKE, *files], check=True)
    return checkpoint, folder / "logits.npy"


@pytest.fixture(scope="module")
def exported(made: tuple[Path, Path]) -> Path:
    """Return the export of that checkpoint."""
    checkpoint, _ = made
    return export_via_optimum(checkpoint, checkpoint.with_name("exported"), environment=ENVIRONMENT)


def test_logits_are_torchs(made: tuple[Path, Path], exported: Path) -> None:
    """Logits of a prefill, of chains and of single steps agree with torch to a thousandth."""
    expected = np.load(made[1])
    with load(exported, n_ctx=400) as model:
        session = model.session(400)
        found = [session.forward(TOKENS[:250], n_past=0, rows="all").logits.copy()]
        for n in (1, 5, 1, 1, 16, 8, 48):
            n_past = session.n_cached
            found.append(session.forward(TOKENS[n_past : n_past + n], n_past=n_past, rows="all").logits.copy())
        assert session.n_cached == len(TOKENS)
    assert np.ptp(expected) > 1
    assert np.abs(np.concatenate(found) - expected).max() < 1e-3


def test_it_conforms(exported: Path) -> None:
    """The export passes the conformance checks, among them equal bits of rows as far as claimed."""
    raise_failures(check_runtime(lambda: load(exported)))


def test_rows_have_the_bits_of_steps(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a forward have the bits of single steps, without which drafting is of no use."""
    with load(exported, n_ctx=400) as model:
        assert isinstance(model, ForeignModel)
        found = model.batch_invariant
        with capsys.disabled():
            print(f"\n{model.card.architecture}: batch_invariant {found}, padded {model.is_padded}")
        assert found > 1


def test_weights_in_files_of_their_own(
    made: tuple[Path, Path], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large graph, whose weights optimum writes to files beside it, gives the same export."""
    monkeypatch.setenv("FORCE_ONNX_EXTERNAL_DATA", "1")
    folder = export_via_optimum(made[0], tmp_path / "out", environment=ENVIRONMENT)
    assert (folder / DATA).read_bytes() == (exported / DATA).read_bytes()
    facts = [json.loads((one / "edgedec.json").read_text(encoding="utf-8")) for one in (folder, exported)]
    assert facts[0]["n_layer"] == facts[1]["n_layer"]
