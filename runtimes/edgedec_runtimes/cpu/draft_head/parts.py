"""Where the native library has each tensor of a head, and what a draft reads of them."""

import ctypes
from typing import NamedTuple

from edgedec_runtimes.cpu.library import DraftHeadConfig
from edgedec_runtimes.cpu.native_tables import NAMES, NUMBERS, numbers
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard

_NATIVE = {  # where the native library has another name
    "o": "attn_out",
    "attention_conv_proj": "attn_kernels",
    "mlp_conv_proj": "ffn_kernels",
    "post_attention_norm": "ffn_norm",
    "attention_conv_base": "attn_kernels_base",
    "mlp_conv_base": "ffn_kernels_base",
}
_OF_PAIRS = {"input_norm": "embedding_norm", "hidden_norm": "attn_norm"}
_OF_JOINED = {"input_norm": "pair_norm", "hidden_norm": "feature_norm"}
_OF_BLOCKS = {
    "input_norm": "attn_norm",
    "hidden_norm": "feature_norm",
    "selector_predecessor": "markov_w1",
    "selector_successor": "markov_w2",
    "selector_hidden": "markov_gate",
}
_FC_NORMS = numbers("norms before fc", "EC_FC_NORM_")
_MARKOV = numbers("chains of blocks", "EC_MARKOV_")
_FEW_ROWS = ("embedding", "markov_w1", "selector_predecessor", "selector_successor")
_OF_A_TOKEN = ("markov_w2", "markov_gate", "markov_joint", "selector_hidden")


class Place(NamedTuple):
    """Where the native library has a tensor.

    Attributes:
        which: The number of the matrix, or of the vector.
        layer: The layer that has it; 0 for what belongs to the head.
        is_matrix: Whether it is a matrix there.
    """

    which: int
    layer: int
    is_matrix: bool


def place_of(name: str, card: HeadCard) -> Place:
    """Return where a tensor of a head goes, by its name in edgedec_runtimes.trained_heads.head."""
    *layer, part = name.split(".")[1:] if name.startswith("layers.") else [name]
    number = int(layer[0]) if layer else 0
    renamed = _OF_BLOCKS if card.block is not None or card.exits else _OF_JOINED if card.joins else _OF_PAIRS
    part = renamed.get(part, part)
    name = f"EC_DRAFT_HEAD_{_NATIVE.get(part, part).upper()}"
    return Place(NUMBERS[name], number, name in NAMES["matrices of heads"])


def is_read_once(name: str, card: HeadCard) -> bool:
    """Return whether a draft of a head reads a matrix once, however many tokens it has: all but a block's bias."""
    few = (*_FEW_ROWS, *_OF_A_TOKEN)
    return name == "output" if card.rows is not None else card.block is not None and name not in few


def is_read_by_tokens(name: str, card: HeadCard) -> bool:
    """Return whether each drafted token reads a matrix.

    A head that reads pairs reads `fc` once for all tokens that stand since the last draft, which is left out.
    """
    if card.reads_target:
        return True
    return card.rows is None and (name in _OF_A_TOKEN if card.block is not None else name not in (*_FEW_ROWS, "fc"))


def first_rows(block: BlockShape | None, n_drafts: int) -> int:
    """Return how many rows the layers run before the first token of a draft is known.

    >>> first_rows(None, 3), first_rows(BlockShape(1, 8, True), 3), first_rows(BlockShape(1, 8, False, True), 3)
    (1, 8, 4)
    """
    if block is None:
        return 1
    return min(block.size, n_drafts + (not block.shifted)) if block.causal else block.size


def native_config(card: HeadCard) -> ctypes.Structure:
    """Return what the native library must know of a head, beside its taps, tokens and windows."""
    sizes = (card.n_head, card.n_head_kv, card.head_dim, card.n_ff, len(card.taps))
    switches = (_FC_NORMS[card.fc_norm], card.norm_before_residual, card.feeds_back_normed)
    config = DraftHeadConfig(card.n_vocab_draft, card.n_embd, 1, *sizes, *switches)
    config.rms_epsilon, config.rope_base = card.rms_epsilon, card.rope_base
    if card.rows is not None:
        config.n_rows_made, config.rows_layer = card.rows.n, card.rows.layer
    config.exit_layer, config.reads_target = card.taps[0] if card.exits else 0, card.reads_target
    if (block := card.block) is not None:
        config.n_layer, config.block_size, config.block_shifted = block.n_layer, block.size, block.shifted
        config.block_causal, config.markov, config.rank = block.causal, _MARKOV[block.markov], block.rank
        config.top_k, config.conv_length, config.conv_group = block.top_k, block.conv_length, block.conv_group
        config.mask_token, config.embedding_scale = block.mask_token, block.embedding_scale
        config.logit_scale, config.logit_softcap = block.logit_scale, block.softcap
    return config
