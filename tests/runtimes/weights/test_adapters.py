"""Adapters in GGUFs: what is wrong with a file, or does not fit the model, is refused by the name of the tensor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import Typed
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import EdgedecError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import ValueType, read_gguf
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.weights.adapters import load_adapters

A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
ONES = np.ones((4, 64), np.float32)
TOKENS = Typed(ValueType.ARRAY, [5], ValueType.UINT32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return tiny_llama(tmp_path_factory.mktemp("adapters") / "base.gguf")


def refusal(base: Path, adapter: Path) -> str:
    """Return why an adapter is refused."""
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as found:
        load_adapters([adapter], read_gguf(base))
    assert str(adapter) in str(found.value)
    return str(found.value)


TENSORS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({B: None}, "'blk.0.attn_q.weight.lora_a' is there without 'blk.0.attn_q.weight.lora_b'"),
    ({A: None}, "'blk.0.attn_q.weight.lora_b' is there without"),
    ({"blk.0.attn_q.weight.lora_c": ONES}, "ends neither with .lora_a nor"),
    ({"x": ONES}, "'x' ends neither"),
    ({A: np.ones((4, 63), np.float32)}, "pair of 'blk.0.attn_q.weight' is for 64 rows and 63 columns"),
    ({B: np.ones((65, 4), np.float32)}, "is for 65 rows and 64 columns"),
    ({A: np.ones((5, 64), np.float32)}, "has the ranks 5 and 4"),
    ({A: np.ones((4097, 64), np.float32), B: np.ones((64, 4097), np.float32)}, "has the ranks 4097"),
    ({A: np.ones(64, np.float32)}, "has the shape (64,), expected a matrix"),
    ({A: np.ones((2, 4, 64), np.float32)}, "expected a matrix"),
    ({A: np.full((4, 64), np.nan, np.float32)}, "'blk.0.attn_q.weight' holds what is no number"),
    ({B: np.full((64, 4), np.inf, np.float16)}, "holds what is no number"),
    ({"blk.7.attn_q.weight.lora_a": ONES, "blk.7.attn_q.weight.lora_b": ONES.T.copy()}, "that base.gguf lacks"),
    (
        {"blk.0.attn_norm.weight.lora_a": ONES, "blk.0.attn_norm.weight.lora_b": ONES},
        "'blk.0.attn_norm.weight' changes",
    ),
    ({"token_embd.weight.lora_a": ONES, "token_embd.weight.lora_b": ONES}, "'token_embd.weight' changes embeddings"),
    ({"output.weight.lora_a": ONES, "output.weight.lora_b": ONES}, "'output.weight' changes embeddings, the output"),
)


@pytest.mark.parametrize(("changed", "message"), TENSORS)
def test_wrong_tensors_are_named(base: Path, tmp_path: Path, changed: Mapping[str, Any], message: str) -> None:
    """Half a pair, unknown names, other shapes and ranks, what is no number, and what can't be changed."""
    assert message in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, changed=changed))


KEYS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"general.type": "model"}, "general.type is 'model'"),
    ({"adapter.type": "control_vector"}, "adapter.type 'control_vector'"),
    ({"general.architecture": "qwen2"}, "an adapter of the architecture 'qwen2', and base.gguf is 'llama'"),
    ({"adapter.alora.invocation_tokens": TOKENS}, "an activated LoRA"),
    ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha"),
    ({"adapter.lora.alpha": "8"}, "adapter.lora.alpha"),
)


@pytest.mark.parametrize(("metadata", "message"), KEYS)
def test_other_files_are_refused(base: Path, tmp_path: Path, metadata: Mapping[str, Any], message: str) -> None:
    """Models, other kinds of adapters, those of other architectures, and keys that hold something else."""
    assert message in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, metadata=metadata))


def test_a_file_without_pairs_or_alpha(base: Path, tmp_path: Path) -> None:
    """It changes nothing, or does not say by how much; a model is no adapter."""
    assert "it changes no matrix" in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, matrices=()))
    assert "general.type is None" in refusal(base, base)


def test_alpha_0_stands_for_no_factor(base: Path, tmp_path: Path) -> None:
    """The factor is alpha / rank; with alpha 0 it is 1, as llama.cpp has it."""
    for alpha, factor in ((8.0, 2.0), (0.0, 1.0)):
        (found,) = load_adapters([tiny_adapter(tmp_path / f"{alpha}.gguf", base, alpha=alpha)], read_gguf(base))
        assert {pair.factor for pair in found.pairs.values()} == {factor}


@pytest.mark.slow
def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    """An adapter of a layer's experts is refused, one of its attention is taken."""
    base = write_tiny(tmp_path / "base.gguf", ARCHITECTURES["qwen3moe"])
    pair = {f"blk.0.ffn_up_exps.weight.lora_{x}": np.ones((4, 4), np.float32) for x in "ab"}
    adapter = tiny_adapter(tmp_path / "a.gguf", base, changed=pair)
    assert "'blk.0.ffn_up_exps.weight' changes embeddings, the output matrix, experts" in refusal(base, adapter)
    assert load_adapters([tiny_adapter(tmp_path / "b.gguf", base)], read_gguf(base))


@pytest.mark.slow
def test_damaged_files(base: Path, tmp_path: Path) -> None:
    """Files that are cut, and 300 with bytes changed in the header: an EdgedecError, or a model that computes."""
    path = tiny_adapter(tmp_path / "a.gguf", base, matrices=("attn_q", "ffn_down"))
    raw, rng = path.read_bytes(), np.random.default_rng(3)
    header = raw.index(b"blk.1.ffn_down.weight.lora_b") + 60
    mutants = [raw[:size] for size in (*range(0, header, 97), len(raw) - 1, len(raw) // 2)]
    for _ in range(300):
        changed = bytearray(raw)
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.integers(256)
        mutants.append(bytes(changed))
    n_loaded = 0
    for mutant in mutants:
        path.write_bytes(mutant)
        try:
            with Cpu().load(base, LoadOptions(n_ctx=64, n_threads=1, adapters=((path, 1.0),))) as model:
                session = model.session(64)
                session.scales = (1.0,)
                session.forward(np.array([5, 6], np.int32), n_past=0)
                n_loaded += 1
        except EdgedecError:
            continue
    assert n_loaded < len(mutants) // 2
