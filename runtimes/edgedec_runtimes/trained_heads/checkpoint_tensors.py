"""What checkpoints of all trained heads share: tensors by their own names, and the list of drafted tokens.

`d2t` holds offsets here: row i of the output matrix is the target's token i + d2t[i].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import FLOATS
from edgedec_runtimes.trained_heads.head import HeadTensor
from edgedec_runtimes.weights.safetensors import Tensor, open_checkpoint

CONFIG = "config.json"
MAPS = ("d2t", "t2d")
LAYER = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
"""The names of a layer's tensors by those of a checkpoint."""
_FLOAT_NAMES = {kind.name: kind for kind in FLOATS}
_WHOLE = {"I64": "<i8", "I32": "<i4"}


def open_head(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a head's folder by the names that they have there.

    Raises:
        ModelNotFoundError: There are no safetensors files.
        ModelFormatError, StorageError, MemoryCapError: As open_checkpoint.
    """
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelNotFoundError(
            f"{folder}: the weights are a PyTorch file (.bin), which can run code when it is read; convert it to "
            "safetensors (huggingface.co/spaces/safetensors/convert), or take a checkpoint that has them"
        )
    return open_checkpoint(folder)


def head_name(folder: Path) -> str:
    """Return the folder's name; OWNER/REPO for a folder hf/OWNER/REPO/REVISION, which a hub's files are kept in.

    >>> head_name(Path("hf", "someone", "head", "main")), head_name(Path("mine"))
    ('someone/head', 'mine')
    """
    revision, *above = reversed(folder.absolute().parts)
    return f"{above[1]}/{above[0]}" if len(above) > 2 and above[2] == "hf" else revision


def weight(tensor: Tensor) -> HeadTensor:
    """Return a matrix or vector of floats, as it is stored (raises UnsupportedModelError for another tensor)."""
    if tensor.dtype not in _FLOAT_NAMES or len(tensor.shape) not in (1, 2, 3) or not tensor.n_bytes:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name[:80]!r} is {tensor.dtype} of shape {tensor.shape}, expected a matrix "
            f"or vector of {', '.join(_FLOAT_NAMES)}; take the checkpoint that is not quantized"
        )
    return HeadTensor(tensor.shape, _FLOAT_NAMES[tensor.dtype], tensor.read())


def vocabularies(
    folder: Path, tensors: Mapping[str, Tensor], n_target: int | None, n_drafted: int | None
) -> tuple[NDArray[np.int64], int]:
    """Return the target's token ids by draft id, and the size of the target's vocabulary.

    Args:
        tensors: The tensors `d2t`, `t2d`, `embedding` and `output`, where there are any.
        n_target: The size of the target's vocabulary, where config.json says it.
        n_drafted: How many tokens the head drafts, where config.json says it.
    """
    t2d = tensors["t2d"].read() if "t2d" in tensors else None
    if t2d is not None:
        if tensors["t2d"].dtype not in ("BOOL", "U8") or len(tensors["t2d"].shape) != 1:
            fail(
                folder, f"t2d is {tensors['t2d'].dtype} of shape {tensors['t2d'].shape}, expected a BOOL for each token"
            )
        n_target = len(t2d)
    if "embedding" in tensors and len(tensors["embedding"].shape) == 2:
        n_target = tensors["embedding"].shape[0]
    if n_target is None:
        fail(folder, "neither config.json (vocab_size) nor a tensor says how many tokens the target has")
    if "d2t" not in tensors:
        n_draft = tensors["output"].shape[0] if "output" in tensors else n_drafted or n_target
        if n_draft != n_target or n_drafted not in (None, n_target):
            fail(folder, f"it drafts {n_draft} of {n_target} tokens, but has no d2t that says which")
        return np.arange(n_target, dtype=np.int64), n_target
    d2t = tensors["d2t"]
    if d2t.dtype not in _WHOLE or len(d2t.shape) != 1:
        fail(folder, f"d2t is {d2t.dtype} of shape {d2t.shape}, expected I64 or I32 for each drafted token")
    ids = d2t.read().view(_WHOLE[d2t.dtype]).astype(np.int64)
    if n_drafted not in (None, len(ids)):
        fail(folder, f"d2t has {len(ids)} tokens, but config.json says draft_vocab_size {n_drafted}")
    if ids.size and (ids.min() < -n_target or ids.max() > n_target):
        fail(folder, f"d2t names tokens beyond the target's {n_target}")
    ids += np.arange(len(ids))
    if t2d is not None and len(t2d) == n_target and ids.size and ids.min() >= 0 and ids.max() < n_target:
        marked = t2d != 0
        if marked.sum() != len(ids) or not marked[ids].all():
            fail(folder, "t2d marks other tokens than d2t names")
    return ids, n_target


def fail(folder: Path, actual: str) -> NoReturn:
    """Raise ModelFormatError for a folder."""
    raise ModelFormatError(f"{folder}: {actual}; the files are damaged, or not of one head: download all of them again")
