"""From a model's logits to the tokens of the next level of a draft: its most probable ones, or one that is drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.drafter import DraftContext
from edgedec.drafters.draft_builder import Level
from edgedec.model import Forward
from edgedec.sampling import Distribution, Noise, SamplingParams, distribution

if TYPE_CHECKING:
    from edgedec.drafters.drawn_trees import TreePlace

_WIDTH = 3  # most probable tokens taken of each row
_TREES = 0x547265654B657973  # sets the keys of trees apart from the numbers of chains
_MOST_DRAWN = 1024  # tokens of a q that is drawn from: it is kept until it was verified


class LevelMaker:
    """Makes the levels of one generation's drafts.

    Greedily and under the coupled rule, a level is the model's most probable tokens, with the target's own noise
    (Daliri, Musco and Suresh 2024, arXiv:2408.07978). Under another rule, and above temperature 0, a level is one token
    drawn from q with a number of its own, and comes with its q. That is what these rules are exact for: a node is drawn
    from its q given the nodes before it, with a number that was used for nothing else.

    Args:
        context: The generation's.
        n_vocab: Tokens from this one on are left out, as the target does not have them.
        label: Sets the drawn numbers apart from those of the generation's other drafters; no position of a text is as
            large as a label.
        listed: int64[n], ascending: the token of each logit of a row; None where rows are over the whole vocabulary.

    Attributes:
        draws: Whether a level is a token that is drawn from q.
    """

    def __init__(
        self, context: DraftContext, n_vocab: int, label: int, listed: NDArray[np.int64] | None = None
    ) -> None:
        self.draws = not context.coupled and not context.sampling.greedy
        self._params = cut(context.sampling) if self.draws else context.sampling
        self._label = label
        self._keys = Noise(context.noise.key(label) ^ _TREES)
        self._n_drawn = 0
        self._noise = context.noise
        self._n_vocab, self._listed = n_vocab, listed
        self._width = _WIDTH if context.target.model.capabilities.trees else 1

    def begin(self) -> None:
        """Start a text: the drawn numbers begin anew."""
        self._n_drawn = 0

    def level(self, forward: Forward, row: int, text: Sequence[int]) -> Level:
        """Return the level after a text, of which this row of the forward is the last token.

        Raises:
            RequestError: As edgedec.sampling.distribution.
        """
        if not self.draws:
            tokens, p = self.ranked(forward, row, text)
            return Level(tokens[: self._width], p[: self._width])
        from edgedec.verification.rule_tools import sample, uniform_source  # only opt-in rules draw

        q = self.law(forward, row, text)
        token = sample(q, uniform_source(self._noise, self._label)(self._n_drawn))
        self._n_drawn += 1  # a position that is drafted again gets another number
        return Level([token], [agreement(q)], q)

    def law(self, forward: Forward, row: int, text: Sequence[int]) -> Distribution:
        """Return q after a text, of which this row of the forward is the last token (RequestError: as level())."""
        return self._law(forward, forward.logits[row, : self._n_vocab], text)

    def _law(self, forward: Forward, logits: NDArray[np.float32], text: Sequence[int]) -> Distribution:
        law = distribution(logits, self._params, text, forward.ops)
        return law if self._listed is None else Distribution(self._listed[law.token_ids], law.probs)

    def ranked(self, forward: Forward, row: int, text: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return the tokens that would be drawn first after a text, and how sure the model is of each.

        Greedily these are the three most probable tokens with their probabilities. Otherwise tokens compete by
        log q + noise, as the target's will with the same noise at the position behind the text; the softmax of these
        keys says how clearly one wins. The arguments and errors are those of level().
        """
        logits, params = forward.logits[row], self._params
        if params.takes_best:
            ids = forward.ops.top_k(logits, min(_WIDTH, len(logits)))
            total = forward.ops.total(logits)
            p = np.exp(logits[ids].astype(np.float64) - total.most) / total.weight
            ids = ids if self._listed is None else self._listed[ids]
        else:
            dist = self._law(forward, logits, text)
            keys = np.log(dist.probs)
            if not params.greedy:
                keys += self._noise.gumbel(len(text), dist.token_ids)
            best = np.argsort(-keys)[:_WIDTH]
            weights = np.exp(keys - keys[best[0]])
            ids, p = dist.token_ids[best], weights[best] / weights.sum()
        order = np.argsort(-p, kind="stable")
        order = order[ids[order] < self._n_vocab]
        return ids[order].tolist(), p[order].tolist()

    def drawn(self, law: Distribution, place: "TreePlace") -> Iterator[tuple[int, float]]:
        """Yield tokens drawn from q without replacement, by numbers that nothing else used, and their keys."""
        from edgedec.drafters.drawn_trees import drawn_without_replacement

        self._n_drawn += 1
        return drawn_without_replacement(law, place, self._keys.key(self._n_drawn))


def cut(params: SamplingParams) -> SamplingParams:
    """Return the options that q is made with: the target's, with at most 1,024 tokens.

    The rules are exact for any q. The cut keeps q small, and took 0.0005 from an acceptance of 0.71 (Qwen2.5-Coder 0.5B
    for 1.5B, temperature 1, 98 tokens of prose and code).
    """
    return replace(params, top_k=min(params.top_k or _MOST_DRAWN, _MOST_DRAWN))


def agreement(q: Distribution) -> float:
    """Return an estimate of the sum of min(p, q), the chance that a token drawn from q is accepted, from q alone.

    It is (1 + sum of q^2) / 2. Where the log-probabilities of two models differ by about s, the distributions are about
    0.4 s (1 - sum of q^2) apart: the surer the drafter, the less room there is to differ. The estimate does not look at
    the token that was drawn, so what is decided by it is decided without looking at the node.

    >>> agreement(Distribution(np.array([3, 4]), np.array([0.5, 0.5])))
    0.75
    """
    return (1.0 + float(q.probs @ q.probs)) / 2
