"""Read an EAGLE-3 head from a GGUF of the architecture `eagle3`, as llama.cpp writes and loads it.

The names and keys are those of llama.cpp (its eagle3.cpp and its converter). llama.cpp rotates q and k in
pairs of neighbours, so their rows are put back into halves of a head. `d2t` holds the target's token ids themselves.

Keys of edgedec's own: `edgedec.head` (a record) and `edgedec.head.token_ids`, which stands for d2t in a file without
an output matrix. llama.cpp does not take a shorter d2t beside the target's matrix; it leaves the key alone and drafts
from the target's whole vocabulary.
"""

from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF, ValueType
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.metadata import WHOLE, get_array, get_bool, get_float, get_int, get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor, to_halves
from edgedec_runtimes.trained_heads.record import MOST_LAYERS, MOST_TAPS, RECORD_KEY, Record, parse_record
from edgedec_runtimes.trained_heads.shapes import ALWAYS, checked_head
from edgedec_runtimes.weights.levels import LEVELS

ARCHITECTURE = "eagle3"
TOKEN_IDS_KEY = f"{RECORD_KEY}.token_ids"
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
D2T = "d2t"
_NAMES = {name: short for short, name in TENSORS.items()}
_MOST_VALUES = 2**24
# The settings that this file reads, and those that change no token.
_KEYS = frozenset(
    {
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length"),
        *("feed_forward_length", "norm_before_fc", "norm_before_residual", "rope.dimension_count", "rope.freq_base"),
        *("rope.scaling.factor", "rope.scaling.type", "target_hidden_size", "target_layers", "vocab_size"),
    }
)


def is_head(gguf: GGUF) -> bool:
    """Return whether a GGUF holds a draft head rather than a model."""
    return gguf.metadata.get("general.architecture") == ARCHITECTURE


