"""From a model's logits to the tokens of the next level of a draft: its most probable ones, or one that is drawn."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, RowsAfter
from edgedec.drafter import DraftContext
from edgedec.drafters.draft_builder import Level
from edgedec.model import Forward
from edgedec.sampling import Distribution, distribution

_WIDTH = 3  # most probable tokens taken of each row


class LevelMaker:
    """Makes the levels of one generation's drafts.

    A level is the model's most probable tokens, with the target's own noise (Daliri, Musco and Suresh 2024,
    arXiv:2408.07978). Where the context has a drawing that draws, it is one token drawn from q, and comes with its q.

    Args:
        n_vocab: Tokens from this one on are left out, as the target does not have them.
        label: Sets the drawn numbers apart from those of the generation's other drafters; no position of a text is as
            large as a label.
        listed: int64[n], ascending: the token of each logit of a row; None where rows are over the whole vocabulary.

    Attributes:
        draws: Whether a level is a token that is drawn from q.
        is_tree: Whether drafts are trees, made by tree(), and no chains of levels.
    """

    def __init__(
        self, context: DraftContext, n_vocab: int, label: int, listed: NDArray[np.int64] | None = None
    ) -> None:
        drawing, params = context.drawing, None if context.drawing is None else context.drawing.params
        self.draws, self.is_tree = params is not None, drawing is not None and drawing.is_tree
        self._params = context.sampling if params is None else params
        self._numbers = None if drawing is None else drawing.numbers(context.noise, label)
        self._noise = context.noise
        self._n_vocab, self._listed = n_vocab, listed
        self._width = _WIDTH if context.target.model.capabilities.trees else 1

    def begin(self) -> None:
        """Start a text: the drawn numbers begin anew."""
        if self._numbers is not None:
            self._numbers.begin()

    def level(self, forward: Forward, row: int, text: Sequence[int]) -> Level:
        """Return the level after a text, of which this row of the forward is the last token.

        Raises:
            RequestError: As edgedec.sampling.distribution.
        """
        if self._numbers is None or not self.draws:
            tokens, p = self.ranked(forward, row, text)
            return Level(tokens[: self._width], p[: self._width])
        q = self.law(forward, row, text)
        token, chance = self._numbers.draw(q)
        return Level([token], [chance], q)

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

    def tree(
        self, rows: RowsAfter, n_max: int, least_path: float, corrected: Callable[[float], float] = float
    ) -> Draft:
        """Return a tree of what `rows` gives, laws or levels as drafts are drawn or not; see edgedec.draft."""
        assert self._numbers is not None, "drafts are trees where the context says how"
        return self._numbers.tree(rows, n_max, least_path, corrected)
