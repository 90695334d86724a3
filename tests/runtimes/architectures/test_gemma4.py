"""Gemma 4: its networks beside float64, what a file may leave out, and what is refused by name."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gemma4_truth import Truth, tensors_of
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.models.tiny_runs import all_logits, distance

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(2).integers(0, 260, 40).astype(np.int32)
SMALL, MIXED = ARCHITECTURES["gemma4"], ARCHITECTURES["gemma4-moe"]
KINDS = {
    "small": SMALL,
    "mixture": MIXED,
    "plain": replace(SMALL, n_shared=0, n_per_layer=0),
    "values of keys": replace(SMALL, n_shared=0, n_per_layer=0, keys_as_values=True),
}


logits = partial(all_logits, tokens=TOKENS)


def truth(path: Path, tiny: Tiny, **changed: Any) -> NDArray[np.float64]:
    """Return the same in float64; `changed` are fields of Truth that are others than the file says."""
    fields: dict[str, Any] = {
        "tensors": tensors_of(read_gguf(path)),
        "n_head": tiny.n_head,
        "sliding": tuple(tiny.slides(i) for i in range(tiny.n_layer)),
        "window": tiny.sliding_window,
        "n_own": tiny.n_layer - tiny.n_shared,
        "n_used": tiny.n_expert_used,
        "epsilon": 1e-5,
    }
    return Truth(**fields | changed)(TOKENS.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_nearer_to_float64_than_llamacpp(tmp_path: Path, name: str, seed: int) -> None:
    """Both keep keys and values as float16; llama.cpp also rounds GELU to it. With float32 for both, little is left."""
    tiny = replace(KINDS[name], seed=seed)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = truth(path, tiny)
    ours, theirs = distance(logits(Cpu(), path), expected), distance(logits(LlamaCpp(), path), expected)
    assert ours <= theirs
    assert ours < 1e-3
    assert distance(logits(Reference(), path, "f32"), expected) < 2e-6


@pytest.mark.slow
def test_what_a_wrong_network_would_be(tmp_path: Path) -> None:
    """Each of these differs from the file's network by far more than rounding does."""
    path = write_tiny(tmp_path / "m.gguf", SMALL)
    expected, tensors = truth(path, SMALL), tensors_of(read_gguf(path))
    turned = tensors | {"rope_freqs.weight": np.ones_like(tensors["rope_freqs.weight"])}
    unscaled = tensors | {name: np.ones(1) for name in tensors if name.endswith("layer_output_scale.weight")}
    other_part = tensors | {"per_layer_token_embd.weight": np.roll(tensors["per_layer_token_embd.weight"], 256, axis=1)}
    changes: list[dict[str, Any]] = [{"window": 9}, *({"tensors": t} for t in (turned, unscaled, other_part))]
    assert all(distance(truth(path, SMALL, **changed), expected) > 5e-3 for changed in changes)
    mixed = write_tiny(tmp_path / "mixed.gguf", MIXED)
    assert distance(truth(mixed, MIXED, n_used=3), truth(mixed, MIXED)) > 5e-3


def _changed(
    tiny: Tiny, keys: dict[str, Any] | None = None, tensors: dict[str, RawTensor | None] | None = None
) -> tuple[dict[str, Any], dict[str, RawTensor]]:
    """Return metadata and tensors of a model with others in their place; None for none."""
    found = {**tiny_tensors(tiny), **(tensors or {})}
    metadata = tiny_metadata(tiny) | {f"gemma4.{key}": value for key, value in (keys or {}).items()}
    return metadata, {name: tensor for name, tensor in found.items() if tensor is not None}


def _vector(n: int) -> RawTensor:
    return RawTensor(GGMLType.F32, (n,), np.ones(n, np.float32).tobytes())


