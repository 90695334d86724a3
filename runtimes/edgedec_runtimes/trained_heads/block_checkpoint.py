"""Read a block head from a folder with config.json and safetensors files.

Trainers freeze `embed_tokens` and a full `lm_head`, which are copies of the target's: they are left out where the head
can borrow the target's. Early files of SpecForge put `logit_head.` before the names of the Markov head.
"""

import re
from dataclasses import replace
from pathlib import Path

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.trained_heads.block_settings import read_block_settings
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
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
from edgedec_runtimes.trained_heads.head import Head, HeadTensor, to_halves
from edgedec_runtimes.trained_heads.record import read_record
from edgedec_runtimes.trained_heads.settings import Settings
from edgedec_runtimes.trained_heads.shapes import checked_head, complete_confidence
from edgedec_runtimes.weights.safetensors import Tensor, read_json

MASK_FILE = "mask_embedding.pt"
OUTER = {
    "fc.weight": "fc",
    "hidden_norm.weight": "hidden_norm",
    "norm.weight": "output_norm",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "output",
    "mask": "mask",
    "markov_head.markov_w1.weight": "markov_w1",
    "markov_head.markov_w2.weight": "markov_w2",
    "markov_head.gate_proj.weight": "markov_gate",
    "markov_head.gate_proj.bias": "markov_gate_bias",
    "markov_head.joint_proj.weight": "markov_joint",
    "markov_head.joint_proj.bias": "markov_joint_bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection.weight": "selector_hidden",
    "confidence_head.proj.weight": "confidence",
    "confidence_head.proj.bias": "confidence_bias",
}
"""The names of a head's tensors by those of a checkpoint; `mask` is edgedec's own."""
IN_LAYER = LAYER | {
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "attention_conv.base_kernel": "attention_conv_base",
    "attention_conv.kernel_projection.weight": "attention_conv_proj",
    "mlp_conv.base_kernel": "mlp_conv_base",
    "mlp_conv.kernel_projection.weight": "mlp_conv_proj",
}
"""The names of a layer's tensors by those of a checkpoint, behind `layers.0.`."""
_LAYER_NAME = re.compile(r"layers\.(\d{1,3})\.(.+)", re.ASCII)
_BEFORE = re.compile(r"(model\.)?(logit_head\.)?")
# What trainers store beside a head and no head uses.
_UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")


def read_block_checkpoint(folder: Path) -> Head:
    """Return the block head that a folder holds.

    Raises:
        ModelNotFoundError: config.json or the weights are missing.
        ModelFormatError: A file is damaged, or files contradict each other.
        UnsupportedModelError: A setting or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: A file can't be read, or there is no memory for it.
    """
    settings = read_block_settings(folder / CONFIG, read_json(folder / CONFIG))
    if (folder / MASK_FILE).exists():
        raise UnsupportedModelError(
            f"{folder}: {MASK_FILE} is a PyTorch file, which can run code when it is read; take a GGUF of this head"
        )
    record = read_record(folder)
    said = settings.card
    tensors = by_name(folder, open_head(folder), _name_of, "a block head of Qwen3 layers")
    taps = said.taps if record.taps is None else record.taps
    n_embd_target = tap_length(folder, tensors, "layers.0.gate", len(taps))
    if n_embd_target == said.n_embd:
        _leave_out_copies(tensors, said)
    weights = {name: weight(tensor) for name, tensor in tensors.items() if name not in MAPS}
    d2t, n_target = vocabularies(folder, tensors, said.n_vocab_target, said.n_vocab_draft)
    shape = _complete(folder, weights, settings)
    card = replace(
        complete_card(folder, said, record, weights),
        n_embd_target=n_embd_target,
        n_ff=tensors["layers.0.gate"].shape[0],
        taps=taps,
        n_vocab_draft=len(d2t),
        n_vocab_target=n_target,
        block=shape,
    )
    head = checked_head(folder, card, weights, d2t, n_taps=len(taps))
    return _in_halves(head) if settings.neighbours else head


def _name_of(full: str) -> str | None:
    short = _BEFORE.sub("", full, count=1)
    if _UNUSED.fullmatch(short):
        return ""
    layer = _LAYER_NAME.fullmatch(short)
    if layer is not None and layer[2] in IN_LAYER:
        return f"layers.{int(layer[1])}.{IN_LAYER[layer[2]]}"
    return OUTER.get(short) or (short if short in MAPS else None)


def _leave_out_copies(tensors: dict[str, Tensor], card: HeadCard) -> None:
    """Take out the embedding, and an output matrix of the whole vocabulary."""
    tensors.pop("embedding", None)
    if "output" in tensors and tensors["output"].shape[:1] == (card.n_vocab_target,):
        del tensors["output"]


def _complete(folder: Path, weights: dict[str, HeadTensor], settings: Settings) -> BlockShape:
    """Add what config.json alone says, bring the confidence head to one form, and return the shape with both."""
    shape = settings.card.block
    assert shape is not None, "settings of a block"
    if settings.rope_divisors is not None:
        weights["rope_divisors"] = HeadTensor.of(settings.rope_divisors)
    if settings.has_confidence and "confidence" not in weights:
        fail(folder, "config.json says enable_confidence_head, but there is no confidence_head.proj.weight")
    complete_confidence(weights, n_embd=settings.card.n_embd, rank=shape.rank)
    mask = -1 if "mask" in weights else shape.mask_token
    return replace(shape, confidence="confidence" in weights, mask_token=mask)


def _in_halves(head: Head) -> Head:
    """Return a head whose RoPE turned pairs of neighbours as one that turns halves."""
    tensors = dict(head.tensors)
    for name, tensor in head.tensors.items():
        n_heads = {"q": head.card.n_head, "k": head.card.n_head_kv, "q_norm": 1, "k_norm": 1}
        if (n := n_heads.get(name.rpartition(".")[2])) is not None:
            tensors[name] = to_halves(tensor, n)
    return Head(head.card, tensors, head.d2t)
