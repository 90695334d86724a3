"""What the cpu runtime does not run, and options that it can't honour, are refused before anything is loaded."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors, write_tiny

from edgedec.errors import (
    EdgedecError,
    ModelFormatError,
    RequestError,
    RuntimeUnavailableError,
    UnsupportedModelError,
)
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu

_TINY = Tiny()
_Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with F32 weights."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", _TINY)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_type": "q5_1"}, "kv_type is 'q5_1'; the cpu runtime takes f16, q8_0, q4_0, gear"),
        ({"n_threads": 0}, "n_threads is 0"),
        ({"n_threads": 257}, "n_threads is 257"),
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_parallel": 0}, "n_parallel is 0"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"n_gpu_layers": 1}, "no GPU"),
        ({"device": "CUDA0"}, "no GPU"),
    ],
)
def test_options_that_it_cannot_honour(path: Path, options: dict[str, Any], words: str) -> None:
    """Loading and planning refuse them alike."""
    for act in (Cpu().load, Cpu().plan):
        with pytest.raises(RequestError, match=words):
            act(path, LoadOptions(**options))


def test_narrow_types_want_heads_of_whole_blocks(tmp_path: Path) -> None:
    """Heads of 48 elements are kept as float16, and refused as anything narrower."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_embd=48, n_head=1, n_head_kv=1, head_dim=48))
    Cpu().load(path, LoadOptions()).close()
    for act, kv_type in itertools.product((Cpu().load, Cpu().plan), ("q8_0", "q4_0", "gear")):
        with pytest.raises(RequestError, match="heads have 48 elements"):
            act(path, LoadOptions(kv_type=kv_type))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit that holds for the stacks of threads")
def test_threads_that_the_system_refuses(path: Path) -> None:
    """Where 256 threads can't be started loading fails with an error, and it succeeds once they can."""
    code = """
import resource, sys
from pathlib import Path
from edgedec.errors import MemoryCapError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=1)).close()
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (held + 2**29, unlimited[1]))
try:
    Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=256))
except MemoryCapError:
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=2)).close()
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_an_instruction_set_that_is_not_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names those that are."""
    monkeypatch.setenv("EDGEDEC_CPU_ISA", "mmx")
    with pytest.raises(RuntimeUnavailableError, match=r"EDGEDEC_CPU_ISA is 'mmx'; here the cpu runtime has .*portable"):
        Cpu().load(path, LoadOptions())


_NARROW = Tiny(n_embd=40, n_head=1, n_head_kv=1, head_dim=40)


def _without(tensors: dict[str, RawTensor], name: str) -> dict[str, RawTensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (tiny_metadata(Tiny("bloom")), {}, "the architecture is 'bloom'"),
    "tensor type": (
        {},
        {_Q: RawTensor(GGMLType.NVFP4, (256, 256), bytes(256 * 144))},
        "'blk.0.attn_q.weight' is NVFP4",
    ),
    "tensor": ({}, {"blk.0.attn_sinks.weight": RawTensor(0, (4,), bytes(16))}, "'blk.0.attn_sinks.weight'"),
    "type of a vector": ({}, {"output_norm.weight": RawTensor(1, (256,), bytes(512))}, "is not a vector of F32"),
    "key": ({"llama.attention.clamp_kqv": 8.0}, {}, "'llama.attention.clamp_kqv'"),
    "experts": ({"llama.expert_count": 0}, {}, "'llama.expert_count'"),
    "rope scaling": ({"llama.rope.scaling.type": "dynamic"}, {}, "rope scaling 'dynamic' is none of"),
    "yarn": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": -1.0}, {}, "the numbers of yarn"),
    "attention factor": ({"llama.rope.scaling.attn_factor": 0.0}, {}, "rope_attention_factor is 0.0"),
    "vocabulary": ({"tokenizer.ggml.model": "rwkv"}, {}, "rwkv"),
    "size": (
        {"llama.attention.key_length": 8192, "llama.attention.value_length": 8192},
        {},
        "head_dim is 8192, more than 4096",
    ),
    "no heads": (
        {f"llama.attention.{key}": 0 for key in ("head_count_kv", "key_length", "value_length")},
        {},
        "no use for tensor 'blk.0.attn_k.weight'",
    ),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, {}, "rms_epsilon is 0.0"),
    "scale": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -2.0}, {}, "rope_scale is -0.5"),
    "width": (
        tiny_metadata(_NARROW),
        dict(tiny_tensors(_NARROW)),
        "no multiple of 16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_it_does_not_run_is_refused_by_name(tmp_path: Path, what: str) -> None:
    """accepts() tells what it is and which runtime takes it; load() and plan() raise the same."""
    metadata, tensors, words = UNSUPPORTED[what]
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY) | metadata, tiny_tensors(_TINY) | tensors)
    reason = Cpu().accepts(path)
    assert reason is not None
    assert words in reason
    assert reason.endswith("use the llamacpp runtime")
    for act in (Cpu().load, Cpu().plan):
        with pytest.raises(UnsupportedModelError) as caught:
            act(path, LoadOptions())
        assert str(caught.value) == reason


def test_more_heads_than_elements_are_refused(tmp_path: Path) -> None:
    """Where the file does not say how long a head is, there must be an element for each."""
    known = tiny_metadata(_TINY) | {"llama.attention.head_count": 512}
    metadata = {key: value for key, value in known.items() if not key.endswith(("_length", "dimension_count"))}
    metadata |= {key: known[key] for key in ("llama.embedding_length", "llama.context_length")}
    metadata["llama.feed_forward_length"] = 256
    path = write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors(_TINY))
    with pytest.raises(EdgedecError, match="key_length is 0, expected 1 or more"):
        Cpu().load(path, LoadOptions())


@pytest.mark.slow
@pytest.mark.parametrize("name", [_Q, "output_norm.weight", "blk.1.ffn_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """What every model has must be there, in its shape."""
    for tensors in (_without(tiny_tensors(_TINY), name), tiny_tensors(_TINY) | {name: RawTensor(0, (64,), bytes(256))}):
        path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY), tensors)
        with pytest.raises(EdgedecError, match=name):
            Cpu().load(path, LoadOptions())


def test_vectors_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    """A NaN in a norm is found at loading."""
    bad = RawTensor(0, (256,), np.full(256, np.nan, np.float32).tobytes())
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY), tiny_tensors(_TINY) | {"output_norm.weight": bad})
    with pytest.raises(ModelFormatError, match=r"'output_norm.weight' holds what is no number"):
        Cpu().load(path, LoadOptions())
