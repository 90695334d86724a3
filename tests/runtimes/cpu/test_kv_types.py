"""Keys and values of less than 16 bits: what they take, how close they stay, and that drafts change no token.

That bits depend on nothing but the text is tested in test_invariance.py, the kernels in tests/native.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.code_paths import each_architecture
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.kv_types import token_bytes
from edgedec_runtimes.cpu.library import KV_TYPES, instruction_sets, native
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 260, 48).astype(np.int32)
PROMPT = "one two three one two three one two three one"


def logits(path: Path, kv_type: str) -> NDArray[np.float64]:
    """Return the logits of all rows of TOKENS."""
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=1, max_rows=64, kv_type=kv_type)) as model:
        return model.session(64).forward(TOKENS, n_past=0, rows="all").logits.astype(np.float64)


def distances(path: Path) -> list[float]:
    """Return how far the logits of q8_0, gear and q4_0 are from those of f16, in units of these."""
    expected = logits(path, "f16")
    return [
        float(np.sqrt(np.square(logits(path, kv_type) - expected).mean() / expected.var()))
        for kv_type in ("q8_0", "gear", "q4_0")
    ]


def with_key_bias(path: Path, architecture: str, size: float) -> Path:
    """Write a tiny model with biases of the keys whose every eighth element is `size`, as Qwen 2.5 has some."""
    tiny = Tiny(architecture=architecture, biases=True)
    tensors = tiny_tensors(tiny)
    for name in tensors:
        if name.endswith("attn_k.bias"):
            values = np.frombuffer(tensors[name].data, np.float32).copy()
            values[::8] = size
            tensors[name] = RawTensor(GGMLType.F32, values.shape, values.tobytes())
    return write_gguf(path, tiny_metadata(tiny), tensors)


KEYS = [name for name in ARCHITECTURES if name != "mamba2"]
"""Those of which any layer has keys."""
KEYS_ALONE = [name for name, tiny in ARCHITECTURES.items() if not (tiny.convolutions or tiny.recurrent or tiny.parts)]
"""Those of which a saved session holds keys and values only."""


@pytest.mark.parametrize("name", each_architecture(KEYS_ALONE))
def test_the_plan_is_what_pages_take(tmp_path: Path, name: str) -> None:
    """The term of the plan, the count by token and the native library agree, in whole pages of 64 tokens."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name])
    for kv_type in KV_TYPES:
        options = LoadOptions(n_ctx=100, n_parallel=2, kv_type=kv_type, n_threads=1)
        planned = {term.name: term.n_bytes for term in Cpu().plan(path, options)}["KV cache"]
        assert planned == 2 * 128 * token_bytes(read_network(read_gguf(path)), kv_type)
        with Cpu().load(path, options) as model:
            assert isinstance(model, CpuModel)
            assert native().ec_session_saved_bytes(model.session(128).handle, 128) == planned // 2


def test_bytes_of_a_token(tmp_path: Path) -> None:
    """2 layers, 2 heads of 64, keys and values: 16, 8.5, 6 and 4.5 bits; with biases 64 floats for rotation."""
    paths = [write_tiny(tmp_path / f"{biases}.gguf", Tiny(biases=biases)) for biases in (False, True)]
    plain, biased = (read_network(read_gguf(path)) for path in paths)
    assert plain.n_layer * plain.n_head_kv * plain.head_dim == 256
    expected = {"f16": 1024, "q8_0": 544, "gear": 384, "q4_0": 288}
    assert {kv_type: token_bytes(plain, kv_type) for kv_type in expected} == expected
    assert [token_bytes(biased, kv_type) - expected[kv_type] for kv_type in expected] == [0, 256, 256, 256]


@pytest.mark.parametrize("name", each_architecture(KEYS))
def test_more_bits_are_closer(tmp_path: Path, name: str) -> None:
    """All stay near what f16 gives, q8_0 nearest, q4_0 least near, and all do round."""
    q8_0, gear, q4_0 = distances(write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name]))
    nearest, least = (0.1, 0.5) if ARCHITECTURES[name].n_expert else (0.03, 0.3)  # rows may go to other experts
    assert 1e-4 < q8_0 < nearest
    assert q8_0 < gear < q4_0 < least


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_large_biases_of_keys_cost_nothing(tmp_path: Path, architecture: str) -> None:
    """Biases of 100 in some elements, which would fill the range of their groups, do no more harm than none."""
    large = with_key_bias(tmp_path / "large.gguf", architecture, 100.0)
    for found, bound in zip(distances(large), (0.05, 0.4, 0.5), strict=True):
        assert found < bound


def test_instruction_sets_agree(tmp_path: Path) -> None:
    """They differ in the last bits, and by the few elements that those round to the neighbouring step."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=1))
    for kv_type in ("q8_0", "q4_0", "gear"):
        found = []
        for name in instruction_sets():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EDGEDEC_CPU_ISA", name)
                found.append(logits(path, kv_type))
        for one, other in itertools.pairwise(found):
            assert float(np.abs(one - other).max()) < 0.02 * float(one.std())


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_drafts_change_no_token(tmp_path: Path, kv_type: str, architecture: str) -> None:
    """Greedy and sampled, the text with drafts of a suffix automaton and of a table is that of plain decoding."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(architecture=architecture))
    texts = []
    for draft in ("off", "suffix", "suffix+recycling"):
        with edgedec.load(path, runtime="cpu", draft=draft, kv_type=kv_type, n_ctx=256, offline=True) as engine:
            results = [
                engine.generate(PROMPT, max_tokens=80, ignore_end=True, temperature=temperature, seed=3)
                for temperature in (0.0, 0.7)
            ]
        assert draft == "off" or any(result.stats.n_drafts for result in results)
        texts.append([result.token_ids for result in results])
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