@pytest.mark.slow
def test_what_other_files_hold_beside_the_decoder_changes_nothing(tmp_path: Path) -> None:
    """Tensors and keys of what reads images and sounds, and keys and values that no layer reads."""
    first = tiny_tensors(SMALL)
    unread = {f"blk.4.{name}": first[f"blk.1.{name}"] for name in ("attn_k.weight", "attn_v.weight")}
    beside = {"v.patch_embd.weight": _vector(8), "a.conv.bias": _vector(8), "mm.input_projection.weight": _vector(8)}
    beside |= {"blk.4.attn_k_norm.weight": first["blk.1.attn_k_norm.weight"], **unread}
    keys = {"vision.block_count": 27, "audio.embedding_length": 8}
    more = write_gguf(tmp_path / "more.gguf", *_changed(SMALL, keys, dict(beside)))
    plain = write_tiny(tmp_path / "plain.gguf", SMALL)
    for runtime in (Cpu(), Reference()):
        np.testing.assert_array_equal(logits(runtime, more), logits(runtime, plain))


@pytest.mark.slow
def test_experts_in_two_matrices_or_one(tmp_path: Path) -> None:
    """The bits are the same, with all experts in memory and with a few."""
    apart: dict[str, RawTensor | None] = {}
    for name, tensor in tiny_tensors(MIXED).items():
        if name.endswith("ffn_gate_up_exps.weight"):
            n_in, n_out, n = tensor.shape
            pair = np.frombuffer(tensor.data, np.uint8).reshape(n, 2, -1)
            for half, part in enumerate(("gate", "up")):
                other = RawTensor(tensor.type, (n_in, n_out // 2, n), pair[:, half].tobytes())
                apart[name.replace("gate_up", part)] = other
            apart[name] = None
    paths = write_gguf(tmp_path / "apart.gguf", *_changed(MIXED, tensors=apart)), write_tiny(tmp_path / "m.gguf", MIXED)
    for runtime in (Cpu(), Reference()):
        first, second = (logits(runtime, path) for path in paths)
        np.testing.assert_array_equal(first, second)


UPS = RawTensor(0, (256, 256, 8), bytes(256 * 256 * 8 * 4))
REFUSED: dict[str, tuple[Tiny, dict[str, Any], str, RawTensor | None]] = {
    "does not know 'gemma4.attention.clamp'": (SMALL, {"attention.clamp": 1.0}, "", None),
    "layer 2 has no keys and values": (SMALL, {"attention.shared_kv_layers": 4}, "", None),
    "keys and values of a layer's window differ": (SMALL, {"attention.value_length_swa": 32}, "", None),
    "it has no tensor 'rope_freqs.weight'": (SMALL, {}, "rope_freqs.weight", None),
    "no tensor 'per_layer_proj_norm.weight'": (SMALL, {}, "per_layer_proj_norm.weight", None),
    "no tensor 'blk.2.inp_gate.weight'": (SMALL, {}, "blk.2.inp_gate.weight", None),
    "'per_layer_token_embd.weight'": (SMALL, {}, "per_layer_token_embd.weight", None),
    "no tensor 'blk.0.ffn_down_exps.scale'": (MIXED, {}, "blk.0.ffn_down_exps.scale", None),
    "no use for tensor 'blk.0.ffn_up_exps.weight'": (MIXED, {}, "blk.0.ffn_up_exps.weight", UPS),
}
"""The words of a refusal: the model, its other keys, and a tensor that is left out or there beside the others."""


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_by_name(tmp_path: Path, words: str) -> None:
    """Files that lack something, or have something that no layer knows."""
    tiny, keys, name, tensor = REFUSED[words]
    path = write_gguf(tmp_path / "m.gguf", *_changed(tiny, keys, {name: tensor} if name else {}))
    with pytest.raises(EdgedecError) as caught:
        read_network(read_gguf(path))
    assert words in str(caught.value)


@pytest.mark.slow
def test_a_table_without_whole_blocks_is_refused(tmp_path: Path) -> None:
    """A layer's part of a row must begin with a block of the table's type."""
    tiny = replace(SMALL, n_per_layer=128)
    rows = RawTensor(GGMLType.Q4_K, (128 * 6, 260), bytes(128 * 6 * 260 // 256 * 144))
    path = write_gguf(tmp_path / "m.gguf", *_changed(tiny, tensors={"per_layer_token_embd.weight": rows}))
    assert "Q4_K has no blocks of the 128 elements that a layer gets" in (Cpu().accepts(path) or "")
