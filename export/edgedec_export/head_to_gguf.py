"""Write a trained draft head as a GGUF of the architecture `eagle3` or `dflash`, which llama.cpp 0.3.36 loads, too.

    write_head_gguf(load_head("head/"), read_gguf("model.gguf"), "head.gguf", types="Q4_0,fc=Q8_0")

The file has the target's tokenizer, which llama.cpp needs, and edgedec's record of the target. llama.cpp rotates q and
k of an EAGLE-3 head in pairs of neighbours, so their rows are reordered. A head that borrows its output matrix stays
small: its short list of tokens is a key that only edgedec reads, and llama.cpp drafts from the target's whole
vocabulary. What llama.cpp can't express of an EAGLE-3 head is refused by name. What it can't express of a block head
are tensors of edgedec's own, with which llama.cpp refuses the file: gguf_block.py of the trained heads names them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES, GGMLType
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.block_types import BLOCK_ENCODERS
from edgedec_export.gguf_writer import Metadata, OutTensor, decoder_metadata, new_file, read_entries, write_gguf
from edgedec_export.target_rows import output_name, read_raw_rows
from edgedec_runtimes.trained_heads import gguf_block, gguf_eagle3
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.gguf_values import D2T, TOKEN_IDS_KEY
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.record import RECORD_KEY, record_text
from edgedec_runtimes.trained_heads.target import fit

MATRICES = tuple(
    """
    fc q k v o gate up down embedding output markov_w1 markov_w2 markov_gate markov_joint attention_conv_proj
    mlp_conv_proj selector_predecessor selector_successor selector_hidden
    """.split()
)
DEFAULT_TYPES = "Q4_0,fc=Q8_0"
"""What docs/heads.md measured to cost little acceptance; fc feeds every draft, and is small."""
_FILE_TYPES = {name: number for number, name in FILE_TYPE_NAMES.items()}
_CONTEXT = 4096


# Eight parameters: the head, its target, the result, and one for each option of `edgedec export HEAD --to gguf`.
def write_head_gguf(
    head: Head,
    target: GGUF,
    out: str | Path,
    *,
    types: str = DEFAULT_TYPES,
    own_output: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a head as a GGUF and return its path.

    Args:
        head: The head, which must fit the target.
        target: The model that it drafts for.
        out: The file to write; it appears when it is complete.
        types: How matrices are stored, as `parse_types` reads it.
        own_output: Copy the rows of the target's output matrix that the head borrows, as the target stores them, or in
            the type that `types` gives them by name (output=Q4_0): llama.cpp then drafts from the short list.
        force: Replace `out` where it exists.

    Raises:
        RequestError: `types` is malformed, or `out` may not be written.
        UnsupportedModelError: The head does not fit the target, or has a setting that the format does not express.
        StorageError: The target can't be read, or the result can't be written.
        CancelledError: `cancel` was cancelled.
    """
    kinds = parse_types(types)
    head = fit(head, target).head
    if own_output and not head.card.own_output:
        head = _with_output(head, target)
        if "output=" in types.replace(" ", ""):
            output = HeadTensor.of(head.tensors["output"].floats())
            head = Head(head.card, {**head.tensors, "output": output}, head.d2t)
        else:
            kinds["output"] = head.tensors["output"].type
    _refuse_inexpressible(head.card)
    tensors = [_out_tensor(name, tensor, head.card, kinds) for name, tensor in head.tensors.items()]
    if head.card.own_output:
        ids = head.d2t.astype("<i8")
        tensors.append(OutTensor(D2T, (len(ids),), GGMLType.I64, lambda: iter([ids.tobytes()])))
    with new_file(Path(out), sources=target.paths, force=force) as part:
        entries = _entries(head, target, kinds)
        write_gguf(part, entries, tensors, on_progress=on_progress, cancel=cancel)
    return Path(out)


def parse_types(types: str) -> dict[str, GGMLType]:
    """Return the type of each matrix from a text like "Q4_0,fc=Q8_0": one for all, then exceptions by name.

    Raises:
        RequestError: A name is none of MATRICES, or a type is none that is written.

    >>> {name: kind.name for name, kind in parse_types("q4_0,fc=q8_0").items() if name in ("fc", "q")}
    {'fc': 'Q8_0', 'q': 'Q4_0'}
    """
    first, *rest = [part.strip() for part in types.split(",")]
    kinds = dict.fromkeys(MATRICES, _type(first))
    for part in rest:
        name, equals, kind = part.partition("=")
        if not equals or name not in kinds:
            raise RequestError(
                f"the type of a tensor is {part!r}, expected NAME=TYPE with a name of {', '.join(MATRICES)}"
            )
        kinds[name] = _type(kind)
    return kinds


def _type(name: str) -> GGMLType:
    kinds = {kind.name: kind for kind in BLOCK_ENCODERS}
    if name.upper() not in kinds:
        raise RequestError(f"the type {name!r} can't be written for a draft head, expected one of {', '.join(kinds)}")
    return kinds[name.upper()]


def _refuse_inexpressible(card: HeadCard) -> None:
    """Refuse a setting that the format has no place for, as a reader would leave it out."""
    if card.block is not None:
        if card.own_embedding and not card.own_output:
            _refuse(card, "it has an embedding, but no output matrix of its own (--own-output adds one)")
        if len({window for window in card.block.windows if window}) > 1:
            _refuse(card, "it has windows of several sizes")
        return
    if card.feeds_back_normed:
        _refuse(card, "it feeds the normed state back (norm_output)")
    if card.fc_norm == "each":
        _refuse(card, "it has a norm for each tap (fc_norm)")
    if not card.norms_output:
        _refuse(card, "it has no norm before its output matrix")
    if len(card.taps) != 3:
        _refuse(card, f"it has {len(card.taps)} taps, expected 3")


