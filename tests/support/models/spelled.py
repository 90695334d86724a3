"""A model whose next tokens come from a table, on a tokenizer of given pieces: small enough to follow by eye."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np

from edgedec.drafter import DraftContext
from edgedec.errors import RequestError
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams

END = "<end>"


class Spelled:
    """A tokenizer that takes the longest piece that fits (RequestError where none does); its last token ends a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = [*pieces, END]

    n_vocab = property(lambda self: len(self.pieces))
    bos_token = eos_token = ""
    infill_ids: Mapping[str, int] = MappingProxyType({})
    control_texts: tuple[str, ...] = ()

    def least_tokens(self, text: str) -> int:
        """Say nothing."""
        return 0

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the tokens."""
        ids: list[int] = []
        while text:
            fitting = [i for i, piece in enumerate(self.pieces) if text.startswith(piece)]
            if not fitting:
                raise RequestError(f"no piece fits {text!r}")
            ids.append(max(fitting, key=lambda i: len(self.pieces[i])))
            text = text[len(self.pieces[ids[-1]]) :]
        return ids

    def piece(self, token_id: int) -> bytes:
        """Return a token's bytes."""
        return b"" if self.is_end(token_id) else self.pieces[token_id].encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        return b"".join(map(self.piece, token_ids)).decode()

    def is_end(self, token_id: int) -> bool:
        """The last token is."""
        return token_id == len(self.pieces) - 1

    def model(self, says: Mapping[str, tuple[str, float]]) -> Model:
        """Make a model with this tokenizer: after each text, a piece and its probability."""
        model = SimpleNamespace(card=SimpleNamespace(n_vocab=self.n_vocab), capabilities=Capabilities(), tokenizer=self)
        model.session = lambda n_ctx: cast(Session, _Session(self, says, n_ctx))
        return cast(Model, model)


class _Session:
    def __init__(self, tokenizer: Spelled, says: Mapping[str, tuple[str, float]], n_ctx: int) -> None:
        self.tokenizer = tokenizer
        self.says = says
        self.n_ctx = n_ctx
        self.held: list[int] = []

    @property
    def n_cached(self) -> int:
        return len(self.held)

    def evaluate(self, item: ForwardItem) -> Forward:
        assert item.chain is not None, "a draft is a chain of tokens"
        self.held[item.n_past :] = item.chain.tolist()
        piece, p = self.says[self.tokenizer.decode(self.held)]
        n = self.tokenizer.n_vocab
        probs = np.full((1, n), (1 - p) / (n - 1))
        probs[0, self.tokenizer.pieces.index(piece)] = p
        return Forward(np.log(probs).astype(np.float32))


def spelled_context(target: Spelled, n_vocab: int | None = None) -> DraftContext:
    """Return a greedy context for a target with that tokenizer, whose logits may be of fewer tokens."""
    card = SimpleNamespace(n_vocab=n_vocab or target.n_vocab)
    model = SimpleNamespace(card=card, capabilities=Capabilities(trees=True), tokenizer=target)
    session: Any = SimpleNamespace(model=model)
    session.answer = partial(Session.answer, session)
    return DraftContext(session, SamplingParams(temperature=0), Noise(1))
