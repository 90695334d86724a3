"""Makes the card of a model from a GGUF's header."""

from collections.abc import Mapping
from typing import Any, Protocol

from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec.gguf.model_kinds import denoises, read_pooling
from edgedec.model_card import ModelCard


class Shaped(Protocol):
    """The sizes of a network that a ModelCard holds."""

    @property
    def architecture(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...


def model_card(runtime: str, gguf: GGUF, shape: Shaped, fingerprint: str) -> ModelCard:
    """Return a model's card: name, template and defaults come from the header, sizes from `shape`.

    Raises what edgedec.gguf.model_info.describe raises.
    """
    info = describe(gguf)
    return ModelCard(
        name=info.name,
        architecture=shape.architecture,
        runtime=runtime,
        n_vocab=shape.n_vocab,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_ctx_train=shape.n_ctx_train,
        fingerprint=fingerprint,
        chat_template=get_text(gguf, "tokenizer.chat_template"),
        sampling_defaults=info.sampling_defaults,
        pooling=read_pooling(gguf, shape.architecture),
        methods=methods_of(gguf),
    )


def methods_of(gguf: GGUF) -> Mapping[str, Mapping[str, Any]]:
    """Return ModelCard.methods of a file (raises what edgedec_runtimes.shared.denoising.denoising raises)."""
    if not denoises(gguf):
        return {}
    from edgedec_runtimes.shared.denoising import denoising  # few models are of this kind

    return denoising(gguf)


def row_count(gguf: GGUF, n: int) -> int:
    """Return how many rows of logits are held at a time, where other models hold `n`.

    Of a diffusion language model these are a pass's rows of a block, those by which its positions were committed, and a
    copy of the first, while one is put in front of them.
    """
    n_rows: int = methods_of(gguf).get("diffusion", {}).get("kept_rows", n)
    return max(n, n_rows)


def rows_together(gguf: GGUF, n: int, n_ctx: int) -> int:
    """Return the most rows of one forward, where other models take `n`: more where rows see a whole text of `n_ctx`."""
    most: int = methods_of(gguf).get("diffusion", {}).get("most_rows", n)
    return max(n, min(most, n_ctx))
