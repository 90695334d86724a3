"""Read an EAGLE-3 head from a folder with config.json and safetensors files.

SafeAILab and SpecForge call the layer `midlayer`, speculators `layers.0`; the rest of the names are the same. `d2t`
holds offsets here: row i of the output matrix is the target's token i + d2t[i].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import FLOATS
from edgedec_runtimes.trained_heads.card import HeadCard, Target
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.record import Record, read_record
from edgedec_runtimes.trained_heads.settings import Settings, read_settings
from edgedec_runtimes.trained_heads.shapes import ALWAYS, checked_head
from edgedec_runtimes.weights.safetensors import Tensor, open_checkpoint, read_json

CONFIG = "config.json"
_LAYER = {
    "input_layernorm.weight": "input_norm",
    "hidden_norm.weight": "hidden_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_PREFIXES = ("midlayer.", "layers.0.")
_OUTER = {
    "fc.weight": "fc",
    "norm.weight": "output_norm",
    "input_norm.weight": "fc_norm",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "output",
}
_MAPS = {"d2t": "d2t", "t2d": "t2d"}
# What trainers store beside a head and no head uses.
_UNUSED = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
_UNUSED_IN_LAYER = frozenset({"self_attn.rotary_emb.inv_freq"})
_FLOAT_NAMES = {kind.name: kind for kind in FLOATS}
_WHOLE = {"I64": "<i8", "I32": "<i4"}


def read_checkpoint(folder: Path) -> Head:
    """Return the head that a folder holds.

    Raises:
        ModelNotFoundError: config.json or the weights are missing.
        ModelFormatError: A file is damaged, or files contradict each other.
        UnsupportedModelError: A setting or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: A file can't be read, or there is no memory for it.
    """
    settings = read_settings(folder / CONFIG, read_json(folder / CONFIG))
    record = read_record(folder)
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelNotFoundError(
            f"{folder}: the weights are a PyTorch file (.bin), which can run code when it is read; convert it to "
            "safetensors (huggingface.co/spaces/safetensors/convert), or take a checkpoint that has them"
        )
    found = open_checkpoint(folder)
    named = _by_name(folder, found)
    weights = {name: _weight(tensor) for name, tensor in named.items() if name not in _MAPS}
    _join_fc_norms(folder, weights, settings)
    if missing := sorted({*ALWAYS} - weights.keys()):
        _fail(folder, f"it has no tensor for {missing[0]!r}")
    if any(len(weights[name].shape) != 2 for name in ("fc", "gate")):
        _fail(folder, "its fc or gate is no matrix")
    if settings.rope_divisors is not None:
        weights["rope_divisors"] = HeadTensor.of(settings.rope_divisors)
    taps = settings.taps if record.taps is None else record.taps
    n_taps = len(taps) or settings.n_taps
    d2t, n_target = _vocabularies(folder, named, settings)
    card = _card(folder, settings, record, weights, n_taps, len(d2t), n_target)
    return checked_head(folder, card, weights, d2t, n_taps=n_taps)


def _card(
    folder: Path,
    settings: Settings,
    record: Record,
    weights: Mapping[str, HeadTensor],
    n_taps: int,
    n_draft: int,
    n_target: int,
) -> HeadCard:
    """Return the card, from all that was read."""
    n_embd_target, rest = divmod(weights["fc"].shape[1], n_taps)
    if rest or settings.n_embd_target not in (None, n_embd_target):
        _fail(
            folder,
            f"its fc has {weights['fc'].shape[1]} columns, expected {n_taps} taps of "
            f"{settings.n_embd_target or 'equal length'}",
        )
    own_output = "output" in weights
    if not own_output and not settings.norms_output:
        raise UnsupportedModelError(
            f"{folder}: norm_output is false beside the target's output matrix, which expects a norm; take a head that "
            "has an output matrix"
        )
    back = record.feeds_back_normed
    target = Target(name=settings.target_name) if settings.target_name else None
    noted = settings.notes if record.taps is None and back is None else ()
    return HeadCard(
        name=record.name or _name(folder),
        n_embd=settings.n_embd,
        n_embd_target=n_embd_target,
        n_ff=weights["gate"].shape[0],
        n_head=settings.n_head,
        n_head_kv=settings.n_head_kv,
        head_dim=settings.head_dim,
        rms_epsilon=settings.rms_epsilon,
        rope_base=settings.rope_base,
        taps=settings.taps if record.taps is None else record.taps,
        n_vocab_draft=n_draft,
        n_vocab_target=n_target,
        norm_before_residual=settings.norm_before_residual,
        fc_norm=settings.fc_norm,
        feeds_back_normed=settings.feeds_back_normed if back is None else back,
        norms_output=settings.norms_output,
        own_embedding="embedding" in weights,
        own_output=own_output,
        target=record.target or target,
        promise=record.promise,
        notes=noted,
    )


def _name(folder: Path) -> str:
    """Return the folder's name; OWNER/REPO for a folder hf/OWNER/REPO/REVISION, which a hub's files are kept in.

    >>> _name(Path("hf", "someone", "head", "main")), _name(Path("mine"))
    ('someone/head', 'mine')
    """
    revision, *above = reversed(folder.absolute().parts)
    return f"{above[1]}/{above[0]}" if len(above) > 2 and above[2] == "hf" else revision


def _by_name(folder: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of HeadTensor's table, fc_norm.0, fc_norm.1, ... and d2t and t2d among them."""
    named: dict[str, Tensor] = {}
    for full, tensor in found.items():
        prefix = next((prefix for prefix in _PREFIXES if full.startswith(prefix)), "")
        short = full.removeprefix(prefix)
        if full in _UNUSED or (prefix and short in _UNUSED_IN_LAYER):
            continue
        name = _LAYER.get(short) if prefix else _OUTER.get(full) or _MAPS.get(full) or _numbered_norm(full)
        if name is None:
            raise UnsupportedModelError(
                f"{folder}: tensor {full[:80]!r} is none that an EAGLE-3 head of one Llama layer has; edgedec does not "
                "run this head: take one without it"
            )
        if name in named:
            _fail(folder, f"it has both {named[name].name!r} and {full[:80]!r}")
        named[name] = tensor
    return named


