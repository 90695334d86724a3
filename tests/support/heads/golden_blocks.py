"""Toy block heads, and what DeepSpec made of them (`heads/golden_blocks`, program at 67b59fb8, wrote the file)."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.shapes import expected_shapes
from support.heads.tiny_blocks import block_card

F32 = NDArray[np.float32]
PATH = Path(__file__).with_name("golden_blocks.json")
N_TEXT, NEWEST, MASK = 7, 5, 3
_SIZES = {"n_vocab_target": 48, "n_vocab_draft": 48, "own_embedding": True, "own_output": True}
CARDS: dict[str, HeadCard] = {
    "none": block_card({"n_layer": 2, "mask_token": MASK}, **_SIZES),
    "vanilla": block_card(
        {"n_layer": 2, "mask_token": MASK, "markov": "vanilla", "rank": 6, "confidence": True}, **_SIZES
    ),
    "gated": block_card({"mask_token": MASK, "markov": "gated", "rank": 6, "confidence": True}, **_SIZES),
    "rnn": block_card({"mask_token": MASK, "markov": "rnn", "rank": 6, "confidence": True}, **_SIZES),
}
"""Heads by their Markov head; a block drafts five tokens."""


@dataclass(frozen=True, slots=True)
class Golden:
    """What a head drafts behind the token NEWEST of a text of N_TEXT tokens, most probable tokens first.

    Attributes:
        logits: float64[n_drafts, n_vocab], with their biases.
        sure: The confidences before their sigmoid; empty without a confidence head.
    """

    tokens: tuple[int, ...]
    logits: NDArray[np.float64]
    sure: tuple[float, ...]


def golden_head(card: HeadCard) -> Head:
    """Return the head with weights that depend on names and sizes alone."""
    tensors = {}
    for name, shape in expected_shapes(card, n_taps=len(card.taps)).items():
        values = _waves(name, shape)
        scale = 0.3 if len(shape) == 1 else 1.7 / np.sqrt(shape[-1])
        tensors[name] = HeadTensor.of((values * scale + name.endswith("norm")).astype(np.float32))
    return Head(card, tensors, np.arange(card.n_vocab_draft, dtype=np.int32))


def golden_taps(card: HeadCard) -> F32:
    """Return float32[N_TEXT, n_taps * n_embd_target]."""
    return _waves("taps", (N_TEXT, len(card.taps) * card.n_embd_target)).astype(np.float32)


def golden(name: str) -> Golden:
    """Return what DeepSpec's classes made of CARDS[name]."""
    found = json.loads(PATH.read_text())[name]
    return Golden(tuple(found["tokens"]), np.array(found["logits"]), tuple(found["sure"]))


def _waves(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return numbers from -1 to 1 without a pattern that matters, the same on every machine but for rounding."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    values: NDArray[np.float64] = np.sin(zlib.crc32(name.encode()) % 1000 + 0.1 * index * (index % 97 + 1))
    return values.reshape(shape)
