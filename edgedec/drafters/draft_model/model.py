"""model: a smaller model with the same tokenizer drafts a chain, with its next best tokens as leaves beside it.

Speculative sampling with a draft model (Leviathan et al. 2023, arXiv:2211.17192), drawing with the target's own noise
(Daliri, Musco and Suresh 2024, arXiv:2408.07978). The chain goes on while its path probability pays for a forward of
the draft model. Leaves cost no time here (DySpec, Xiong et al. 2024, arXiv:2410.11744, also grows below them; that
needs a forward each, which on a CPU rarely pays).

Under another rule than the coupled one, and above temperature 0, a chain is drawn from q with numbers of its own, and
each node comes with its q. That is what these rules are exact for: a node is drawn from its q given the nodes before
it, with a number that was used for nothing else, and whether the chain goes on is decided by the nodes that are there,
before the next one is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, DrafterFactory, DrafterNeeds, ForwardLog, Verification
from edgedec.memory_plan import format_bytes
from edgedec.model import Forward, Model
from edgedec.noise import Noise
from edgedec.sampling import Distribution, SamplingParams, distribution
from edgedec.verification.distributions import sample
from edgedec.verification.uniform import uniform_source

WINDOW = 1024  # tokens of the draft model's KV cache
SMALL_WINDOW = 256  # where memory is short
ROWS = 9  # rows of logits that a draft model is loaded for: a token and what a cheap drafter expects after it
_FIRST = 64  # last tokens of a prompt that are read: where more is needed, suffix knows it already
_WIDTH = 3  # most probable tokens taken of each row
_LEAST = 0.02  # of a leaf
_MOST_DRAWN = 1024  # tokens of a q that is drawn from: it is kept until it was verified
_DRAWS = 0x4D6F64656C447277  # sets the numbers of draws apart: no position of a text is that large

Ahead = Callable[[list[int], int], list[int]]


@runtime_checkable
class ModelFactory(DrafterFactory, Protocol):
    """A DrafterFactory that holds a loaded model: what its drafters propose takes forwards of it."""

    def forget(self) -> None:
        """Drop what is kept between generations."""

    def summary(self) -> str:
        """Name the model, and the memory that keeping it takes."""

    def close(self) -> None:
        """Free the model; calling it again does nothing."""


class DraftModel:
    """A loaded draft model with one session; makes the drafter of each generation (a ModelFactory).

    Attributes:
        model: The draft model.
        session: Its session, a window of the text.
        cached: The tokens that the session holds.
        recorder: Told of each forward, while drafts are recorded; else None.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.session = model.session(WINDOW)
        self.cached: list[int] = []
        self.recorder: ForwardLog | None = None

    def __call__(self, context: DraftContext) -> "ModelDrafter":
        """Make the drafter of one generation."""
        return ModelDrafter(self, context)

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.cached = []

    def held_bytes(self) -> tuple[int, int]:
        """Return what the draft model holds, and its KV cache; as it was planned, for to plan anew may take memory."""
        terms = [term for term in self.model.memory(WINDOW, ROWS) if not term.base]
        n_planned = sum(term.n_bytes for term in terms if term.name == "KV cache")
        n_kv = n_planned * self.session.n_ctx // WINDOW
        return sum(term.n_bytes for term in terms) - n_planned + n_kv, n_kv

    def summary(self) -> str:
        """Name the draft model, and the memory that keeping it takes."""
        card = self.model.card
        return f"the draft model {card.name or card.architecture} ({format_bytes(self.held_bytes()[0])})"

    def shrink(self) -> None:
        """Go on with a smaller window, so that its KV cache takes less memory (raises what Model.session raises)."""
        self.session.close()
        self.cached = []
        self.session = self.model.session(SMALL_WINDOW)

    def close(self) -> None:
        """Free the draft model."""
        self.model.close()

    def read(self, window: Sequence[int], ahead: Sequence[int] = ()) -> Forward:
        """Return the logits after these tokens and after each one of `ahead`, which follow them.

        Evaluated is only what the session does not hold, and the last token of the window.
        """
        n = min(_n_common(self.cached, window), len(window) - 1, self.session.n_cached)
        self.cached = list(window[:n])
        tokens = np.array([*window[n:], *ahead], np.int32)
        rows = np.arange(len(tokens) - len(ahead) - 1, len(tokens), dtype=np.int32)
        forward = self.session.forward(tokens, n_past=n, rows=rows if ahead else "last")
        self.cached = [*window, *ahead]
        self._note(len(tokens))
        return forward

    def go_on(self, token: int) -> Forward:
        """Return the logits after one more token."""
        forward = self.session.forward(np.array([token], np.int32), n_past=len(self.cached), rows="last")
        self.cached.append(token)
        self._note(1)
        return forward

    def _note(self, n_rows: int) -> None:
        if self.recorder is not None:
            self.recorder.evaluated(n_rows, None)

    def first_begin(self, token_ids: Sequence[int]) -> int:
        """Return where the window of a new text begins: at its start where the session holds much of it, else late."""
        n = len(token_ids)
        if n - _n_common(self.cached, token_ids) <= _FIRST and n < self.session.n_ctx * 3 // 4:
            return 0
        return max(0, n - _FIRST)

    def next_begin(self, begin: int, n: int, n_more: int) -> int:
        """Return where the window of a text of `n` tokens begins so that `n_more` have room; half of it is kept."""
        return begin if n - begin + n_more + 1 < self.session.n_ctx else n - self.session.n_ctx // 2


