"""The shape of a block drafter that is trained, and the weights with which its training begins.

Only attention brings features into a block, and one whose queries and keys begin at random finds the last token late.
So each head of the first layer begins with a query that all rows of a block share, nearly, and a key that all features
share: how they turn with their positions alone decides what is seen, and it is made to be one, two, three ... tokens
before. Values are the main components of the features, and are added to the rows as they are. The Markov head's
embedding of a token is the main components of the target's.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import DraftPrice
from edgedec.errors import OptionError
from edgedec_export.training.lessons.lesson_files import Lesson
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
    values = {name: defaults[name] if value is None else value for name, value in asked.items()}
    for name, (least, most) in _LIMITS.items():
        if not least <= values[name] <= most:
            raise OptionError(name, values[name], f"it must be from {least} to {most}")
    return BlockShape(
        n_layer=values["n_layers"],
        size=values["block"],
        shifted=True,
        causal=True,
        markov="vanilla",
        rank=values["rank"],
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


Floats = NDArray[np.floating]

_SLOWEST = 0.08  # radians a token: slower pairs of elements do not tell near tokens apart
_SHARED = 2.0  # of a query's or a key's random part
_SHARPNESS = 1.5  # of queries
_COPIED = 1.35  # of an embedding's size
_RIDGE = 1e-2  # of the mean square of a vector's element


def first_attention(card: HeadCard, arrays: dict[str, Floats], lessons: Sequence[Lesson], embeddings: Floats) -> None:
    """Set the attention of the first layer, which is random before.

    Args:
        card: The drafter's shape.
        arrays: Its tensors, and `tap_scale`; changed in place.
        lessons: Some lessons.
        embeddings: float32[n, n_embd], those of the answers' tokens.
    """
    taps = np.concatenate([lesson.taps for lesson in lessons]).astype(np.float32) / arrays["tap_scale"]
    features = _normed(taps @ arrays["fc"].T, card.rms_epsilon)
    n_masks = len(embeddings) // 4
    rows = _normed(np.concatenate([embeddings, arrays["mask"][None].repeat(n_masks, axis=0)]), card.rms_epsilon)
    asks = _fitted(rows, np.ones(len(rows), np.float32))
    is_feature = np.arange(len(features) + len(rows)) < len(features)
    answers = _fitted(np.concatenate([features, rows]), is_feature.astype(np.float32))
    main = _components(features)
    d, groups = card.head_dim, card.n_head // card.n_head_kv
    layer = {name: arrays[f"layers.0.{name}"] for name in ("q", "k", "v", "o", "q_norm")}
    layer["q_norm"] *= _SHARPNESS
    weight = _COPIED * np.sqrt(np.square(embeddings).mean()) / (2 - 2.0 ** (1 - groups))
    for kv in range(card.n_head_kv):
        part = slice(kv * d, (kv + 1) * d)
        copied = main[np.arange(kv * d, (kv + 1) * d) % len(main)]
        layer["k"][part] += _SHARED * np.outer(_direction(card, 0), answers)
        layer["v"][part] = copied
        for group in range(groups):
            head = slice((kv * groups + group) * d, (kv * groups + group + 1) * d)
            layer["q"][head] += _SHARED * np.outer(_direction(card, 1 + group), asks)
            layer["o"][:, head] += weight / 2**group * copied.T


def markov_table(arrays: dict[str, Floats], embeddings: Floats, epsilon: float) -> None:
    """Set the rows of `markov_w1`, that of the tokens off the list to zeros.

    Args:
        arrays: The drafter's tensors; changed in place.
        embeddings: float32[n_vocab_draft, n_embd], those of the tokens that can be drafted.
        epsilon: Of norms.
    """
    table, normed = arrays["markov_w1"], _normed(embeddings, epsilon)
    rank = min(table.shape[1], normed.shape[1], len(normed) - 1)
    projected = (normed - normed.mean(axis=0)) @ _components(normed)[:rank].T
    table[:-1, :rank] = projected / projected.std(axis=0)
    table[-1] = 0


def _components(vectors: Floats) -> Floats:
    """Return float32[n_embd, n_embd], the vectors' main components, the largest first."""
    vectors_out: Floats = np.linalg.eigh(np.cov(vectors, rowvar=False))[1].T[::-1].astype(np.float32)
    return vectors_out


def _direction(card: HeadCard, back: int) -> Floats:
    """Return float32[head_dim]: as a query it fits best to the key `_direction(card, 0)` so many tokens before it."""
    speeds = card.rope_base ** (-np.arange(0, card.head_dim, 2) / card.head_dim)
    angles = back * speeds
    turned = np.concatenate([np.cos(angles), -np.sin(angles)]) * np.tile(speeds > _SLOWEST, 2)
    direction: Floats = (turned * np.sqrt(card.head_dim / (speeds > _SLOWEST).sum())).astype(np.float32)
    return direction


def _fitted(vectors: Floats, targets: Floats) -> Floats:
    """Return float32[n_embd], whose products with the vectors are nearest to what is wanted."""
    squares = vectors.T @ vectors
    squares += _RIDGE * np.trace(squares) / len(squares) * np.eye(len(squares), dtype=np.float32)
    solution: Floats = np.linalg.solve(squares, vectors.T @ targets).astype(np.float32)
    return solution


def _normed(x: Floats, epsilon: float) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(epsilon))
    return normed
