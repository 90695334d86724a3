"""An embedding matrix that only single rows are looked up in is read from the file of the tiles, and not mapped."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu import weights
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

N_VOCAB = 20_000  # × 256 × 4 bytes: 20.5 MB each for the embedding and the head
TOKENS = np.arange(300, 19_900, 7, dtype=np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own."""
    folder = tmp_path_factory.mktemp("embedding_rows")
    return tiny_llama(folder / "untied.gguf", n_embd=256, n_vocab=N_VOCAB, n_layer=1, n_ctx_train=4096)


def mapped_bytes() -> int:
    """Return the bytes of mapped files that this process holds."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory")
def test_no_page_of_it_is_held(path: Path, tmp_path: Path) -> None:
    """2,800 tokens look up rows all over the matrix; as if it was not there, and so says the plan."""
    options = LoadOptions(n_ctx=4096, cache_dir=tmp_path)
    before = mapped_bytes()
    with Cpu().load(path, options) as model:
        session = model.session(4096)
        session.forward(TOKENS, n_past=0)
        held = mapped_bytes() - before
        planned = next(term.n_bytes for term in model.memory(4096, 16) if term.name == "weights (tiles)")
    gguf = read_gguf(path)
    network = read_network(gguf)
    job = weights.tile_job(gguf, network, LoadOptions())
    term = weights.weights_term(job, None, in_file=True)
    assert planned == term.n_bytes < job.n_bytes - 20_000_000
    assert held < planned + 5_000_000  # and some pages of libraries


def test_bits_do_not_depend_on_it(path: Path, tmp_path: Path) -> None:
    """In a prompt and step by step, logits are those of private tiles."""
    rows = []
    for tile_cache in (True, False):
        options = LoadOptions(n_ctx=4096, runtime_options={"tile_cache": tile_cache}, cache_dir=tmp_path)
        with Cpu().load(path, options) as model:
            session = model.session(4096)
            prompt = session.forward(TOKENS[:250], n_past=0).logits.tobytes()
            steps = [session.forward(TOKENS[i : i + 1], n_past=i).logits.tobytes() for i in range(250, 262)]
            rows.append([prompt, *steps])
    assert rows[0] == rows[1]


def test_a_head_that_is_the_embedding_stays(tmp_path: Path) -> None:
    """Where both are one matrix, every step reads all of it."""
    gguf = read_gguf(tiny_llama(tmp_path / "tied.gguf", tied=True))
    network = read_network(gguf)
    assert weights.rarely_read(network) == ()
    job = weights.tile_job(gguf, network, LoadOptions())
    assert weights.weights_term(job, None, in_file=True).n_bytes == job.n_bytes


def test_a_head_of_its_own(path: Path) -> None:
    """The embedding is what is looked up in."""
    found = weights.rarely_read(read_network(read_gguf(path)))
    assert [placed.tensor.name for placed in found] == ["token_embd.weight"]


def test_a_table_of_what_layers_get(tmp_path: Path) -> None:
    """Rows of it are read from the tile file as well, and its bytes are no part of the memory plan."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["gemma4"])
    gguf, network = read_gguf(path), read_network(read_gguf(path))
    assert [placed.tensor.name for placed in weights.rarely_read(network)] == ["per_layer_token_embd.weight"]
    job = weights.tile_job(gguf, network, LoadOptions())
    tables = [tensor.n_bytes for tensor in job.tensors if tensor.name == "per_layer_token_embd.weight"]
    term = weights.weights_term(job, None, in_file=True)
    assert term.n_bytes == job.n_bytes - sum(tables) < job.n_bytes
    assert "1.6 MB more stay in the file, of which a token reads a row for each layer" in term.detail