def read_gguf_head(gguf: GGUF) -> Head:
    """Return the head that a GGUF holds.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: A key or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    path = gguf.paths[0]
    record = gguf_record(gguf)
    _check_keys(gguf)
    taps = _taps(gguf) if record.taps is None else record.taps
    weights = {short: _weight(gguf, gguf.tensors[name]) for short, name in TENSORS.items() if name in gguf.tensors}
    if missing := sorted({*ALWAYS} - weights.keys()):
        _fail(path, f"it has no tensor {TENSORS[missing[0]]!r}")
    for name in ("fc", "gate", "embedding", "output"):
        if name in weights and len(weights[name].shape) != 2:
            _fail(path, f"its tensor {TENSORS[name]!r} is no matrix")
    n_target = weights["embedding"].shape[0] if "embedding" in weights else _n_vocab(gguf)
    d2t = _d2t(gguf, weights["output"].shape[0] if "output" in weights else None, n_target)
    card = _card(gguf, record, taps, len(d2t), n_target)
    head = checked_head(path, card, weights, d2t, n_taps=len(taps))
    tensors = dict(head.tensors)
    for name, n_heads in (("q", card.n_head), ("k", card.n_head_kv)):
        tensors[name] = to_halves(tensors[name], n_heads)
    if "rope_divisors" not in tensors and (factor := _linear_factor(gguf)) != 1:
        tensors["rope_divisors"] = HeadTensor.of(np.full(card.head_dim // 2, factor, np.float32))
    return Head(card, tensors, head.d2t)


def _card(gguf: GGUF, record: Record, taps: tuple[int, ...], n_draft: int, n_target: int) -> HeadCard:
    n_embd, n_head = _whole(gguf, "embedding_length"), _whole(gguf, "attention.head_count")
    head_dim = _whole(gguf, "attention.key_length", max(1, n_embd // n_head))
    n_head_kv = _whole(gguf, "attention.head_count_kv", n_head)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := _whole(gguf, key, head_dim)) != head_dim:
            _refuse(gguf, key, f"{found}, expected {head_dim}, the length of a head")
    if n_head % n_head_kv or head_dim % 2:
        _fail(gguf.paths[0], f"{n_head} heads of size {head_dim} cannot share {n_head_kv} key-value heads")
    epsilon, base = (_positive(gguf, key) for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"))
    if epsilon is None:
        _fail(gguf.paths[0], f"the metadata has no {ARCHITECTURE}.attention.layer_norm_rms_epsilon")
    return HeadCard(
        name=record.name or get_text(gguf, "general.name") or gguf.paths[0].stem,
        n_embd=n_embd,
        n_embd_target=_whole(gguf, "target_hidden_size"),
        n_ff=_whole(gguf, "feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        rms_epsilon=epsilon,
        rope_base=10000.0 if base is None else base,
        taps=taps,
        n_vocab_draft=n_draft,
        n_vocab_target=n_target,
        norm_before_residual=get_bool(gguf, f"{ARCHITECTURE}.norm_before_residual") or False,
        fc_norm="joined" if get_bool(gguf, f"{ARCHITECTURE}.norm_before_fc") else "none",
        feeds_back_normed=bool(record.feeds_back_normed),
        own_embedding=TENSORS["embedding"] in gguf.tensors,
        own_output=TENSORS["output"] in gguf.tensors,
        target=record.target,
        promise=record.promise,
    )


def gguf_record(gguf: GGUF) -> Record:
    """Return the record in a GGUF; an empty one where there is none (raises what parse_record raises)."""
    found = get_text(gguf, RECORD_KEY)
    return Record() if found is None else parse_record(found, gguf.paths[0])


def _check_keys(gguf: GGUF) -> None:
    """Refuse settings and tensors that edgedec does not know: they could change what the head drafts."""
    prefix = f"{ARCHITECTURE}."
    unknown = sorted(key for key in gguf.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS)
    if unknown:
        _refuse(gguf, unknown[0].removeprefix(prefix), "which edgedec does not know")
    if names := sorted(gguf.tensors.keys() - _NAMES.keys() - {D2T}):
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: tensor {names[0][:80]!r} is none that an eagle3 head has; edgedec does not run this "
            "head: take one without it"
        )
    if _whole(gguf, "block_count") != 1:
        _refuse(gguf, "block_count", "expected 1")


def _taps(gguf: GGUF) -> tuple[int, ...]:
    key = f"{ARCHITECTURE}.target_layers"
    found = get_array(gguf, key, WHOLE)
    if found is None or not 1 <= len(found) <= MOST_TAPS:
        _fail(gguf.paths[0], f"the metadata has no {key} of 1 to {MOST_TAPS} layers")
    taps = tuple(int(i) for i in found.numpy())
    if len(set(taps)) != len(taps) or not all(0 <= i <= MOST_LAYERS for i in taps):
        _fail(gguf.paths[0], f"{key} is {taps}, expected different layers from 0 to {MOST_LAYERS}")
    return taps


def _n_vocab(gguf: GGUF) -> int:
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    return _whole(gguf, "vocab_size") if tokens is None else len(tokens)


def _d2t(gguf: GGUF, n_draft: int | None, n_target: int) -> NDArray[np.int64]:
    """Return int64[n], the target's token ids of the output matrix's rows.

    Args:
        n_draft: Rows of the head's own output matrix; None where it has none.
    """
    path, tensor, listed = gguf.paths[0], gguf.tensors.get(D2T), get_array(gguf, TOKEN_IDS_KEY, WHOLE)
    if tensor is not None:
        if tensor.type not in (GGMLType.I64, GGMLType.I32) or len(tensor.shape) != 1:
            _fail(path, f"d2t is {tensor.type.name} of shape {tensor.shape}, expected a vector of I64")
        if n_draft is None and tensor.shape[0] != n_target:
            _fail(path, "it has d2t, but no output matrix whose rows d2t names")
        raw = np.frombuffer(gguf.read_tensor_bytes(D2T), "<i8" if tensor.type is GGMLType.I64 else "<i4")
        return raw.astype(np.int64)
    if listed is not None and n_draft is None:
        ids = listed.numpy()
        if ids.size and int(ids.max()) >= n_target:
            _fail(path, f"{TOKEN_IDS_KEY} names tokens beyond the target's {n_target}")
        return ids.astype(np.int64)
    if n_draft not in (None, n_target):
        _fail(path, f"its output matrix has {n_draft} rows for {n_target} tokens, but no d2t says which")
    return np.arange(n_target, dtype=np.int64)


def _weight(gguf: GGUF, tensor: TensorInfo) -> HeadTensor:
    if tensor.type not in FLOATS and tensor.type not in LEVELS:
        known = ", ".join(kind.name for kind in (*FLOATS, *LEVELS))
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: tensor {tensor.name!r} is {tensor.type.name}, expected one of {known}; take the head in "
            "another quantization"
        )
    if len(tensor.shape) not in (1, 2):
        _fail(gguf.paths[0], f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, expected 1 or 2")
    data = np.frombuffer(gguf.read_tensor_bytes(tensor.name), np.uint8)
    return HeadTensor(tensor.shape[::-1], tensor.type, data)


def _linear_factor(gguf: GGUF) -> float:
    """Return by what positions are divided; refuse another scaling than "linear"."""
    kind = get_text(gguf, f"{ARCHITECTURE}.rope.scaling.type")
    factor = _positive(gguf, "rope.scaling.factor")
    if kind not in (None, "none", "linear"):
        _refuse(gguf, "rope.scaling.type", f"{kind[:40]!r}, expected linear or none")
    return 1.0 if kind == "none" or factor is None else factor


def _positive(gguf: GGUF, key: str) -> float | None:
    found = get_float(gguf, f"{ARCHITECTURE}.{key}")
    if found is not None and not 0 < found < 1e30:
        _fail(gguf.paths[0], f"{ARCHITECTURE}.{key} is {found}, expected a positive number")
    return found


def _whole(gguf: GGUF, key: str, default: int | None = None) -> int:
    found = get_int(gguf, f"{ARCHITECTURE}.{key}", at_least=1, at_most=_MOST_VALUES)
    if found is None and default is None:
        _fail(gguf.paths[0], f"the metadata has no {ARCHITECTURE}.{key}")
    return default if found is None else found  # type: ignore[return-value]  # _fail does not return


def _refuse(gguf: GGUF, key: str, found: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{gguf.paths[0]}: {ARCHITECTURE}.{key[:80]} is {found}; edgedec does not run this head: take one without it"
    )


def _fail(path: Path, found: str) -> NoReturn:
    raise ModelFormatError(f"{path}: {found}; the file is damaged or was converted wrongly: take another one")
