"""Read an EAGLE-3 head from a GGUF of the architecture `eagle3`, as llama.cpp writes and loads it.

The names and keys are those of llama.cpp (its eagle3.cpp and its converter). llama.cpp rotates q and k in
pairs of neighbours, so their rows are put back into halves of a head. `d2t` holds the target's token ids themselves.
Keys of edgedec's own are those of gguf_values.py, beside this file; llama.cpp leaves them alone and drafts from the
target's whole vocabulary.
"""

from dataclasses import replace

from edgedec.gguf.file import GGUF
from edgedec_runtimes.trained_heads.gguf_values import HeadFile, with_linear_divisors
from edgedec_runtimes.trained_heads.head import Head, to_halves
from edgedec_runtimes.trained_heads.shapes import ALWAYS, checked_head

ARCHITECTURE = "eagle3"
TENSORS = {
    "fc": "fc.weight",
    "q": "blk.0.attn_q.weight",
    "k": "blk.0.attn_k.weight",
    "v": "blk.0.attn_v.weight",
    "o": "blk.0.attn_output.weight",
    "gate": "blk.0.ffn_gate.weight",
    "up": "blk.0.ffn_up.weight",
    "down": "blk.0.ffn_down.weight",
    "input_norm": "blk.0.attn_norm.weight",
    "hidden_norm": "blk.0.attn_norm_2.weight",
    "post_attention_norm": "blk.0.ffn_norm.weight",
    "output_norm": "output_norm.weight",
    "fc_norm": "enc.output_norm.weight",
    "embedding": "token_embd.weight",
    "output": "output.weight",
    "rope_divisors": "rope_freqs.weight",
}
"""The names of a head's tensors in a GGUF, by the names of edgedec_runtimes.trained_heads.head."""
# The settings that this file reads, and those that change no token.
_KEYS = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon block_count context_length embedding_length feed_forward_length norm_before_fc
    norm_before_residual rope.dimension_count rope.freq_base rope.scaling.factor rope.scaling.type target_hidden_size
    target_layers vocab_size
    """.split()
)


def read_eagle3(gguf: GGUF) -> Head:
    """Return the head that a GGUF holds.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: A key or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    file = HeadFile(gguf, ARCHITECTURE)
    record = file.record()
    file.check_known(_KEYS, frozenset(TENSORS.values()), "an eagle3 head")
    if file.whole("block_count") != 1:
        file.refuse("block_count", "expected 1")
    taps = file.layers("target_layers") if record.taps is None else record.taps
    weights = {short: file.weight(name) for short, name in TENSORS.items() if name in gguf.tensors}
    if missing := sorted({*ALWAYS} - weights.keys()):
        file.fail(f"it has no tensor {TENSORS[missing[0]]!r}")
    for name in ("fc", "gate", "embedding", "output"):
        if name in weights and len(weights[name].shape) != 2:
            file.fail(f"its tensor {TENSORS[name]!r} is no matrix")
    n_target = weights["embedding"].shape[0] if "embedding" in weights else file.n_vocab()
    d2t = file.d2t(weights["output"].shape[0] if "output" in weights else None, n_target)
    sizes = {"n_embd_target": file.whole("target_hidden_size"), "n_draft": len(d2t), "n_target": n_target}
    card = replace(
        file.card(record, taps=taps, **sizes),
        norm_before_residual=file.flag("norm_before_residual", False),
        fc_norm="joined" if file.flag("norm_before_fc", False) else "none",
        feeds_back_normed=bool(record.feeds_back_normed),
    )
    head = checked_head(file.path, card, weights, d2t, n_taps=len(taps))
    tensors = dict(head.tensors)
    for name, n_heads in (("q", card.n_head), ("k", card.n_head_kv)):
        tensors[name] = to_halves(tensors[name], n_heads)
    with_linear_divisors(file, tensors, card.head_dim)
    return Head(card, tensors, head.d2t)
