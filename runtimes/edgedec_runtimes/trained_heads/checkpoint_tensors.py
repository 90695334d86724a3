"""What checkpoints of all trained heads share: tensors by their own names, and the list of drafted tokens.

`d2t` holds offsets here: row i of the output matrix is the target's token i + d2t[i].
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import FLOATS
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import HeadTensor
from edgedec_runtimes.trained_heads.record import Record
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


def by_name(
    folder: Path, tensors: Mapping[str, Tensor], name_of: Callable[[str], str | None], form: str
) -> dict[str, Tensor]:
    """Return the tensors by the names of HeadTensor's table, and d2t and t2d among them.

    Args:
        name_of: Returns such a name for a checkpoint's; "" for one that no head uses, and None for an unknown one.
        form: The form of head, for messages.
    """
    renamed: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = name_of(full)
        if name is None:
            raise UnsupportedModelError(
                f"{folder}: tensor {full[:80]!r} is none that {form} has; edgedec does not run this head: take one "
                "without it"
            )
        if name in renamed:
            fail(folder, f"it has both {renamed[name].name!r} and {full[:80]!r}")
        if name:
            renamed[name] = tensor
    return renamed


def tap_length(folder: Path, tensors: Mapping[str, Tensor], gate: str, n_taps: int, expected: int = 0) -> int:
    """Return the length of a tap, by the columns of fc (raises ModelFormatError; also where fc or gate is no matrix).

    Args:
        gate: The name of a gate.
        expected: The length; 0 where config.json does not say it.
    """
    for name in ("fc", gate):
        if name not in tensors:
            fail(folder, f"it has no tensor for {name!r}")
        if len(tensors[name].shape) != 2:
            fail(folder, f"its {name} is no matrix")
    n_columns = tensors["fc"].shape[1]
    length, rest = divmod(n_columns, n_taps)
    if rest or not length or expected not in (0, length):
        fail(folder, f"its fc has {n_columns} columns, expected {n_taps} taps of {expected or 'equal length'}")
    return length


def complete_card(folder: Path, card: HeadCard, record: Record, weights: Mapping[str, HeadTensor]) -> HeadCard:
    """Return the card of a head with what the record and the weights say."""
    return replace(
        card,
        name=record.name or head_name(folder),
        own_embedding="embedding" in weights,
        own_output="output" in weights,
        target=record.target or card.target,
        promise=record.promise,
    )


def vocabularies(
    folder: Path, tensors: Mapping[str, Tensor], n_target: int, n_drafted: int
) -> tuple[NDArray[np.int64], int]:
    """Return the target's token ids by draft id, and the size of the target's vocabulary.

    Args:
        tensors: The tensors `d2t`, `t2d`, `embedding` and `output`, where there are any.
        n_target: The size of the target's vocabulary; 0 where config.json does not say it.
        n_drafted: How many tokens the head drafts; 0 where config.json does not say it.
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
    if not n_target:
        fail(folder, "neither config.json (vocab_size) nor a tensor says how many tokens the target has")
    if "d2t" not in tensors:
        n_draft = tensors["output"].shape[0] if "output" in tensors else n_drafted or n_target
        if n_draft != n_target or n_drafted not in (0, n_target):
            fail(folder, f"it drafts {n_draft} of {n_target} tokens, but has no d2t that says which")
        return np.arange(n_target, dtype=np.int64), n_target
    d2t = tensors["d2t"]
    if d2t.dtype not in _WHOLE or len(d2t.shape) != 1:
        fail(folder, f"d2t is {d2t.dtype} of shape {d2t.shape}, expected I64 or I32 for each drafted token")
    ids = d2t.read().view(_WHOLE[d2t.dtype]).astype(np.int64)
    if n_drafted not in (0, len(ids)):
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
