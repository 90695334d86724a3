"""What a process holds that streams a real model's weights: no more than was planned, from the first start on."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

pytestmark = pytest.mark.slow

MB = 10**6

_CHILD = """
import json, sys
from pathlib import Path
import numpy as np
from edgedec.load_options import LoadOptions
from edgedec.memory.system import peak_resident_bytes
from edgedec_runtimes.cpu.tiles.paged_file import PagedFile
from edgedec_runtimes.cpu.runtime import Cpu

path, cache_dir, resident_bytes = sys.argv[1:]
options = LoadOptions(
    n_ctx=512, n_threads=2, max_rows=1, cache_dir=Path(cache_dir),
    resident_bytes=int(resident_bytes) or None,
)
with Cpu().load(path := Path(path), options) as model:
    loaded = peak_resident_bytes()
    session = model.session(512)
    tokens = np.arange(300, 700, dtype=np.int32) % model.card.n_vocab
    logits = [session.forward(tokens, n_past=0).logits.tobytes()]
    for i in range(8):
        logits.append(session.forward(tokens[i : i + 1], n_past=400 + i).logits.tobytes())
    planned = sum(term.n_bytes for term in model.memory(512, 1))
    import hashlib
    print(json.dumps([loaded, peak_resident_bytes(), planned, hashlib.sha256(b"".join(logits)).hexdigest()]))
"""


def held(path: Path, cache_dir: Path, resident_bytes: int) -> tuple[int, int, int, str]:
    """Return what a process held when the model was loaded, its peak, what was planned, and a digest of its logits."""
    arguments = [str(path), str(cache_dir), str(resident_bytes)]
    child = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=True)
    loaded, peak, planned, digest = json.loads(child.stdout)
    return loaded, peak, planned, digest


@pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory")
def test_a_mixture_of_experts_whole_and_streamed(tmp_path: Path) -> None:
    """What a process holds is the plan, within 16 MB or 5 %, with a third of its tiles and with all; same bits."""
    tiny = replace(ARCHITECTURES["qwen3moe"], types=("Q4_K",), n_embd=512, n_layer=4, n_expert=64, n_ff_expert=512)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    found = [held(path, tmp_path, resident_bytes) for resident_bytes in (40 * MB, 0)]
    for _, peak, planned, _ in found:
        assert abs(peak - planned) <= max(16 * MB, 0.05 * planned)
    assert found[0][3] == found[1][3]
    assert found[1][2] - found[0][2] > 70 * MB


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory")
def test_half_of_a_real_model(smollm_path: Path, tmp_path: Path) -> None:
    """With 48 MB for 96 MB of tiles, a process that makes them and decodes never holds more than planned; same bits."""
    found = []
    for resident_bytes in (48 * MB, 12 * MB, 0):
        loaded, peak, planned, digest = held(smollm_path, tmp_path, resident_bytes)
        assert loaded <= peak <= planned + 8 * MB
        found.append((planned, digest))
    assert found[0][1] == found[1][1] == found[2][1]
    assert found[1][0] + 30 * MB < found[0][0] < found[2][0] - 35 * MB