def _numbered_norm(name: str) -> str | None:
    """Return "fc_norm.3" for "fc_norm.3.weight"; None for a name of another form."""
    short = name.removesuffix(".weight")
    number = short.removeprefix("fc_norm.")
    return short if short != name and number != short and number.isdecimal() and number.isascii() else None


def _weight(tensor: Tensor) -> HeadTensor:
    if tensor.dtype not in _FLOAT_NAMES or len(tensor.shape) not in (1, 2) or not tensor.n_bytes:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name[:80]!r} is {tensor.dtype} of shape {tensor.shape}, expected a matrix "
            f"or vector of {', '.join(_FLOAT_NAMES)}; take the checkpoint that is not quantized"
        )
    return HeadTensor(tensor.shape, _FLOAT_NAMES[tensor.dtype], tensor.read())


def _join_fc_norms(folder: Path, weights: dict[str, HeadTensor], settings: Settings) -> None:
    """Replace the norms of single taps by one tensor fc_norm; refuse norms that the settings don't say, or lack."""
    numbered = {name: weights.pop(name) for name in sorted(weights) if name.startswith("fc_norm.")}
    found = "joined" if "fc_norm" in weights else "each" if numbered else "none"
    if found != settings.fc_norm or (numbered and "fc_norm" in weights):
        raise UnsupportedModelError(
            f"{folder}: the tensors have {_NORM_WORDS[found]}, but config.json says {_NORM_WORDS[settings.fc_norm]} "
            "(norm_before_fc, fc_norm); take the config.json that belongs to these weights"
        )
    if numbered:
        n = len(numbered)
        if numbered.keys() != {f"fc_norm.{i}" for i in range(n)} or any(len(t.shape) != 1 for t in numbered.values()):
            _fail(folder, f"its norms before fc are {', '.join(numbered)}, expected vectors numbered from 0")
        weights["fc_norm"] = HeadTensor.of(np.concatenate([numbered[f"fc_norm.{i}"].floats() for i in range(n)]))


_NORM_WORDS = {"none": "no norm before fc", "joined": "one norm before fc", "each": "a norm for each tap"}


def _vocabularies(folder: Path, named: Mapping[str, Tensor], settings: Settings) -> tuple[NDArray[np.int64], int]:
    """Return the target's token ids by draft id, and the size of the target's vocabulary."""
    n_target = settings.n_vocab_target
    t2d = named["t2d"].read() if "t2d" in named else None
    if t2d is not None:
        if named["t2d"].dtype not in ("BOOL", "U8") or len(named["t2d"].shape) != 1:
            _fail(folder, f"t2d is {named['t2d'].dtype} of shape {named['t2d'].shape}, expected a BOOL for each token")
        n_target = len(t2d)
    if "embedding" in named and len(named["embedding"].shape) == 2:
        n_target = named["embedding"].shape[0]
    if n_target is None:
        _fail(folder, "neither config.json (vocab_size) nor a tensor says how many tokens the target has")
    if "d2t" not in named:
        n_draft = named["output"].shape[0] if "output" in named else settings.n_vocab_draft or n_target
        if n_draft != n_target or settings.n_vocab_draft not in (None, n_target):
            _fail(folder, f"it drafts {n_draft} of {n_target} tokens, but has no d2t that says which")
        return np.arange(n_target, dtype=np.int64), n_target
    d2t = named["d2t"]
    if d2t.dtype not in _WHOLE or len(d2t.shape) != 1:
        _fail(folder, f"d2t is {d2t.dtype} of shape {d2t.shape}, expected I64 or I32 for each drafted token")
    ids = d2t.read().view(_WHOLE[d2t.dtype]).astype(np.int64)
    if settings.n_vocab_draft not in (None, len(ids)):
        _fail(folder, f"d2t has {len(ids)} tokens, but config.json says draft_vocab_size {settings.n_vocab_draft}")
    if ids.size and (ids.min() < -n_target or ids.max() > n_target):
        _fail(folder, f"d2t names tokens beyond the target's {n_target}")
    ids += np.arange(len(ids))
    if t2d is not None and len(t2d) == n_target and ids.size and ids.min() >= 0 and ids.max() < n_target:
        marked = t2d != 0
        if marked.sum() != len(ids) or not marked[ids].all():
            _fail(folder, "t2d marks other tokens than d2t names")
    return ids, n_target


def _fail(folder: Path, found: str) -> NoReturn:
    raise ModelFormatError(f"{folder}: {found}; the files are damaged, or not of one head: download all of them again")
