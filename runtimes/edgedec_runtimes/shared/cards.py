"""Makes the card of a model from a GGUF's header."""

from typing import Protocol

from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec.gguf.model_kinds import read_pooling
from edgedec.model import ModelCard
from edgedec_runtimes.shared.denoising import denoising


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
        name=info.name or "",
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
        methods=denoising(gguf),
    )
