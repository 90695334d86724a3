"""Tiny random row heads and exit heads, as files beside tiny models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.head_state import Arranging
from edgedec.model import Session
from edgedec_runtimes.trained_heads.card import HeadCard, RowShape, Target
from edgedec_runtimes.trained_heads.gguf_split import OF_EXIT, OF_ROWS, split_metadata
from edgedec_runtimes.trained_heads.record import record_text
from edgedec_runtimes.trained_heads.target import target_of
from support.models.gguf_writer import write_gguf

TOKENS = np.array([*range(3, 40), 1], np.int32)
"""The tokens that they can draft."""
Parts = tuple[dict[str, Any], dict[str, Any]]
"""Metadata and tensors."""


def arranged(session: Session, cost: Callable[[int], float] | None = None) -> str | None:
    """Have the head of a session choose what it adds to forwards; see edgedec.head_state.Arranging."""
    assert isinstance(session.draft_head, Arranging)
    return session.draft_head.arrange(cost)


def rows_head(shape: RowShape, n_embd: int, n_vocab: int, target: Target | None = None, epsilon: float = 1e-5) -> Parts:
    """Return what the file of a random row head has."""
    width, sizes = shape.n * n_embd, (n_embd, n_embd, 0, 0, 0, 0, epsilon, 1.0, ())
    shapes = {"rows": (width, n_embd), "rows_kept": (width,)} if shape.layer else {"rows_base": (width,)}
    card = HeadCard("rows", *sizes, len(TOKENS), n_vocab, rows=shape)
    tensors = {OF_ROWS[name]: _random(size, 0.0) for name, size in shapes.items()}
    return split_metadata(card, TOKENS, record_text("rows", target, None)), tensors


def exit_head(layer: int, n_embd: int, n_vocab: int, target: Target | None = None, n_head: int = 3) -> Parts:
    """Return what the file of a random exit head has, which has one head of keys and values."""
    head_dim, sizes = 16, (n_embd, n_embd, 0, n_head, 1, 16, 1e-5, 1e4, (layer,))
    shapes = {"q": (n_head * head_dim, n_embd), "o": (n_embd, n_head * head_dim), "input_norm": (n_embd,)}
    shapes |= dict.fromkeys("kv", (head_dim, n_embd)) | {"output_norm": (n_embd,)}
    card = HeadCard("exit", *sizes, len(TOKENS), n_vocab, exits=True)
    tensors = {OF_EXIT[name]: _random(shape, float(len(shape) == 1)) for name, shape in shapes.items()}
    return split_metadata(card, TOKENS, record_text("exit", target, None)), tensors


def _random(shape: tuple[int, ...], mean: float) -> Any:
    return np.random.default_rng(len(shape) + shape[0]).normal(mean, 0.2, shape).astype(np.float32)


def write_rows(path: Path, model: Path, shape: RowShape, n_embd: int, n_vocab: int) -> Path:
    """Write a random row head for a model, and return its path."""
    return write_gguf(path, *rows_head(shape, n_embd, n_vocab, target_of(read_gguf(model))))


def write_exit(path: Path, model: Path, layer: int, n_embd: int, n_vocab: int, *, n_head: int = 3) -> Path:
    """Write a random exit head for a model, and return its path."""
    return write_gguf(path, *exit_head(layer, n_embd, n_vocab, target_of(read_gguf(model)), n_head))


def check_texts(model: Path, head: Path, sampling: dict[str, Any], more: dict[str, Any]) -> None:
    """Assert that a head drafts, and that the texts are those of plain decoding."""
    prompts = ["the rows", "of a text", "and more"]
    with edgedec.load(model, draft="off", cache_dir=None, **more) as engine:
        plain = [engine.generate(prompt, max_tokens=40, **sampling).token_ids for prompt in prompts]
    with edgedec.load(model, draft="head", draft_head=head, cache_dir=None, **more) as engine:
        results = [engine.generate(prompt, max_tokens=40, **sampling) for prompt in prompts]
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.drafters["head"]["nodes"] for result in results) > 0
