"""Row heads and exit heads as GGUFs of the architectures `edgedec-rows` and `edgedec-exit`, which are edgedec's own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec_runtimes.trained_heads.card import HeadCard, RowShape
from edgedec_runtimes.trained_heads.gguf_values import TOKEN_IDS_KEY, HeadFile
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.record import MOST_LAYERS, RECORD_KEY
from edgedec_runtimes.trained_heads.shapes import checked_head

ROWS, EXIT = "edgedec-rows", "edgedec-exit"
OF_ROWS = {name: f"{name}.weight" for name in ("rows", "rows_kept", "rows_base", "output")}
"""The names of a row head's tensors in a GGUF, by the names of edgedec_runtimes.trained_heads.head."""
OF_EXIT = {
    "input_norm": "blk.0.attn_norm.weight",
    "q": "blk.0.attn_q.weight",
    "k": "blk.0.attn_k.weight",
    "v": "blk.0.attn_v.weight",
    "o": "blk.0.attn_output.weight",
    "output_norm": "output_norm.weight",
    "output": "output.weight",
}
"""The same of an exit head's."""
_SIZES = ("vocab_size", "embedding_length", "attention.layer_norm_rms_epsilon")
_SIZES_OF_ROWS = (*_SIZES, "rows", "layer")
_SIZES_OF_EXIT = (*_SIZES, "exit_layer", "head_count", "head_count_kv", "key_length", "rope.freq_base")
_MOST_ROWS = 16


def read_split(gguf: GGUF) -> Head:
    """Return the row head or the exit head that a GGUF holds.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: A key or a tensor is none that edgedec runs; the message names it.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    exits = gguf.metadata.get("general.architecture") == EXIT
    file, names = HeadFile(gguf, EXIT if exits else ROWS), OF_EXIT if exits else OF_ROWS
    keys, form = (_SIZES_OF_EXIT, "an exit head") if exits else (_SIZES_OF_ROWS, "a row head")
    file.check_known(frozenset(keys), frozenset(names.values()), form)
    record, n_target, n_embd = file.record(), file.whole("vocab_size"), file.whole("embedding_length")
    weights = {short: file.weight(name) for short, name in names.items() if name in gguf.tensors}
    output = weights.get("output")
    if output is not None and len(output.shape) != 2:
        file.fail(f"its tensor {names['output']!r} is no matrix")
    d2t = file.d2t(None if output is None else output.shape[0], n_target)
    rows, taps, sizes, base = None, tuple[int, ...](), (0, 0, 0), 1.0
    if exits:
        taps, base = (file.whole("exit_layer", most=MOST_LAYERS),), file.positive("rope.freq_base") or 10000.0
        sizes = n_head, n_head_kv, head_dim = (
            file.whole("head_count"),
            file.whole("head_count_kv"),
            file.whole("key_length"),
        )
        if n_head % n_head_kv or head_dim % 2:
            file.fail(f"{n_head} heads of size {head_dim} cannot share {n_head_kv} key-value heads")
    else:
        rows = RowShape(file.whole("rows", most=_MOST_ROWS), file.counted("layer"))
    card = HeadCard(
        record.name or get_text(gguf, "general.name") or file.path.stem,
        n_embd,
        n_embd,
        0,
        *sizes,
        file.positive("attention.layer_norm_rms_epsilon") or 1e-5,
        base,
        taps,
        len(d2t),
        n_target,
        own_output=output is not None,
        target=record.target,
        promise=record.promise,
        rows=rows,
        exits=exits,
    )
    return checked_head(file.path, card, weights, d2t, n_taps=len(taps))


def split_metadata(card: HeadCard, token_ids: NDArray[np.int32], record: str) -> dict[str, Any]:
    """Return the metadata of a row head or an exit head that borrows the output rows of `token_ids`, int32[n]."""
    architecture, values = EXIT if card.exits else ROWS, (card.n_vocab_target, card.n_embd, card.rms_epsilon)
    of_exit = (card.split_layer, card.n_head, card.n_head_kv, card.head_dim, card.rope_base)
    keys = _SIZES_OF_EXIT if card.exits else _SIZES_OF_ROWS
    of_rows = () if card.rows is None else (card.rows.n, card.rows.layer)
    entries: dict[str, Any] = {"general.architecture": architecture}
    for key, value in zip(keys, (*values, *(of_exit if card.exits else of_rows)), strict=True):
        entries[f"{architecture}.{key}"] = value
    return entries | {TOKEN_IDS_KEY: token_ids, RECORD_KEY: record}
