"""What drafters share that are a part of the target: its own session, through some of its half-layers.

A draft is evaluated in place, behind the text, and the verification begins at the old n_past, which drops what the
draft wrote: there is no copy of the KV cache, and nothing to roll back (Draft & Verify, Zhang et al. 2023,
arXiv:2309.08168, and SWIFT, Xia et al. 2024, arXiv:2410.06161, copy or crop it). The session is touched within draft()
only.

Tokens are drawn with the target's own noise, and under another rule than the coupled one from q with numbers of their
own, as a draft model's are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, Verification
from edgedec.drafters.draft_model.model import agreement, cut, ranked
from edgedec.errors import CancelledError
from edgedec.model import Forward, LayerSet
from edgedec.sampling import Distribution, distribution
from edgedec.verification.distributions import sample
from edgedec.verification.uniform import uniform_source

_LEAST_LEAF = 0.05  # path probability: a row more takes about as much of a step
_WIDTH = 3  # tokens taken of each row


@runtime_checkable
class SelfDrafter(Protocol):
    """A drafter whose nodes take forwards of the target itself."""

    @property
    def share(self) -> float:
        """Of a whole token's weights that one of its tokens reads, before anything was timed."""

    @property
    def expected(self) -> float:
        """P(a node is accepted | its parent was), before anything was seen."""

    def learn_costs(self, curve: CostCurve, corrected: Callable[[float], float]) -> None:
        """Take the curve that times forwards through a part of the layers, and what an estimate of P is worth."""


@dataclass(slots=True)
class _Nodes:
    """A chain with leaves beside it, as it grows."""

    n_max: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    p_accept: list[float] = field(default_factory=list)
    above: int = -1

    def add(self, tokens: Sequence[int], p: Sequence[float], path: float, least: float) -> None:
        """Add a level: its first token goes on the chain, those of some path probability beside it."""
        parent = self.above
        for i, (token, chance) in enumerate(zip(tokens, p, strict=False)):
            if len(self.tokens) < self.n_max and (i == 0 or path * chance >= least):
                if i == 0:
                    self.above = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.p_accept.append(chance)

    @property
    def is_full(self) -> bool:
        """Whether no node has room."""
        return len(self.tokens) >= self.n_max


class OwnLayers:
    """Drafts of one generation with the target's own session.

    Args:
        context: The generation's.
        label: Sets the numbers apart that it draws with where the rule is not the coupled one.

    Attributes:
        ids: The text.
        curve: What times forwards; the engine's, once it was told.
        corrected: What an estimate of P is worth.
    """

    def __init__(self, context: DraftContext, label: int) -> None:
        self.context = context
        draws = not context.coupled and not context.sampling.greedy
        self._params = cut(context.sampling) if draws else context.sampling
        self._uniform = uniform_source(context.noise, label) if draws else None
        self._width = _WIDTH if context.target.model.capabilities.trees else 1
        self._n_drawn = 0
        self.ids: list[int] = []
        self.curve = CostCurve()
        self.corrected: Callable[[float], float] = lambda p: p

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.ids = list(token_ids)
        self._n_drawn = 0

    def accept(self, verification: Verification) -> None:
        """Take the tokens that the text got."""
        self.ids.extend(verification.token_ids)

    @property
    def n_past(self) -> int:
        """Tokens that the session holds of the text: all but the last."""
        return len(self.ids) - 1

    @property
    def is_ready(self) -> bool:
        """Whether the session holds the text, and one more row has room."""
        session = self.context.target
        return 0 <= self.n_past <= session.n_cached and self.n_past < session.n_ctx

    def draft(
        self, layers: LayerSet, share: float, n_max: int, deadline_s: float, *, n_levels: int | None = None
    ) -> Draft:
        """Draft a chain, and leaves beside it, for as long as one more token is likely to be worth its forward.

        Args:
            layers: The half-layers that run; their share of the weights is `share`.
            n_max: Most nodes.
            deadline_s: When to stop, on the monotonic clock.
            n_levels: Most tokens of the chain; None for as many as there may be nodes.

        Raises:
            EdgedecError: As Session.forward, but for a cancelled one, which ends the draft.
        """
        n_levels = min(n_levels or n_max, n_max, self.context.target.n_ctx - len(self.ids))
        if n_levels < 1 or not self.is_ready:
            return EMPTY_DRAFT
        nodes, laws, path, text = _Nodes(n_max), list[Distribution](), 1.0, list(self.ids)
        floor = self.context.floor.path_probability
        worth, least = floor or self.curve.part(share), max(_LEAST_LEAF, floor / 3)
        for level in range(n_levels):
            if monotonic() > deadline_s:
                break
            try:
                forward = self._forward(text[-1], self.n_past + level, layers, share)
            except CancelledError:
                break
            tokens, p = self._following(forward, text, laws)
            if not tokens:
                break
            nodes.add(tokens[: self._width], p, path, least)
            path *= self.corrected(p[0])
            if nodes.is_full or path < worth:
                break
            text.append(tokens[0])
        draft = Draft.tree(nodes.tokens, nodes.parents, nodes.p_accept)
        return replace(draft, q=tuple(laws)) if laws else draft

    def _forward(self, token: int, n_past: int, layers: LayerSet, share: float) -> Forward:
        started = perf_counter()
        forward = self.context.target.forward(np.array([token], np.int32), n_past=n_past, layers=layers, rows="last")
        self.curve.observe_part(share, perf_counter() - started, self.n_past)
        if self.context.recorder is not None:
            self.context.recorder.evaluated(1, layers)
        return forward

    def _following(
        self, forward: Forward, text: Sequence[int], laws: list[Distribution]
    ) -> tuple[list[int], list[float]]:
        """Return the tokens that may follow, and how sure each is; a drawn one's q is added to `laws`."""
        n_vocab = self.context.target.model.card.n_vocab
        if self._uniform is None:
            return ranked(forward, self._params, text, self.context.noise, len(text), n_vocab)
        law = distribution(forward.logits[0], self._params, text, forward.ops)
        token = sample(law, self._uniform(self._n_drawn))
        self._n_drawn += 1  # a position that is drafted again gets another number
        laws.append(law)
        return [token], [agreement(law)]

    def drawn(self, forward: Forward, row: int, text: Sequence[int]) -> int:
        """Return the token that a row would give after a text, with the target's noise where tokens are drawn."""
        n_vocab = self.context.target.model.card.n_vocab
        params = self.context.sampling
        return ranked(forward, params, text, self.context.noise, len(text), n_vocab, row=row)[0][0]

    def memory_bytes(self) -> int:
        """Return the bytes of its own lists."""
        return 16 * len(self.ids)


Hidden = Mapping[int, NDArray[np.float32]]
