"""Read a block head from a folder with config.json and safetensors files.

Trainers freeze `embed_tokens` and a full `lm_head`, which are copies of the target's: they are left out where the head
can borrow the target's. Early files of SpecForge put `logit_head.` before the names of the Markov head.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.trained_heads.block_settings import BlockSettings, read_block_settings
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
from edgedec_runtimes.trained_heads.head import Head, HeadTensor, to_halves
from edgedec_runtimes.trained_heads.record import read_record
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
    tensors = _by_name(folder, open_head(folder))
    taps = settings.taps if record.taps is None else record.taps
    n_embd_target, n_ff = _sizes(folder, tensors, len(taps))
    if n_embd_target == settings.n_embd:
        _leave_out_copies(tensors, settings)
    weights = {name: weight(tensor) for name, tensor in tensors.items() if name not in MAPS}
    d2t, n_target = vocabularies(folder, tensors, settings.n_vocab_target, settings.n_vocab_draft)
    _complete(folder, weights, settings)
    card = HeadCard(
        name=record.name or head_name(folder),
        n_embd=settings.n_embd,
        n_embd_target=n_embd_target,
        n_ff=n_ff,
        n_head=settings.n_head,
        n_head_kv=settings.n_head_kv,
        head_dim=settings.head_dim,
        rms_epsilon=settings.rms_epsilon,
        rope_base=settings.rope_base,
        taps=taps,
        n_vocab_draft=len(d2t),
        n_vocab_target=n_target,
        own_embedding="embedding" in weights,
        own_output="output" in weights,
        target=record.target or (Target(name=settings.target_name) if settings.target_name else None),
        promise=record.promise,
        notes=settings.notes,
        block=replace(
            settings.shape,
            confidence="confidence" in weights,
            mask_token=-1 if "mask" in weights else settings.shape.mask_token,
        ),
    )
    head = checked_head(folder, card, weights, d2t, n_taps=len(taps))
    return _in_halves(head) if settings.neighbours else head


def _by_name(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of HeadTensor's table, and d2t and t2d among them."""
    by_name: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        short = _BEFORE.sub("", full, count=1)
        if _UNUSED.fullmatch(short):
            continue
        layer = _LAYER_NAME.fullmatch(short)
        name = OUTER.get(short) or (short if short in MAPS else None)
        if layer is not None and layer[2] in IN_LAYER:
            name = f"layers.{int(layer[1])}.{IN_LAYER[layer[2]]}"
        if name is None:
            raise UnsupportedModelError(
                f"{folder}: tensor {full[:80]!r} is none that a block head of Qwen3 layers has; edgedec does not run "
                "this head: take one without it"
            )
        if name in by_name:
            fail(folder, f"it has both {by_name[name].name!r} and {full[:80]!r}")
        by_name[name] = tensor
    return by_name


def _sizes(folder: Path, tensors: Mapping[str, Tensor], n_taps: int) -> tuple[int, int]:
    """Return the length of a tap, and the rows of gate."""
    for name in ("fc", "layers.0.gate"):
        if name not in tensors:
            fail(folder, f"it has no tensor for {name!r}")
        if len(tensors[name].shape) != 2:
            fail(folder, f"its {name} is no matrix")
    n_columns = tensors["fc"].shape[1]
    if n_columns % n_taps or not n_columns:
        fail(folder, f"its fc has {n_columns} columns, expected {n_taps} taps of equal length")
    return n_columns // n_taps, tensors["layers.0.gate"].shape[0]


def _leave_out_copies(tensors: dict[str, Tensor], settings: BlockSettings) -> None:
    """Take out the embedding, and an output matrix of the whole vocabulary."""
    tensors.pop("embedding", None)
    if "output" in tensors and tensors["output"].shape[:1] == (settings.n_vocab_target,):
        del tensors["output"]


def _complete(folder: Path, weights: dict[str, HeadTensor], settings: BlockSettings) -> None:
    """Add what config.json alone says, and bring the confidence head to one form."""
    if settings.rope_divisors is not None:
        weights["rope_divisors"] = HeadTensor.of(settings.rope_divisors)
    if settings.has_confidence and "confidence" not in weights:
        fail(folder, "config.json says enable_confidence_head, but there is no confidence_head.proj.weight")
    complete_confidence(weights, n_embd=settings.n_embd, rank=settings.shape.rank)


def _in_halves(head: Head) -> Head:
    """Return a head whose RoPE turned pairs of neighbours as one that turns halves."""
    tensors = dict(head.tensors)
    for name, tensor in head.tensors.items():
        n_heads = {"q": head.card.n_head, "k": head.card.n_head_kv, "q_norm": 1, "k_norm": 1}
        if (n := n_heads.get(name.rpartition(".")[2])) is not None:
            tensors[name] = to_halves(tensor, n)
    return Head(head.card, tensors, head.d2t)
