"""Read a block head from a GGUF: llama.cpp's architecture `dflash`, or ik_llama.cpp's `dflash-draft`.

The names and keys are those of llama.cpp (its dflash.cpp and its converter), where a block of rows turns halves of a
head. What llama.cpp has no place for are tensors of edgedec's own, so that llama.cpp refuses the file rather than draft
wrongly: `edgedec.mask` (the embedding of masked rows), and the matrices of a gated or a recurrent Markov head.

- `dflash`: target_layers are layers that the taps enter. Without sample_from_anchor, rows are shifted beside a Markov
  head, as llama.cpp reads them; beside a selector they are not.
- `dflash-draft`: dflash.target_layer_ids are layers whose output is tapped. Rows are shifted beside a Markov head.
- A window counts rows, the row itself included. All rows of a block see the features that its first one sees.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import WHOLE, get_array, get_float, get_int, get_per_layer
from edgedec_runtimes.trained_heads.block_settings import MOST_LAYERS, MOST_ROWS
from edgedec_runtimes.trained_heads.card import BlockShape, Markov
from edgedec_runtimes.trained_heads.gguf_values import MOST_VALUES, TOKEN_IDS_KEY, HeadFile, with_linear_divisors
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.shapes import checked_head, complete_confidence

ARCHITECTURE = "dflash"
IK_ARCHITECTURE = "dflash-draft"
MASK_KEY = "tokenizer.ggml.mask_token_id"
_OUTER = {
    "fc": "fc.weight",
    "hidden_norm": "enc.output_norm.weight",
    "output_norm": "output_norm.weight",
    "embedding": "token_embd.weight",
    "output": "output.weight",
    "rope_divisors": "rope_freqs.weight",
    "mask": "edgedec.mask",
    "markov_w1": "markov_w1.weight",
    "markov_w2": "markov_w2.weight",
    "markov_gate": "edgedec.markov_gate.weight",
    "markov_gate_bias": "edgedec.markov_gate.bias",
    "markov_joint": "edgedec.markov_joint.weight",
    "markov_joint_bias": "edgedec.markov_joint.bias",
    "selector_predecessor": "selector_predecessor.weight",
    "selector_successor": "selector_successor.weight",
    "selector_hidden": "selector_hidden.weight",
    "confidence": "conf_proj.weight",
    "confidence_bias": "conf_proj.bias",
}
_IN_LAYER = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "input_norm": "attn_norm.weight",
    "post_attention_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attention_conv_base": "attn_conv_base",
    "attention_conv_proj": "attn_conv_proj.weight",
    "mlp_conv_base": "ffn_conv_base",
    "mlp_conv_proj": "ffn_conv_proj.weight",
}
# A tensor or a setting with one of these in its name belongs to a form of block head that edgedec does not run.
_RELATIVES = {
    "hyper_connection": "DeepSeek-V4's form, with experts",
    "laguna": "Laguna's form, with gates and a norm for each tap",
    "attn_sinks": "a form with attention sinks",
    "layer_output_scale": "Gemma 4's form, with norms of its own",
}
_SIZES = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
# The settings that this file reads, and those that change no token.
_KEYS = frozenset(_SIZES).union(
    """
    attention.causal attention.layer_norm_rms_epsilon attention.scale attention.sliding_window
    attention.sliding_window_pattern attention.value_scale block_count block_size context_length conv_group_size
    conv_kernel_size embedding_length embedding_scale feed_forward_length final_logit_softcapping has_confidence_head
    hidden_act logit_scale rope.dimension_count rope.dimension_sections rope.freq_base rope.scaling.factor
    rope.scaling.type sample_from_anchor selector_rank selector_top_k target_layers vocab_size
    dflash.backbone_rotary_base dflash.block_size dflash.laguna dflash.mask_token_id dflash.n_target_features
    dflash.target_layer_ids
    """.split()
)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How an architecture says what all block heads say.

    Attributes:
        outer: The names of tensors by those of edgedec_runtimes.trained_heads.head, but for those of layers.
        in_layer: Those of a layer's tensors, behind `blk.0.`.
        taps: The key of the tapped layers.
        first_tap: What is added to them.
        size: The key of the rows of a block.
        mask: The whole name of the key of the mask's token.
    """

    architecture: str
    outer: Mapping[str, str]
    in_layer: Mapping[str, str]
    taps: str
    first_tap: int
    size: str
    mask: str


