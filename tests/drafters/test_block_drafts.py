"""Drafts of a head whose laws are a block's: one for each place, corrected by the token before, in exact sums."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.drawings import drawn
from support.decoding.exact_distributions import Drawing, text_of
from support.decoding.rule_checks import check_exact, models
from support.decoding.tree_draws import Drawn, each_way

from edgedec.cost_curve import DraftPrice, SharedForward
from edgedec.draft import Draft
from edgedec.drafter import DraftContext, Floor
from edgedec.drafters.head import HeadDrafter
from edgedec.head_state import ChainRules, DraftedChain
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec.model import Session
from edgedec.model_card import Capabilities
from edgedec.sampling import Distribution, Noise, SamplingParams
from edgedec.verification.rules import rule_names
from edgedec_methods.drawn.drawn_trees import TreePlace, parse_shape

N_VOCAB = 3
TEXT = (0, 2)
SAMPLED = SamplingParams(temperature=1.0, top_p=1.0)
RNG = np.random.default_rng(5)
PLACES = RNG.normal(0, 1.5, (3, 2)).astype(np.float32)
BIAS = RNG.normal(0, 1.5, (N_VOCAB, 2)).astype(np.float32)
LISTED = np.array([0, 2], np.int32)


class Block:
    """What HeadState says of a block head: the scores of a place are a row of PLACES and the bias of the token before.

    Attributes:
        n_forwards: How often a block was evaluated.
        sure: What the head says of each drafted token.
    """

    token_ids, ops, price, shared, evaluated = LISTED, NUMPY_ROW_OPS, DraftPrice(0.01, once=0.1), SharedForward(), ()
    reach, gone, read_s, summary = (), False, 0.0, "a block"

    def __init__(self, sure: tuple[float, ...] = ()) -> None:
        self.n_forwards, self.sure = 0, sure
        self._n_next = 0

    def follow(self) -> None:
        """Do so in any case."""

    def begin(self, n_past: int, token: int) -> NDArray[np.float32]:
        """Evaluate a block."""
        self.n_forwards, self._n_next = self.n_forwards + 1, 0
        return np.asarray(PLACES[0] + BIAS[token], np.float32)

    def next(self, token: int) -> NDArray[np.float32] | None:
        """Return the scores of the next place; None behind the block."""
        self._n_next += 1
        return np.asarray(PLACES[self._n_next] + BIAS[token]) if self._n_next < len(PLACES) else None

    def branches(self, tokens: Sequence[int], parents: Sequence[int], n_new: int) -> NDArray[np.float32] | None:
        """Return the scores behind nodes; None behind the block."""
        depths = Draft.tree(tokens, parents, [1.0] * len(tokens)).depths()[-n_new:]
        if max(depths) >= len(PLACES):
            return None
        return np.stack([PLACES[depth] + BIAS[token] for depth, token in zip(depths, tokens[-n_new:], strict=True)])

    def chain(self, n_past: int, token: int, rules: ChainRules) -> DraftedChain:
        """Return the chain of the best tokens, with what the head is sure of."""
        tokens, p = list[int](), list[float]()
        for scores in PLACES[: rules.n_max]:
            weights = np.exp(scores + BIAS[token])
            p.append(float(weights.max() / weights.sum()))
            token = int(LISTED[weights.argmax()])
            tokens.append(token)
        others = tuple(int(LISTED.sum()) - token for token in tokens)
        return DraftedChain(tuple(tokens), tuple(p), others, tuple(1 - one for one in p), self.sure[: len(p)])


def drafter(head: Block, params: SamplingParams = SAMPLED, **context: Any) -> HeadDrafter:
    """Return the drafter of a text of three tokens that the block follows."""
    model = SimpleNamespace(card=SimpleNamespace(n_vocab=N_VOCAB), capabilities=Capabilities(trees=True))
    session = cast(Session, SimpleNamespace(model=model, draft_head=head, room=lambda n: 99))
    made = HeadDrafter(DraftContext(session, params, Noise(1), **drawn(params, **context)))
    made.begin(TEXT)
    return made


def _first_of(drawn: Drawn, law: Distribution, number: float) -> int:
    return next(drawn(law, TreePlace(), 0))[0]


def all_drafts(propose: Callable[[], Draft]) -> list[Drawing]:
    """Return every draft that may be drawn, with its probability: each token is drawn in every way."""

    def make(drawn: Drawn) -> Draft:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edgedec_methods.drawn.drawn_trees.drawn_without_replacement", drawn)
            patch.setattr("edgedec_methods.drawn.rule_tools.sample", partial(_first_of, drawn))
            return propose()

    drawings: list[Drawing] = []
    for chance, draft in each_way(make):
        assert draft.q is not None
        drawings.append((chance, draft, draft.q))
    return drawings


CASES = [
    *((rule, "chain", least) for rule in sorted(rule_names()[1:]) for least in (0.0, 0.6)),
    *(("recursive", shape, least) for shape in ("siblings:2", "grow") for least in (0.0, 0.2)),
    ("kseq", "paths:2", 0.3),
    ("multipath", "paths:2", 0.3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "shape", "least"), CASES)
def test_what_is_drawn_from_a_block_keeps_the_distribution(rule: str, shape: str, least: float) -> None:
    """Over all draws, ended by their chances or not; q is the corrected law, and a draft evaluates one block."""
    head = Block()
    context: dict[str, Any] = {"coupled": False, "shape": parse_shape(shape), "floor": Floor(least)}
    drawings = all_drafts(lambda: drafter(head, **context).propose(5, 0.0))
    assert head.n_forwards == len(drawings)
    depths = {max(draft.depths()) for _, draft, _ in drawings}
    assert max(depths) == len(PLACES) or (least and min(depths) < len(PLACES))
    for _, draft, laws in drawings:
        for node, law in enumerate(laws):
            path = text_of(draft, int(draft.parents[node]))
            weights = np.exp((PLACES[len(path)] + BIAS[[*TEXT, *path][-1]]).astype(np.float64))
            assert law is not None
            np.testing.assert_allclose(law.probs, weights / weights.sum())
    target, _ = models(2, N_VOCAB, len(PLACES) + 1)
    assert check_exact(rule, drawings, target, N_VOCAB, 1 + max(depths)) > 0


@pytest.mark.slow
def test_a_draft_that_ends_by_what_was_drawn_does_not() -> None:
    """A last token that is left out as it is improbable itself: the sums find that out."""
    drawings = all_drafts(lambda: drafter(Block(), coupled=False).propose(2, 0.0))
    ended = []
    for weight, draft, laws in drawings:
        last = laws[-1]
        assert last is not None
        cut = len(draft) - int(last.probs[list(last.token_ids).index(draft.tokens[-1])] < 0.5)
        ended.append((weight, draft.truncated(cut), laws[:cut]))
    target, _ = models(2, N_VOCAB, len(PLACES) + 1)
    with pytest.raises(AssertionError):
        check_exact("recursive", ended, target, N_VOCAB, 3)


def test_a_head_that_says_how_sure_it_is_is_taken_at_its_word() -> None:
    """A node counts with that chance, the second token beside it with what is left; one that says nothing, with p."""
    greedy, sure = SamplingParams(temperature=0), (0.9, 0.8, 0.7)
    chain = Block(sure).chain(1, TEXT[-1], ChainRules(3))
    for said in (sure, chain.p):
        draft = drafter(Block(said), greedy).propose(6, np.inf)
        best = [chain.tokens[depth - 1] for depth in draft.depths()]
        assert [p for p, one, token in zip(draft.p_accept, best, draft.tokens, strict=True) if one == token] == list(
            said
        )
        for p, depth, one, token in zip(draft.p_accept, draft.depths(), best, draft.tokens, strict=True):
            assert one == token or p == pytest.approx(1 - said[depth - 1])
        assert len(draft) > 3