def _refuse(card: HeadCard, why: str) -> NoReturn:
    raise UnsupportedModelError(
        f"the draft head {card.name} can't be written as a GGUF: {why}, which llama.cpp's {_architecture(card)} does "
        "not express; use its folder as it is"
    )


def _architecture(card: HeadCard) -> str:
    return gguf_eagle3.ARCHITECTURE if card.block is None else gguf_block.ARCHITECTURE


def _with_output(head: Head, target: GGUF) -> Head:
    """Return the head with the rows of the target's output matrix that it borrows, as the target stores them."""
    name = output_name(target)
    rows = read_raw_rows(target, name, head.d2t)
    output = HeadTensor((len(head.d2t), head.card.n_embd), target.tensors[name].type, rows.reshape(-1))
    return Head(replace(head.card, own_output=True), {**head.tensors, "output": output}, head.d2t)


def _out_tensor(name: str, tensor: HeadTensor, card: HeadCard, kinds: Mapping[str, GGMLType]) -> OutTensor:
    """Return a tensor as it is written: vectors in F32, matrices that are quantized already as they are."""
    shape = tensor.shape[::-1]
    written = gguf_eagle3.TENSORS[name] if card.block is None else gguf_block.tensor_name(name)
    n_heads = {"q": card.n_head, "k": card.n_head_kv}.get(name)
    if n_heads is not None:
        tensor = to_neighbours(tensor, n_heads)
    if tensor.type not in FLOATS:
        return OutTensor(written, shape, tensor.type, lambda: iter([tensor.data.tobytes()]))
    kind = kinds.get(name.rpartition(".")[2], GGMLType.F32)
    if shape[0] % kind.block_size:
        _refuse(card, f"rows of {name!r} have {shape[0]} numbers, expected a multiple of {kind.name}'s 32")
    return OutTensor(written, shape, kind, partial(_encoded, tensor, kind))


def _encoded(tensor: HeadTensor, kind: GGMLType) -> Iterator[bytes]:
    yield BLOCK_ENCODERS[kind](tensor.floats())


def to_neighbours(tensor: HeadTensor, n_heads: int) -> HeadTensor:
    """Reorder the rows of q or k from halves of a head to pairs of neighbours; a row keeps its bytes."""
    rows = tensor.data.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, -1)
    return HeadTensor(tensor.shape, tensor.type, np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1))


def _entries(head: Head, target: GGUF, kinds: Mapping[str, GGMLType]) -> Metadata:
    card, name = head.card, _architecture(head.card)
    n_ctx = target.metadata.get(f"{target.metadata.get('general.architecture')}.context_length")
    n_layer = 1 if card.block is None else card.block.n_layer
    n_ctx = n_ctx if type(n_ctx) is int else _CONTEXT
    values: Metadata = {"general.architecture": name, "general.name": card.name}
    values |= decoder_metadata(name, card, n_layer=n_layer, n_ctx=n_ctx, n_rot=card.head_dim)
    values[f"{name}.vocab_size"] = card.n_vocab_target
    values[f"{name}.target_layers"] = np.array(card.taps, np.int32)
    if card.block is None:
        values[f"{name}.target_hidden_size"] = card.n_embd_target
        values[f"{name}.norm_before_residual"] = card.norm_before_residual
        values[f"{name}.norm_before_fc"] = card.fc_norm == "joined"
    else:
        values |= _block_entries(card.block)
    values[RECORD_KEY] = record_text(card.name, card.target, card.promise)
    if (file_type := _FILE_TYPES.get(kinds["q"].name)) is not None:
        values["general.file_type"] = file_type
    if not card.own_output and card.n_vocab_draft < card.n_vocab_target:
        values[TOKEN_IDS_KEY] = head.d2t.astype(np.int32)
    tokenizer = {key: value for key, value in read_entries(target).items() if key.startswith("tokenizer.ggml.")}
    return values | {key: value for key, value in tokenizer.items() if key not in values}


def _block_entries(block: BlockShape) -> Metadata:
    """Return what `dflash` says of a block head, without what has its usual value."""
    name = gguf_block.ARCHITECTURE
    values: Metadata = {
        f"{name}.block_size": block.size,
        f"{name}.sample_from_anchor": block.shifted,
        f"{name}.has_confidence_head": block.confidence,
        f"{name}.attention.causal": block.causal,
    }
    if block.mask_token >= 0:
        values[gguf_block.MASK_KEY] = block.mask_token
    if any(block.windows):
        values[f"{name}.attention.sliding_window"] = max(block.windows) + 1
        values[f"{name}.attention.sliding_window_pattern"] = np.array(block.windows) > 0
    if block.softcap:
        values[f"{name}.final_logit_softcapping"] = float(block.softcap)
    if block.markov == "selector":
        values[f"{name}.selector_rank"] = block.rank
        values[f"{name}.selector_top_k"] = block.top_k
    if block.conv_length:
        values[f"{name}.conv_kernel_size"] = block.conv_length
        values[f"{name}.conv_group_size"] = block.conv_group
    scales = {"logit_scale": block.logit_scale, "embedding_scale": block.embedding_scale}
    return values | {f"{name}.{key}": float(value) for key, value in scales.items() if value != 1.0}