DFLASH = _Dialect(ARCHITECTURE, _OUTER, _IN_LAYER, "target_layers", 0, "block_size", MASK_KEY)
IK = _Dialect(
    IK_ARCHITECTURE,
    _OUTER | {"fc": "dflash_fc.weight", "hidden_norm": "dflash_hidden_norm.weight"},
    _IN_LAYER | {"post_attention_norm": "post_attention_norm.weight"},
    "dflash.target_layer_ids",
    1,
    "dflash.block_size",
    f"{IK_ARCHITECTURE}.dflash.mask_token_id",
)


def tensor_name(short: str) -> str:
    """Return the name in a GGUF of the architecture `dflash` for one of edgedec_runtimes.trained_heads.head.

    >>> tensor_name("layers.1.q"), tensor_name("hidden_norm")
    ('blk.1.attn_q.weight', 'enc.output_norm.weight')
    """
    layer, _, name = short.rpartition(".")
    return f"blk.{layer.removeprefix('layers.')}.{_IN_LAYER[name]}" if layer else _OUTER[name]


def read_dflash(gguf: GGUF, dialect: _Dialect) -> Head:
    """Return the head that a GGUF of one of the two architectures holds (raises what read_gguf_head raises)."""
    file = HeadFile(gguf, dialect.architecture)
    record = file.record()
    _refuse_relatives(file)
    n_layer = file.whole("block_count", most=MOST_LAYERS)
    names = dict(dialect.outer)
    for i in range(n_layer):
        names |= {f"layers.{i}.{short}": f"blk.{i}.{name}" for short, name in dialect.in_layer.items()}
    file.check_known(_KEYS, frozenset(names.values()), "a block head")
    taps = tuple(i + dialect.first_tap for i in file.layers(dialect.taps)) if record.taps is None else record.taps
    if list(taps) != sorted(taps):
        file.fail(f"the tapped layers are {taps}, expected rising ones")
    tensors = {short: file.weight(name) for short, name in names.items() if name in gguf.tensors}
    shape = _shape(file, dialect, tensors, n_layer)
    _complete(file, tensors, names, shape.rank)
    n_target = tensors["embedding"].shape[0] if "embedding" in tensors else file.n_vocab()
    d2t = file.d2t(tensors["output"].shape[0] if "output" in tensors else None, n_target)
    n_columns = tensors["fc"].shape[1]
    if n_columns % len(taps) or not n_columns:
        file.fail(f"its fc has {n_columns} columns, expected {len(taps)} taps of equal length")
    sizes = {"n_embd_target": n_columns // len(taps), "n_draft": len(d2t), "n_target": n_target}
    card = replace(file.card(record, taps=taps, **sizes), own_output="output" in tensors, block=shape)
    _check_attention(file, card.head_dim)
    if shape.windows:
        seen = max(shape.windows)
        note = f"rows see the last {seen} tokens before the newest one, from where the first row stands"
        card = replace(card, notes=(note,))
    with_linear_divisors(file, tensors, card.head_dim)
    return checked_head(file.path, card, tensors, d2t, n_taps=len(taps))


def _refuse_relatives(file: HeadFile) -> None:
    """Refuse drafters of this architecture that compute something else."""
    for name in sorted((*file.gguf.metadata, *file.gguf.tensors)):
        form = next((form for part, form in _RELATIVES.items() if part in name), None)
        if form is not None and not (name.endswith("laguna") and file.gguf.metadata.get(name) is False):
            raise UnsupportedModelError(
                f"{file.path}: {name[:80]!r} is of {form}, which edgedec does not run; take another head"
            )


def _shape(file: HeadFile, dialect: _Dialect, tensors: Mapping[str, HeadTensor], n_layer: int) -> BlockShape:
    markov: Markov = "vanilla" if "markov_w1" in tensors else "none"
    if "markov_gate" in tensors:
        markov = "gated"
    elif "markov_joint" in tensors:
        markov = "rnn"
    elif "selector_predecessor" in tensors:
        markov = "selector"
    table = tensors.get("markov_w1") or tensors.get("selector_predecessor")
    mask = get_int(file.gguf, dialect.mask, at_most=MOST_VALUES)
    softcap = get_float(file.gguf, f"{file.architecture}.final_logit_softcapping") or 0.0
    if not 0 <= softcap < 1e30:
        file.fail(f"{file.architecture}.final_logit_softcapping is {softcap}, expected a positive number, or 0")
    return BlockShape(
        n_layer=n_layer,
        size=file.whole(dialect.size, most=MOST_ROWS),
        shifted=file.flag("sample_from_anchor", markov not in ("none", "selector")),
        causal=file.flag("attention.causal", False),
        windows=_windows(file, n_layer),
        markov=markov,
        rank=0 if table is None else table.shape[-1],
        top_k=file.counted("selector_top_k"),
        conv_length=file.counted("conv_kernel_size"),
        conv_group=file.counted("conv_group_size"),
        confidence="confidence" in tensors,
        logit_scale=file.positive("logit_scale") or 1.0,
        softcap=softcap,
        embedding_scale=file.positive("embedding_scale") or 1.0,
        mask_token=-1 if mask is None or "mask" in tensors else mask,
    )


def _windows(file: HeadFile, n_layer: int) -> tuple[int, ...]:
    key = "attention.sliding_window"
    rows = get_int(file.gguf, f"{file.architecture}.{key}", at_most=MOST_VALUES)
    if not rows:
        return ()
    if rows < 2:
        file.refuse(key, "1, expected 2 or more")
    slides = get_per_layer(file.gguf, f"{file.architecture}.{key}_pattern", n_layer, at_most=1)
    windows = tuple((rows - 1) * slide for slide in slides or (1,) * n_layer)
    return windows if any(windows) else ()


def _complete(file: HeadFile, tensors: dict[str, HeadTensor], names: Mapping[str, str], rank: int) -> None:
    """Refuse a file without its first matrices, and bring confidence and a tied output matrix to one form."""
    for short in ("fc", "layers.0.gate", "embedding", "output", "markov_w1", "markov_w2", "selector_predecessor"):
        if short in tensors and len(tensors[short].shape) != 2:
            file.fail(f"its tensor {names[short]!r} is no matrix")
    if "fc" not in tensors:
        file.fail(f"it has no tensor {names['fc']!r}")
    complete_confidence(tensors, n_embd=tensors["fc"].shape[0], rank=rank)
    if "embedding" in tensors and TOKEN_IDS_KEY not in file.gguf.metadata:
        tensors.setdefault("output", tensors["embedding"])


def _check_attention(file: HeadFile, head_dim: int) -> None:
    """Refuse an attention or an activation of another form."""
    scale, usual = file.positive("attention.scale"), head_dim**-0.5
    if scale is not None and not isclose(scale, usual, rel_tol=1e-4):
        file.refuse("attention.scale", f"{scale}, expected {usual:.6g}")
    if (value_scale := file.positive("attention.value_scale")) not in (None, 1.0):
        file.refuse("attention.value_scale", f"{value_scale}, expected 1")
    if (activation := file.text("hidden_act")) not in (None, "silu"):
        file.refuse("hidden_act", f"{activation[:40]!r}, expected silu")
    base = file.positive("dflash.backbone_rotary_base")
    if base is not None and base != file.positive("rope.freq_base"):
        file.refuse("dflash.backbone_rotary_base", f"{base}, expected that of rope.freq_base")
    sections = get_array(file.gguf, f"{file.architecture}.rope.dimension_sections", WHOLE)
    if sections is not None and sections.numpy().tolist() != [head_dim // 2, 0, 0, 0]:
        file.refuse(
            "rope.dimension_sections", f"{sections.numpy().tolist()!s:.40}, expected {[head_dim // 2, 0, 0, 0]}"
        )
