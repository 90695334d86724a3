"""Read an EAGLE-3 head from a folder with config.json and safetensors files.

SafeAILab and SpecForge call the layer `midlayer`, speculators `layers.0`; the rest of the names are the same.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.trained_heads.card import HeadCard, Target
from edgedec_runtimes.trained_heads.checkpoint_tensors import (
    CONFIG,
    LAYER,
    MAPS,
    fail,
    head_name,
    open_head,
    vocabularies,
    weight,
)
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.record import Record, read_record
from edgedec_runtimes.trained_heads.settings import Settings, read_settings
from edgedec_runtimes.trained_heads.shapes import ALWAYS, checked_head
from edgedec_runtimes.weights.safetensors import Tensor, read_json

_LAYER = LAYER | {"hidden_norm.weight": "hidden_norm"}
_PREFIXES = ("midlayer.", "layers.0.")
_OUTER = {
    "fc.weight": "fc",
    "norm.weight": "output_norm",
    "input_norm.weight": "fc_norm",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "output",
}
# What trainers store beside a head and no head uses.
_UNUSED = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
_UNUSED_IN_LAYER = frozenset({"self_attn.rotary_emb.inv_freq"})


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
    tensors = _by_name(folder, open_head(folder))
    weights = {name: weight(tensor) for name, tensor in tensors.items() if name not in MAPS}
    _join_fc_norms(folder, weights, settings)
    if missing := sorted({*ALWAYS} - weights.keys()):
        fail(folder, f"it has no tensor for {missing[0]!r}")
    if any(len(weights[name].shape) != 2 for name in ("fc", "gate")):
        fail(folder, "its fc or gate is no matrix")
    if settings.rope_divisors is not None:
        weights["rope_divisors"] = HeadTensor.of(settings.rope_divisors)
    taps = settings.taps if record.taps is None else record.taps
    n_taps = len(taps) or settings.n_taps
    d2t, n_target = vocabularies(folder, tensors, settings.n_vocab_target, settings.n_vocab_draft)
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
        fail(
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
        name=record.name or head_name(folder),
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


def _by_name(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of HeadTensor's table, fc_norm.0, fc_norm.1, ... and d2t and t2d among them."""
    by_name: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if full.startswith(prefix)), "")
        short = full.removeprefix(prefix)
        if full in _UNUSED or (prefix and short in _UNUSED_IN_LAYER):
            continue
        name = _LAYER.get(short) if prefix else _OUTER.get(full) or (full if full in MAPS else _numbered_norm(full))
        if name is None:
            raise UnsupportedModelError(
                f"{folder}: tensor {full[:80]!r} is none that an EAGLE-3 head of one Llama layer has; edgedec does not "
                "run this head: take one without it"
            )
        if name in by_name:
            fail(folder, f"it has both {by_name[name].name!r} and {full[:80]!r}")
        by_name[name] = tensor
    return by_name


def _numbered_norm(name: str) -> str | None:
    """Return "fc_norm.3" for "fc_norm.3.weight"; None for a name of another form."""
    short = name.removesuffix(".weight")
    number = short.removeprefix("fc_norm.")
    return short if short != name and number != short and number.isdecimal() and number.isascii() else None


def _join_fc_norms(folder: Path, weights: dict[str, HeadTensor], settings: Settings) -> None:
    """Replace the norms of single taps by one tensor fc_norm; refuse norms that the settings don't say, or lack."""
    numbered = {name: weights.pop(name) for name in sorted(weights) if name.startswith("fc_norm.")}
    norms = "joined" if "fc_norm" in weights else "each" if numbered else "none"
    if norms != settings.fc_norm or (numbered and "fc_norm" in weights):
        raise UnsupportedModelError(
            f"{folder}: the tensors have {_NORM_WORDS[norms]}, but config.json says {_NORM_WORDS[settings.fc_norm]} "
            "(norm_before_fc, fc_norm); take the config.json that belongs to these weights"
        )
    if numbered:
        n = len(numbered)
        if numbered.keys() != {f"fc_norm.{i}" for i in range(n)} or any(len(t.shape) != 1 for t in numbered.values()):
            fail(folder, f"its norms before fc are {', '.join(numbered)}, expected vectors numbered from 0")
        weights["fc_norm"] = HeadTensor.of(np.concatenate([numbered[f"fc_norm.{i}"].floats() for i in range(n)]))


_NORM_WORDS = {"none": "no norm before fc", "joined": "one norm before fc", "each": "a norm for each tap"}
