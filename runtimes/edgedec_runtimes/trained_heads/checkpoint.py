"""Read an EAGLE-3 head from a folder with config.json and safetensors files.

SafeAILab and SpecForge call the layer `midlayer`, speculators `layers.0`; the rest of the names are the same.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.trained_heads.card import FcNorm
from edgedec_runtimes.trained_heads.checkpoint_tensors import (
    CONFIG,
    LAYER,
    MAPS,
    by_name,
    complete_card,
    fail,
    open_head,
    tap_length,
    vocabularies,
    weight,
)
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.record import read_record
from edgedec_runtimes.trained_heads.settings import read_settings
from edgedec_runtimes.trained_heads.shapes import checked_head
from edgedec_runtimes.weights.safetensors import read_json

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
    card, record = settings.card, read_record(folder)
    tensors = by_name(folder, open_head(folder), _name_of, "an EAGLE-3 head of one Llama layer")
    taps = card.taps if record.taps is None else record.taps
    n_taps = len(taps) or settings.n_taps
    n_embd_target = tap_length(folder, tensors, "gate", n_taps, card.n_embd_target)
    weights = {name: weight(tensor) for name, tensor in tensors.items() if name not in MAPS}
    _join_fc_norms(folder, weights, card.fc_norm)
    if settings.rope_divisors is not None:
        weights["rope_divisors"] = HeadTensor.of(settings.rope_divisors)
    if "output" not in weights and not card.norms_output:
        raise UnsupportedModelError(
            f"{folder}: norm_output is false beside the target's output matrix, which expects a norm; take a head that "
            "has an output matrix"
        )
    d2t, n_target = vocabularies(folder, tensors, card.n_vocab_target, card.n_vocab_draft)
    back = record.feeds_back_normed
    card = replace(
        complete_card(folder, card, record, weights),
        n_embd_target=n_embd_target,
        n_ff=weights["gate"].shape[0],
        taps=taps,
        n_vocab_draft=len(d2t),
        n_vocab_target=n_target,
        feeds_back_normed=card.feeds_back_normed if back is None else back,
        notes=card.notes if record.taps is None and back is None else (),
    )
    return checked_head(folder, card, weights, d2t, n_taps=n_taps)


def _name_of(full: str) -> str | None:
    prefix = next((prefix for prefix in _PREFIXES if full.startswith(prefix)), "")
    short = full.removeprefix(prefix)
    if full in _UNUSED or (prefix and short in _UNUSED_IN_LAYER):
        return ""
    return _LAYER.get(short) if prefix else _OUTER.get(full) or (full if full in MAPS else _numbered_norm(full))


def _numbered_norm(name: str) -> str | None:
    """Return "fc_norm.3" for "fc_norm.3.weight"; None for a name of another form."""
    short = name.removesuffix(".weight")
    number = short.removeprefix("fc_norm.")
    return short if short != name and number != short and number.isdecimal() and number.isascii() else None


def _join_fc_norms(folder: Path, weights: dict[str, HeadTensor], expected: FcNorm) -> None:
    """Replace the norms of single taps by one tensor fc_norm; refuse norms that the settings don't say, or lack."""
    numbered = {name: weights.pop(name) for name in sorted(weights) if name.startswith("fc_norm.")}
    norms = "joined" if "fc_norm" in weights else "each" if numbered else "none"
    if norms != expected or (numbered and "fc_norm" in weights):
        raise UnsupportedModelError(
            f"{folder}: the tensors have {_NORM_WORDS[norms]}, but config.json says {_NORM_WORDS[expected]} "
            "(norm_before_fc, fc_norm); take the config.json that belongs to these weights"
        )
    if numbered:
        n = len(numbered)
        if numbered.keys() != {f"fc_norm.{i}" for i in range(n)} or any(len(t.shape) != 1 for t in numbered.values()):
            fail(folder, f"its norms before fc are {', '.join(numbered)}, expected vectors numbered from 0")
        weights["fc_norm"] = HeadTensor.of(np.concatenate([numbered[f"fc_norm.{i}"].floats() for i in range(n)]))


_NORM_WORDS = {"none": "no norm before fc", "joined": "one norm before fc", "each": "a norm for each tap"}
