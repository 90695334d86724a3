"""Tiny models on the cpu runtime that a block head in memory follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.cpu.draft_head.parts import place_of
from edgedec_runtimes.cpu.draft_head.weights import borrowed_rows, stored
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head
from support.heads.reference_block import ReferenceBlock
from support.heads.tiny_blocks import block_card
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

FLOATS = Tiny(n_layer=4, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
"""Its rows, and those of heads for it, are no whole blocks of 32, so that they stay floats."""
INTEGERS = Tiny(n_layer=4, tied=True, types=("Q8_0",))
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 300, dtype=np.int32)


def of_floats(shape: dict[str, Any] | None = None, **changes: Any) -> HeadCard:
    """Return the card of a head for FLOATS; see block_card."""
    sizes = {"n_embd": 48, "n_embd_target": 48, "n_ff": 80, "n_head": 3, "n_head_kv": 1, "head_dim": 16}
    return block_card(shape, **(sizes | {"taps": (2, 3, 4), "n_vocab_target": N_VOCAB} | changes))


def of_integers(shape: dict[str, Any] | None = None, **changes: Any) -> HeadCard:
    """Return the card of a head for INTEGERS, all of whose matrices are rounded; see block_card."""
    sizes = {"n_embd": 256, "n_embd_target": 256, "n_ff": 128, "n_head": 4, "n_head_kv": 2, "head_dim": 64}
    return block_card(shape, **(sizes | {"taps": (2, 3, 4), "n_vocab_target": N_VOCAB} | changes))


@contextmanager
def loaded(folder: Path, tiny: Tiny, head: Head, **options: Any) -> Iterator[Model]:
    """Load a tiny model with a head that no file holds."""
    path = write_tiny(folder / "m.gguf", tiny)
    number = len(list(folder.glob("head-*")))
    (folder / f"head-{number}").touch()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("cpu.draft_head.memory", "trained_heads.load"):
            patch.setattr(f"edgedec_runtimes.{module}.load_head", lambda _: head)
        model = Cpu().load(path, LoadOptions(n_ctx=320, draft_head=folder / f"head-{number}", **options))
    with model:
        yield model


def oracle(folder: Path, head: Head, taps: NDArray[np.float32]) -> ReferenceBlock:
    """Return the plain head behind a text with these taps, whose matrices are rounded as the runtime rounds."""
    gguf = read_gguf(folder / "m.gguf")
    tensors = {
        name: stored(name, tensor) if place_of(name, head.card).is_matrix else tensor
        for name, tensor in head.tensors.items()
    }
    rows = borrowed_rows(gguf, np.arange(N_VOCAB, dtype=np.int32), "token_embd.weight").floats()
    borrowed = stored("output", borrowed_rows(gguf, head.d2t), borrowed=True)
    embedding = tensors["embedding"].floats() if "embedding" in tensors else rows
    plain = ReferenceBlock(
        replace(head, tensors=tensors), embedding.__getitem__, tensors.get("output", borrowed).floats()
    )
    plain.absorb(taps)
    return plain
