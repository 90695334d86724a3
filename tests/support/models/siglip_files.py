"""Projector files of the SigLIP kind in any shape and tensor type, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.values import ValueType
from support.models.gguf_writer import RawTensor, Typed, write_gguf


def siglip_projector(path: Path, kind: str, type_name: str = "F32", **shape: Any) -> Path:
    """Write an encoder of siglip_parts() and return its path."""
    return write_gguf(path, *siglip_parts(kind, type_name, **shape))


# A line for each key and tensor of a file: cut into parts, it would say no more.
def siglip_parts(
    kind: str,
    type_name: str = "F32",
    *,
    n_embd: int = 32,
    n_ff: int = 96,
    n_layer: int = 2,
    n_head: int = 2,
    image_size: int = 64,
    patch_size: int = 8,
    merge: int = 4,
    n_out: int = 64,
    swaps: bool = False,
    more: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors of an encoder of gemma3, idefics3 or lfm2.

    Args:
        kind: The projector's kind.
        type_name: F32, F16, BF16 or Q8_0, of matrices; rows that Q8_0 can't hold are F16, as llama.cpp leaves them.
        n_embd, n_ff, n_layer, n_head: Of the transformer.
        image_size, patch_size, merge: Of the pictures.
        n_out: The text model's width.
        swaps: Whether the names of a layer's last two matrices are exchanged, as old converters did.
        more: Metadata beside.
    """
    draw = np.random.default_rng(0)

    def matrix(n_rows: int, n_cols: int, kind_of: str = type_name) -> Any:
        values = (draw.standard_normal((n_rows, n_cols), np.float32) / np.float32(n_cols**0.5)).astype(np.float32)
        return _stored(values, kind_of)

    def vector(n: int, middle: float = 0.0) -> NDArray[np.float32]:
        return (middle + 0.1 * draw.standard_normal(n)).astype(np.float32)

    def linear(name: str, n_rows: int, n_cols: int) -> dict[str, Any]:
        return {f"{name}.weight": matrix(n_rows, n_cols), f"{name}.bias": vector(n_rows)}

    def norm(name: str, n: int) -> dict[str, Any]:
        return {f"{name}.weight": vector(n, 1.0), f"{name}.bias": vector(n)}

    kernel = (draw.standard_normal((n_embd, 3, patch_size, patch_size)) / (3 * patch_size**2) ** 0.5).astype(np.float16)
    tensors: dict[str, Any] = {
        "v.patch_embd.weight": kernel if type_name != "F32" else kernel.astype(np.float32),
        "v.patch_embd.bias": vector(n_embd),
        "v.position_embd.weight": _stored(draw.standard_normal(((image_size // patch_size) ** 2, n_embd)), "F32"),
        **norm("v.post_ln", n_embd),
    }
    for i in range(n_layer):
        block = f"v.blk.{i}."
        tensors |= norm(block + "ln1", n_embd) | norm(block + "ln2", n_embd)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors |= linear(block + name, n_embd, n_embd)
        up, down = ("ffn_down", "ffn_up") if swaps else ("ffn_up", "ffn_down")
        tensors |= linear(block + up, n_ff, n_embd) | linear(block + down, n_embd, n_ff)
    merged = n_embd * merge**2
    if kind == "gemma3":
        tensors["mm.input_projection.weight"] = matrix(n_embd, n_out, "F16")
        tensors["mm.soft_emb_norm.weight"] = vector(n_embd, 1.0)
    elif kind == "idefics3":
        tensors["mm.model.fc.weight"] = matrix(n_out, merged)
    else:
        tensors |= norm("mm.input_norm", merged) | linear("mm.1", n_ff, merged) | linear("mm.2", n_out, n_ff)
    half = Typed(ValueType.ARRAY, [0.5] * 3, ValueType.FLOAT32)
    vision: dict[str, Any] = {"image_size": image_size, "patch_size": patch_size, "embedding_length": n_embd}
    vision |= {
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "projection_dim": n_out,
        "image_mean": half,
        "image_std": half,
    }
    vision |= {"attention.head_count": n_head, "attention.layer_norm_epsilon": 1e-6, "projector.scale_factor": merge}
    if kind == "idefics3":
        vision["preproc_image_size"] = image_size
    metadata = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True}
    metadata |= {"clip.use_gelu": True, "clip.projector_type": kind}
    metadata |= {f"clip.vision.{key}": value for key, value in vision.items()} | (more or {})
    return metadata, tensors


def _stored(values: NDArray[Any], type_name: str) -> Any:
    """Return a matrix as the writer stores it in a tensor type."""
    if type_name == "Q8_0" and values.shape[1] % 32 == 0:
        blocks = values.reshape(-1, 32)
        scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        whole = np.rint(blocks / np.maximum(scales.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
        data = np.concatenate([scales.view(np.uint8), whole.view(np.uint8)], axis=1).tobytes()
        return RawTensor(GGMLType.Q8_0, values.shape[::-1], data)
    if type_name == "BF16":
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return RawTensor(GGMLType.BF16, values.shape[::-1], bits.astype(np.uint16).tobytes())
    return values.astype(np.float32 if type_name == "F32" else np.float16)