def window_of(token_ids: Sequence[int], begin: int) -> list[int]:
    """Return the text's tokens from `begin` on, after its first, on which attention leans.

    Attention sinks: Xiao et al. 2023, arXiv:2309.17453; it is the BOS where there is one.

    >>> window_of([1, 5, 6, 7], 2)
    [1, 6, 7]
    """
    return [*token_ids[:1], *token_ids[begin:]] if begin > 0 else list(token_ids)


class ModelDrafter:
    """Implements edgedec.draft.Drafter.

    Args:
        source: The draft model.
        context: The generation's.
        ahead: `(tokens drafted so far, most tokens)` -> what may follow them, evaluated in the same forward so that
            the rows are there if it does. It changes the time that drafting takes, not the draft.
        label: Sets the numbers apart that it draws with where the rule is not the coupled one; another one for every
            drafter of a generation, as a number that was used before is not a fresh one.
    """

    def __init__(
        self, source: DraftModel, context: DraftContext, ahead: Ahead | None = None, *, label: int = _DRAWS
    ) -> None:
        self._source = source
        source.recorder = context.recorder
        self._noise = context.noise
        draws = not context.coupled and not context.sampling.greedy
        self._params = cut(context.sampling) if draws else context.sampling
        self._uniform = uniform_source(context.noise, label) if draws else None
        self._n_drawn = 0
        self._floor = context.floor
        self._ahead = ahead
        self._width = _WIDTH if context.target.model.capabilities.trees else 1
        self._n_vocab = min(context.target.model.card.n_vocab, source.model.card.n_vocab)
        self._ids: list[int] = []
        self._begin = 0  # where the window begins

    @property
    def needs(self) -> DrafterNeeds:
        """Nothing."""
        return DrafterNeeds()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt; it is read when the first draft is asked for."""
        self._ids = list(token_ids)
        self._begin = self._source.first_begin(self._ids)
        self._n_drawn = 0

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain of the most probable tokens, and leaves beside it, while that pays; or a drawn chain."""
        n_max = min(n_max, self._source.session.n_ctx // 4)
        if not self._ids or n_max < 1:
            return EMPTY_DRAFT
        self._begin = self._source.next_begin(self._begin, len(self._ids), n_max)
        window = window_of(self._ids, self._begin)
        drafted: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        p_accept: list[float] = []
        laws: list[Distribution] = []
        parent, path = -1, 1.0
        text, ahead, row = list(self._ids), self._ahead_of(drafted, n_max), 0
        forward = self._source.read(window, ahead)
        while True:
            if self._uniform is None:
                best, p = ranked(forward, self._params, text, self._noise, len(text), self._n_vocab, row=row)
            else:
                law = distribution(forward.logits[row, : self._n_vocab], self._params, text, forward.ops)
                best, p = [sample(law, self._uniform(self._n_drawn))], [agreement(law)]
                self._n_drawn += 1  # a position that is drafted again gets another number
                laws.append(law)
            if not best:
                break
            above = parent
            for i, (token, chance) in enumerate(zip(best[: self._width], p, strict=False)):
                if len(tokens) < n_max and (i == 0 or path * chance >= max(_LEAST, self._floor.path_probability / 3)):
                    tokens.append(token)
                    parents.append(above)
                    p_accept.append(chance)
                    if i == 0:
                        parent = len(tokens) - 1
            path *= p[0]
            if path < self._floor.path_probability or len(tokens) >= n_max or monotonic() > deadline_s:
                break
            drafted.append(best[0])
            text.append(best[0])
            if row < len(ahead) and ahead[row] == best[0]:
                row += 1
            else:
                ahead, row = self._ahead_of(drafted, n_max - len(tokens)), 0
                forward = self._source.read([*window, *drafted], ahead)
        draft = Draft.tree(tokens, parents, p_accept)
        return replace(draft, q=tuple(laws)) if laws else draft

    def _ahead_of(self, drafted: list[int], n_left: int) -> list[int]:
        """Return the tokens to evaluate beyond those drafted; the last one of a draft needs no row of its own."""
        n_most = min(n_left, self._source.model.capabilities.max_rows) - 1
        if self._ahead is None or n_most < 1:
            return []
        found = self._ahead(drafted, n_most)[:n_most]
        n_known = next((i for i, token in enumerate(found) if token >= self._n_vocab), len(found))
        return found[:n_known]

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._ids.extend(verification.token_ids)

    def memory_bytes(self) -> int:
        """Return the bytes of its own lists; the draft model has its terms in the memory plan."""
        return 16 * len(self._ids)


def ranked(
    forward: Forward,
    params: SamplingParams,
    seen: Sequence[int],
    noise: Noise,
    position: int,
    n_vocab: int,
    *,
    row: int = 0,
) -> tuple[list[int], list[float]]:
    """Return the tokens that the draft model would draw first after a row, and how sure it is of each.

    Greedily these are its most probable ones with their probabilities. Otherwise tokens compete by log q + noise, as
    the target's will with the same noise; the softmax of these keys says how clearly one wins.

    Args:
        forward: Of the draft model.
        params: How tokens are drawn.
        seen: The sequence so far, for the penalties.
        noise: The target's.
        position: Where the token will stand.
        n_vocab: Tokens from this one on are left out.
        row: Of the forward.

    Raises:
        RequestError: As edgedec.sampling.distribution.
    """
    logits = forward.logits[row]
    if params.greedy and not params.logit_bias and not params.has_penalties:
        ids = forward.ops.top_k(logits, _WIDTH)
        total = forward.ops.total(logits)
        p = np.exp(logits[ids].astype(np.float64) - total.most) / total.weight
    else:
        dist = distribution(logits, params, seen, forward.ops)
        keys = np.log(dist.probs)
        if not params.greedy:
            keys += noise.gumbel(position, dist.token_ids)
        best = np.argsort(-keys)[:_WIDTH]
        weights = np.exp(keys - keys[best[0]])
        ids, p = dist.token_ids[best], weights[best] / weights.sum()
    order = np.argsort(-p, kind="stable")
    return (
        [token for token in ids[order].tolist() if token < n_vocab],
        [chance for token, chance in zip(ids[order].tolist(), p[order].tolist(), strict=True) if token < n_vocab],
    )


def cut(params: SamplingParams) -> SamplingParams:
    """Return the options for q: the target's, with at most 1,024 tokens.

    Any q that is told is exact. The cut keeps it small, and took 0.0005 from an acceptance of 0.71 (Qwen2.5-Coder 0.5B
    for 1.5B, temperature 1, 98 tokens of prose and code).
    """
    return replace(params, top_k=min(params.top_k or _MOST_DRAWN, _MOST_DRAWN))


def agreement(q: Distribution) -> float:
    """Return an estimate of the sum of min(p, q), the chance that a token drawn from q is accepted, from q alone.

    It is (1 + sum of q^2) / 2. Where the log-probabilities of two models differ by about s, the distributions are about
    0.4 s (1 - sum of q^2) apart: the surer the drafter, the less room there is to differ. Of the token drawn it
    says nothing: what is decided by a drawn node's p_accept is decided without looking at the node.

    >>> agreement(Distribution(np.array([3, 4]), np.array([0.5, 0.5])))
    0.75
    """
    return (1.0 + float(q.probs @ q.probs)) / 2


def _n_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two texts have in common, from the start."""
    n = min(len(some), len(others))
    if list(some[:n]) == list(others[:n]):
        return n
    return next(i for i in range(n) if some[i] != others[i])
