"""Tiny picture encoders (mmproj files) with random weights, of the kinds that libmtmd reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.gguf.file import ValueType
from support.models.gguf_writer import Typed, write_gguf

E, FF, N_LAYERS = 32, 96, 2
_SCALES = {"idefics3": 4, "gemma3": 4, "lfm2": 2, "internvl": 2, "gemma4v": 3}
KINDS = ("gemma3", "gemma4v", "idefics3", "internvl", "lfm2", "pixtral")
M_ROPE_KINDS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")


def tiny_projector(
    path: Path,
    kind: str,
    *,
    n_embd: int = 64,
    seed: int = 0,
    n_deepstack: int = 1,
    more: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a random encoder of a kind, whose rows have `n_embd` numbers, and return its path.

    Args:
        path: The file.
        kind: One of KINDS and M_ROPE_KINDS.
        n_embd: The text model's width.
        seed: Of the weights.
        n_deepstack: Of qwen3vl: how many layers add to the text model's.
        more: Metadata beside, or instead.
        without: Names of metadata and tensors to leave out.
    """
    draw = np.random.default_rng(seed)
    patch = {"idefics3": 8, "gemma3": 8, "internvl": 8}.get(
        kind, 14 if kind in ("qwen2vl_merger", "qwen2.5vl_merger") else 16
    )
    size = {"lfm2": 256, "gemma4v": 48}.get(kind, 8 * patch)
    n_patches = (size // patch) ** 2
    tensors = {
        "v.patch_embd.weight": _matrix(draw, E, 3 * patch**2).reshape(E, 3, patch, patch),
        **_layers(draw, kind),
        **_projector(draw, kind, n_embd, n_deepstack),
    }
    if kind not in ("qwen2vl_merger", "qwen2.5vl_merger", "pixtral", "gemma4v"):
        n_positions = n_patches + (kind == "internvl")
        tensors["v.position_embd.weight"] = _matrix(draw, n_positions, E)
    if kind == "gemma4v":
        tensors["v.position_embd.weight"] = _matrix(draw, 2 * 1024, E).reshape(2, 1024, E)
    if kind not in ("qwen2vl_merger", "qwen2.5vl_merger", "pixtral", "gemma4v"):
        tensors["v.patch_embd.bias"] = _vector(draw, E)
    if kind == "internvl":
        tensors["v.class_embd"] = _vector(draw, E)
    if kind in ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"):
        tensors["v.patch_embd.weight.1"] = _matrix(draw, E, 3 * patch**2).reshape(E, 3, patch, patch)
    if kind == "pixtral":
        tensors["v.pre_ln.weight"] = _vector(draw, E, 1.0)
    elif kind != "gemma4v":
        tensors["v.post_ln.weight"] = _vector(draw, E, 1.0)
        if kind not in ("qwen2.5vl_merger",):
            tensors["v.post_ln.bias"] = _vector(draw, E)
    metadata = _metadata(kind, size, patch, n_embd, n_deepstack) | dict(more or {})
    kept = {name: value for name, value in metadata.items() if name not in without}
    return write_gguf(path, kept, {name: value for name, value in tensors.items() if name not in without})


def _matrix(draw: np.random.Generator, n_out: int, n_in: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    matrix: np.ndarray[Any, np.dtype[np.float32]] = (draw.standard_normal((n_out, n_in)) / n_in**0.5).astype(np.float32)
    return matrix


def _vector(draw: np.random.Generator, n: int, middle: float = 0.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (middle + 0.1 * draw.standard_normal(n)).astype(np.float32)


def _floats(values: list[float]) -> Typed:
    return Typed(ValueType.ARRAY, values, ValueType.FLOAT32)


def _metadata(kind: str, size: int, patch: int, n_embd: int, n_deepstack: int) -> dict[str, Any]:
    vision: dict[str, Any] = {"image_size": size, "patch_size": patch, "embedding_length": E, "feed_forward_length": FF}
    vision |= {"block_count": N_LAYERS, "projection_dim": n_embd, "attention.head_count": 2}
    vision |= {"attention.layer_norm_epsilon": 1e-6, "image_mean": _floats([0.5] * 3), "image_std": _floats([0.5] * 3)}
    if kind in _SCALES:
        vision["projector.scale_factor"] = _SCALES[kind]
    if kind == "idefics3":
        vision["preproc_image_size"] = 2 * size
    if kind in ("pixtral", *M_ROPE_KINDS):
        vision["spatial_merge_size"] = 2
    if kind == "qwen2.5vl_merger":
        vision["n_wa_pattern"] = 2
    if kind == "qwen3vl_merger":
        flags = [i < n_deepstack for i in range(N_LAYERS)]
        vision["is_deepstack_layers"] = Typed(ValueType.ARRAY, flags, ValueType.BOOL)
    silu = kind in ("qwen2.5vl_merger", "pixtral")
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": f"tiny {kind}",
        "clip.has_vision_encoder": True,
        "clip.use_silu" if silu else "clip.use_gelu": True,
        "clip.vision.projector_type" if kind == "gemma4v" else "clip.projector_type": kind,
        **{f"clip.vision.{key}": value for key, value in vision.items()},
    }


def _layers(draw: np.random.Generator, kind: str) -> dict[str, Any]:
    tensors = dict[str, Any]()
    gated, biased = kind in ("qwen2.5vl_merger", "pixtral", "gemma4v"), kind not in ("pixtral", "gemma4v")
    for i in range(N_LAYERS):
        block = f"v.blk.{i}."
        for name in ("ln1", "ln2"):
            tensors[f"{block}{name}.weight"] = _vector(draw, E, 1.0)
            if biased and kind != "qwen2.5vl_merger":
                tensors[f"{block}{name}.bias"] = _vector(draw, E)
        linears = [("attn_out", E, E), ("ffn_up", FF, E), ("ffn_down", E, FF)]
        if kind == "qwen3vl_merger":
            linears.append(("attn_qkv", 3 * E, E))
        else:
            linears += [("attn_q", E, E), ("attn_k", E, E), ("attn_v", E, E)]
        if gated:
            linears.append(("ffn_gate", FF, E))
        for name, n_out, n_in in linears:
            tensors[f"{block}{name}.weight"] = _matrix(draw, n_out, n_in)
            if biased:
                tensors[f"{block}{name}.bias"] = _vector(draw, n_out)
        if kind == "gemma4v":
            for name in ("attn_post_norm", "ffn_post_norm"):
                tensors[f"{block}{name}.weight"] = _vector(draw, E, 1.0)
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors[f"{block}{name}.weight"] = _vector(draw, E // 2, 1.0)
        if kind == "internvl":
            tensors[f"{block}ls1.weight"], tensors[f"{block}ls2.weight"] = _vector(draw, E, 1.0), _vector(draw, E, 1.0)
    return tensors


def _projector(draw: np.random.Generator, kind: str, n_embd: int, n_deepstack: int) -> dict[str, Any]:
    if kind == "idefics3":
        return {"mm.model.fc.weight": _matrix(draw, n_embd, 16 * E)}
    if kind == "gemma3":
        return {
            "mm.input_projection.weight": _matrix(draw, E, n_embd).astype(np.float16),
            "mm.soft_emb_norm.weight": _vector(draw, E, 1.0),
        }
    if kind == "gemma4v":
        return {"mm.input_projection.weight": _matrix(draw, n_embd, E)}
    if kind == "lfm2":
        middle = {"mm.input_norm.weight": _vector(draw, 4 * E, 1.0), "mm.input_norm.bias": _vector(draw, 4 * E)}
        return middle | _two(draw, "mm.{}", (1, 2), 4 * E, 96, n_embd)
    if kind == "pixtral":
        return {
            "v.token_embd.img_break": _vector(draw, n_embd),
            "mm.input_norm.weight": _vector(draw, E, 1.0),
            "mm.patch_merger.weight": _matrix(draw, E, 4 * E),
            **_two(draw, "mm.{}", (1, 2), E, n_embd, n_embd),
        }
    if kind == "internvl":
        norm = {"mm.model.mlp.0.weight": _vector(draw, 4 * E, 1.0), "mm.model.mlp.0.bias": _vector(draw, 4 * E)}
        return norm | _two(draw, "mm.model.mlp.{}", (1, 3), 4 * E, n_embd, n_embd)
    found = _two(draw, "mm.{}", (0, 2), 4 * E, 4 * E, n_embd)
    for i in range(n_deepstack if kind == "qwen3vl_merger" else 0):
        deep = f"v.deepstack.{i}."
        found |= {f"{deep}norm.weight": _vector(draw, 4 * E, 1.0), f"{deep}norm.bias": _vector(draw, 4 * E)}
        found |= _two(draw, deep + "fc{}", (1, 2), 4 * E, 4 * E, n_embd)
    return found


def _two(
    draw: np.random.Generator, name: str, numbers: tuple[int, int], n_in: int, n_middle: int, n_out: int
) -> dict[str, Any]:
    """Return two linears with biases, one behind the other."""
    first, second = (name.format(number) for number in numbers)
    return {
        f"{first}.weight": _matrix(draw, n_middle, n_in),
        f"{first}.bias": _vector(draw, n_middle),
        f"{second}.weight": _matrix(draw, n_out, n_middle),
        f"{second}.bias": _vector(draw, n_out),
    }
