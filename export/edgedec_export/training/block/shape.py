"""The shape of a block drafter that is trained."""

from dataclasses import replace
from math import prod

from edgedec.draft_price import DraftPrice
from edgedec.errors import OptionError
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard, Target
from edgedec_runtimes.trained_heads.shapes import expected_shapes

_WIDE = 1024  # elements of a hidden state from which a target affords a longer block and a higher rank
_BYTES_PER_WEIGHT = 1.0625  # of Q8_0
_LIMITS = {"n_layers": (1, 8), "block": (2, 16), "rank": (1, 1024)}


def block_shape(n_embd: int, n_layers: int | None, size: int | None, rank: int | None) -> BlockShape:
    """Return the shape of the blocks of a drafter that is trained for a target of this width.

    Args:
        n_embd: Elements of the target's hidden states.
        n_layers: Layers; None for two.
        size: Tokens that a block drafts; None for six, or eight for a wide target.
        rank: Rank of the Markov head; None for 64, or 128 for a wide target.

    Raises:
        OptionError: A number is out of range.
    """
    wide = n_embd >= _WIDE
    defaults = {"n_layers": 2, "block": 8 if wide else 6, "rank": 128 if wide else 64}
    asked = {"n_layers": n_layers, "block": size, "rank": rank}
    found = {name: defaults[name] if value is None else value for name, value in asked.items()}
    for name, (least, most) in _LIMITS.items():
        if not least <= found[name] <= most:
            raise OptionError(name, found[name], f"it must be from {least} to {most}")
    return BlockShape(
        n_layer=found["n_layers"], size=found["block"], shifted=True, causal=True, markov="vanilla", rank=found["rank"]
    )


def block_card(parts: TargetParts, shape: BlockShape, n_vocab_draft: int, target: Target | None) -> HeadCard:
    """Return the card of a block drafter: layers of the target's width, but narrow inside."""
    card = card_of(parts, "", n_vocab_draft, target)
    return replace(card, n_ff=min(card.n_ff, 2 * card.n_embd), block=shape)


def price_of(card: HeadCard, n_target_bytes: int, bytes_per_output_row: float) -> DraftPrice:
    """Return what a draft is expected to cost, in plain steps: its share of the bytes that are read.

    Args:
        card: The drafter, whose tensors are counted at 8 bits a weight.
        n_target_bytes: Bytes of the target's weights that a plain step reads.
        bytes_per_output_row: Bytes of a row of the output matrix.
    """
    sizes = {name: prod(shape) for name, shape in expected_shapes(card, n_taps=len(card.taps)).items()}
    level = sizes["markov_w2"] * _BYTES_PER_WEIGHT
    body = sum(size for name, size in sizes.items() if not name.startswith("markov_")) * _BYTES_PER_WEIGHT
    return DraftPrice(level, once=body + card.n_vocab_draft * bytes_per_output_row).times(1 / n_target_bytes)
