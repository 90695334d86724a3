"""Token Recycling: a table of the tokens that the target held probable after each token when it last evaluated it.

Every row that a step evaluates, accepted or not, leaves its most probable next tokens in the table. Lossless, as it
only proposes. It differs from the paper, for the sake of a CPU:

- The tree has no fixed template of 80 nodes: it grows along the most probable paths, by the probabilities that the
  table keeps beside the ids.
- The rows of the accepted path are written last, so that of a token evaluated twice in a step the text's own row stays.
- The prompt fills in tokens that were never evaluated with the tokens that followed them in the prompt. Where
  the target gives no candidates, the tokens of the text are learned instead.
- Above temperature 0 children are ranked with the noise that the target draws with.

Paper: Luo et al. 2024, arXiv:2408.08696
Option: `--draft recycling`
For: texts that repeat what the target held probable, not what they said
Measured: eight texts of one prompt: 1.63 tokens a step, 0.72 in a plain forward's time; `auto` 1.24, 1.04 (`python
    benchmarks/speed/samples.py qwen2.5-coder-1.5b --draft recycling --max-tokens 64 --no-memory`)
Status: study
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafter_traits import Shedding
from edgedec.drafters.draft_builder import Child, grow_tree, path_of
from edgedec.sampling import gumbel_of
from edgedec_methods.candidate_table import BITS, CandidateTable, K, context_key, last_tokens, learn_text

_MAX_PROMPT = 8_192  # only so many last tokens of a prompt are learned
_TEXT_BYTES = 8_192  # memory of a drafter beside its table
_LEAST_PATH = 0.005  # a path less probable than this is not worth a row
_LEAST_CANDIDATE = 0.01  # a candidate less probable than this is seldom the one drawn
_LEAST_TEMPERATURE = 1e-6
_EULER = 0.5772  # the mean of Gumbel noise


class Ranking:
    """Ranks the candidates after a context by P(the target draws this token at its position).

    At temperature 0 that is a candidate's share in the table. Above 0 the target takes the argmax of
    log p_i / T + G(seed, position, i). The noise G is known; log q_i, what the table says, estimates log p_i with an
    error. Where that error is Gumbel noise of scale `error`, P(i) is the softmax of (log q_i / T + G_i) / error, and
    the highest sum comes first, as in drafter-invariant coupling (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    Top-k, top-p, min-p, bias and penalties are left out.

    Args:
        context: The generation's: its temperature and its noise.
        error: The scale of the table's error.
        certain: How often the text goes on as the table says where the table is certain.
    """

    def __init__(self, context: DraftContext, *, error: float, certain: float) -> None:
        sampling = context.sampling
        self._noise = None if sampling.greedy else context.noise
        self._sharpness = 1.0 if sampling.greedy else 1.0 / max(sampling.temperature, _LEAST_TEMPERATURE)
        self._error = error
        self._certain = certain

    def rank(self, ids: Sequence[int], probs: Sequence[float], position: int) -> list[tuple[int, float]]:
        """Return the candidates with their probabilities, most probable first; improbable candidates are left out.

        Args:
            ids: The candidates.
            probs: Their probabilities at temperature 1, highest first; they sum to at most 1.
            position: The absolute position of the token in the text.
        """
        chance = self._certain
        if self._noise is None:
            return [(token, chance * p) for token, p in zip(ids, probs, strict=True) if p >= _LEAST_CANDIDATE]
        key, sharpness = self._noise.key(position), self._sharpness
        scores = [
            (math.log(p) * sharpness + gumbel_of(key, token), token)
            for token, p in zip(ids, probs, strict=True)
            if p >= _LEAST_CANDIDATE
        ]
        if not scores:
            return []
        scores.sort(key=lambda score: -score[0])
        return self._shares(scores, 1 - sum(probs), probs[len(scores) - 1])

    def _shares(self, scores: list[tuple[float, int]], rest: float, least: float) -> list[tuple[int, float]]:
        """Turn noisy scores into probabilities.

        Args:
            scores: Score and token of each candidate, highest first.
            rest: The probability of all tokens outside the table; they compete for the draw, too.
            least: The probability of the least probable candidate, which bounds that of each token outside.
        """
        # Of tokens no more probable than `least` each, p^(1/T) sums to at most rest * least^(1/T - 1).
        outside = math.log(max(rest, 1e-3)) + (self._sharpness - 1) * math.log(least) + _EULER
        most = max(scores[0][0], outside)
        weights = [math.exp((score - most) / self._error) for score, _ in scores]
        total = sum(weights) + math.exp((outside - most) / self._error)
        scale = self._certain / total
        return [(token, scale * w) for w, (_, token) in zip(weights, scores, strict=True)]


class NgramDrafter:
    """Implements edgedec.drafter.Drafter: the longest context at the text's end that the table knows is continued.

    The table outlives the request. It takes at most 32 MB and half of the drafter's budget; when it is full, the
    context that was met first makes room for a new one.

    Args:
        name: The key of the table in the context's store.
        rankings: By the number of tokens of a context, how its candidates are ranked; longest contexts first.
        least_rate: The least weight of a new row in the table (see CandidateTable).
    """

    needs = DrafterNeeds(candidates=K)
    shedding = Shedding(20, "the table of {name}", keeps_store=True)

    def __init__(self, context: DraftContext, name: str, rankings: Mapping[int, Ranking], least_rate: float) -> None:
        limit_bytes = context.store.most_bytes
        self._lock = context.store.lock
        with self._lock:
            table = context.store.setdefault(name, CandidateTable(limit_bytes, least_rate))
            assert isinstance(table, CandidateTable), "the store's entry of this name is ours"
            self.table = context.store[name] = table.resized(limit_bytes)
        self._rankings = rankings
        self._n_tokens = max(rankings)
        self._state = 0  # the text's last tokens, as many as the longest context has
        self._length = 0  # tokens of the text, prompt included: the position of the next one

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which teaches the table the contexts that it lacks."""
        self._state = last_tokens(token_ids, self._n_tokens)
        self._length = len(token_ids)
        with self._lock:
            for order in self._rankings:
                learn_text(self.table, token_ids[-_MAX_PROMPT:], order)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Grow a tree of at most `n_max` nodes from the text's last tokens, most probable paths first."""
        with self._lock:
            return grow_tree(self._state, self._children, n_max=n_max, least_path=_LEAST_PATH, older_first=False)

    def _follow(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        return ((state << BITS) | token) & ((1 << BITS * self._n_tokens) - 1)

    def _children(self, state: int, depth: int) -> list[Child[int]]:
        """Return the tokens that may follow a state `depth` tokens behind the text, highest score first."""
        order, ids, probs = self.longest(state)
        ranked = self._rankings[order].rank(ids, probs, self._length + depth) if order else []
        return [(p, token, p, self._follow(state, token)) for token, p in ranked]

    def longest(self, state: int) -> tuple[int, list[int], list[float]]:
        """Return the longest known context at a state's end: its number of tokens, its candidates, their probabilities.

        Where no context is known, these are 0 and two empty lists.
        """
        for order in self._rankings:
            ids, probs = self.table.row(context_key(state, order))
            if ids:
                return order, ids, probs
        return 0, [], []

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Learn the target's candidates after each row of the step or, without candidates, the tokens of the text."""
        states = [self._state]
        for token in verification.token_ids:
            states.append(self._follow(states[-1], token))
        before, self._state = self._state, states.pop()
        self._length += len(verification.token_ids)
        with self._lock:
            if verification.candidates is not None:
                self._learn_rows(before, verification.candidates, verification.token_ids)
                return
            ids = np.array([*verification.token_ids] * len(self._rankings), np.int32)[:, None]
            self.table.learn(self._keys(states), ids, np.ones(ids.shape, np.float32), prior=1)

    def _learn_rows(self, state: int, candidates: Candidates, token_ids: Sequence[int]) -> None:
        """Learn every evaluated row; those of the accepted path are learned last, so that they stay."""
        tokens, parents = candidates.tokens.tolist(), candidates.parents.tolist()
        states = [state]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            states.append(self._follow(states[parent], token))
        path = [0, *path_of(tokens, parents, token_ids, root=0)]
        rows = [row for row in range(len(tokens)) if row not in path] + path
        every = rows * len(self._rankings)
        self.table.learn(self._keys([states[row] for row in rows]), candidates.ids[every], candidates.probs[every])

    def _keys(self, states: Sequence[int]) -> list[int]:
        """Return the keys of all contexts at these states' ends, order by order."""
        return [context_key(state, order) for order in self._rankings for state in states]

    def memory_bytes(self) -> int:
        """Return about how much memory the drafter and its table hold."""
        return self.table.memory_bytes() + _TEXT_BYTES


class RecyclingDrafter(NgramDrafter):
    """Implements edgedec.drafter.Drafter with contexts of one token; a newer row of a context replaces the old one."""

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context, "recycling", {1: Ranking(context, error=2.0, certain=0.65)}, least_rate=1.0)
