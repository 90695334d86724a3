"""Tiny models that read pictures: a text model whose vocabulary has the marks of pictures, and its projector."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.gguf.file import ValueType
from edgedec_runtimes.pictures.mtmd import TOKENS
from support.models.gguf_writer import Typed
from support.models.tiny_models import N_VOCAB, tiny_llama, vocabulary
from support.models.tiny_projectors import tiny_projector

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
MARKS = TOKENS[259:]
_CONTROL = 3


def picture_model(
    folder: Path, kind: str = "idefics3", *, seed: int = 0, n_ctx_train: int = 2048, n_layer: int = 2
) -> Path:
    """Write a text model and, beside it, its projector of a kind; return the text model's path."""
    tiny_projector(folder / "mmproj-tiny-f16.gguf", kind, seed=seed)
    base = vocabulary(N_VOCAB)
    kinds = [*base["tokenizer.ggml.token_type"].value, *[_CONTROL] * len(MARKS)]
    more = {
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], *MARKS],
        "tokenizer.ggml.token_type": Typed(ValueType.ARRAY, kinds, ValueType.INT32),
    }
    sizes: dict[str, Any] = {"n_layer": n_layer, "n_ctx_train": n_ctx_train, "n_vocab": N_VOCAB + len(MARKS)}
    return tiny_llama(folder / "tiny-f32.gguf", seed=seed, chat_template=CHAT, more=more, **sizes)


def picture_file(width: int = 100, height: int = 70, seed: int = 0) -> bytes:
    """Return a PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
