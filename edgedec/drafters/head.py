"""head: a trained draft head, which reads the target's own hidden states, drafts a chain with second bests, or a tree.

Any kind of head (edgedec.head_kinds) that a runtime loads with the target and a session offers (edgedec.head_state).
One call drafts the whole chain of the head's best tokens, which ends where the policy's floor says that one more token
does not pay, by the head's own probabilities as far as they proved right (SpecDec++, Huang et al. 2024,
arXiv:2405.19715, trains such a stop). Tokens drawn with the target's noise would be right more often (1.58 tokens a
step of the 135M in place of 1.55), but take three times as long. With bias, penalties or a law q, tokens are chosen as
edgedec.drafters.levels says, and of those that a grammar allows. Where drafts are trees, each level is a call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.draft import EMPTY_DRAFT, Draft, Draws, Verification
from edgedec.drafter import DraftContext, DrafterFactory, DrafterNeeds, DrafterRestsError
from edgedec.drafter_traits import Demands, DraftCost, DrafterTraits, Place, Shedding
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.drafters.levels import LevelMaker
from edgedec.errors import CapabilityError, RequestError, argument
from edgedec.head_state import Arranging, ChainRules, DraftedChain, HeadState
from edgedec.load_plan import LoadPlan
from edgedec.model import Forward, Session
from edgedec.sampling import Distribution

P = ParamSpec("P")
T = TypeVar("T")
Scores = NDArray[np.float32]
Path = tuple[int, ...]
"""Drafted tokens behind the text."""
Made = Callable[[Scores, Sequence[int], int], T | None]
"""`(the head's scores, the text with drafted tokens, how many of it are not drafted)` -> what is made of the scores."""

NAME = "head"
SHED = "the draft head was shed when memory ran short; load again to have it"
"""The reason why a head that was freed drafts no more."""
_LEAST_LEAF = 0.05  # a second best token of a smaller path probability is left out
_DRAWS = 0x4472616674486561  # sets the drawn numbers apart from those of other drafters
_IMPOSSIBLE = np.float32(-1e30)  # the score of a token that the head can't draft


@dataclass(slots=True)
class Tally:
    """How often the first token of a session's drafts was right, verified or not, since the load or Engine.forget().

    Attributes:
        n_drafts: Drafts.
        n_right: Drafts whose first token came.
        why: Why the head is no longer asked; empty while it is.
    """

    n_drafts: int = 0
    n_right: int = 0
    why: str = ""


class HeadDrafter:
    """Implements edgedec.drafter.Drafter.

    Attributes:
        state: What the head knows of the session's text.
        calls: The head's calls for the latest draft, in which other sessions may have had texts.
        own_s: Seconds of this thread that the latest draft took beside these calls.
        traits: What the head declares: what its trainer measured.
        demands: What the drafter needs at load.
    """

    needs = DrafterNeeds()
    demands = Demands(head=True, place=Place.BEFORE_KV_TYPES, called="draft head")

    def __init__(self, context: DraftContext) -> None:
        """Draft with the head that follows the target's session.

        Raises:
            CapabilityError: No head was loaded with the target.
            DrafterRestsError: The head accepted too little in earlier texts, or was shed.
        """
        state = context.target.draft_head
        if state is None:
            raise CapabilityError(
                f"no draft head was loaded with the model; name one ({argument('draft_head')}), or use another "
                f"{argument('draft')}"
            )
        self.state: HeadState = state
        self.calls: list[SharedForward] = []
        self.own_s = 0.0
        self._context = context
        self._tally: Tally = context.store.setdefault(NAME, Tally())
        if self._tally.why:
            state.rest()
            raise DrafterRestsError(self._tally.why)
        if state.gone:
            raise DrafterRestsError(SHED)
        state.follow()
        curve = context.curve
        cost = None if curve.seconds(1) is None else lambda n_rows: curve.cost()(n_rows - 1)
        if isinstance(state, Arranging) and (why := state.arrange(cost)):
            state.rest()
            raise DrafterRestsError(why)
        self._ids: list[int] = []
        self._begun_s = 0.0
        self.traits = replace(_traits(state, context), about=self.summary)
        self._allowed = _Allowed(context, state)
        self._levels = self._allowed.levels
        self._takes_best = not (self._levels.draws or context.sampling.logit_bias or context.sampling.has_penalties)
        self._first: int | None = None  # the first token of the latest draft

    @staticmethod
    def begin_prompt(session: Session, *, follows: bool) -> None:
        """Have the head follow a prompt that several texts have in common, or rest; see FollowingFactory."""
        head = session.draft_head
        if head is None or head.gone:
            return
        if follows:
            head.follow()
        else:
            head.rest()

    @staticmethod
    def opened(session: Session, plan: LoadPlan) -> DrafterFactory:
        """Return the factory that can shed the session's head."""
        return HeadDrafter if session.draft_head is None else HeadFactory(session.draft_head)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which the head reads together with the target."""
        self._ids = list(token_ids)
        self._begun_s = self.state.read_s
        self._levels.begin()

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain with the second best tokens beside it, or a drawn chain, for as long as that pays.

        Raises:
            DrafterRestsError: Another request has shed the head.
        """
        if self.state.gone:
            raise DrafterRestsError(SHED)
        left_s = deadline_s - monotonic()
        begun, self.calls, self.own_s = perf_counter(), [], 0.0
        n_max = min(n_max, self._context.target.room(len(self._ids)))
        if len(self._ids) < 2 or n_max < 1 or (left_s < 0 and not self._levels.draws):
            return EMPTY_DRAFT
        correction, least_path = self._context.correction, self._context.floor.path_probability
        rules = ChainRules(n_max, least_path, correction.edges, tuple(correction.factors), left_s)
        draft = self._tree(rules) if self._levels.is_tree else self._chain(rules)
        self._first = draft.tokens[0] if draft.tokens else None
        self.own_s += perf_counter() - begun
        return draft

    def _chain(self, rules: ChainRules) -> Draft:
        """Return a chain, with leaves where it is not drawn.

        A clock must not decide where a drawn chain ends: another draft leads to another text under its rule.
        """
        nodes, correction = DraftBuilder(rules.n_max), self._context.correction
        nodes.add_levels(
            self._levels_behind(rules),
            deadline_s=inf if self._levels.draws else monotonic() + rules.most_s,
            least_path=rules.least_path,
            least_leaf=_LEAST_LEAF if self._context.target.model.capabilities.trees else 1.0,
            corrected=correction.corrected,
        )
        return nodes.build()

    def _tree(self, rules: ChainRules) -> Draft:
        """Return a tree, whose levels are a call of the head each."""
        scored: list[Path] = []  # the paths to the nodes that were scored
        made: Made[Distribution | Level] = self._allowed.law if self._levels.draws else self._allowed.level
        rows, correction = partial(self._scored, scored, made), self._context.correction
        return self._levels.tree(rows, rules.n_max, rules.least_path, correction.corrected)

    def _scored(self, scored: list[Path], made: Made[T], paths: Sequence[Path]) -> list[T | None]:
        """Return what `made` makes of the scores after each path, one for equal paths; None where there are none.

        `scored` are the paths that were scored before for the same tree; the new ones are added.
        """
        new = list(dict.fromkeys(paths))
        if new == [()]:
            scores = self._begun()
            rows = None if scores is None else scores[None]
        else:
            scored.extend(new)
            places = {path: node for node, path in enumerate(scored)}
            parents = [places.get(path[:-1], -1) for path in scored]
            rows = self._noted(self.state.branches, [path[-1] for path in scored], parents, len(new))
        if rows is None:
            return [None] * len(paths)
        results = {path: made(row, [*self._ids, *path], len(self._ids)) for path, row in zip(new, rows, strict=True)}
        return [results[path] for path in paths]

    def _levels_behind(self, rules: ChainRules) -> Iterator[Level]:
        """Yield the levels behind the text; those of one chain, as far as the grammar allows it, then one by one."""
        path: list[int] = []
        if self._takes_best:
            for level in _levels_of(self._noted(self.state.chain, len(self._ids) - 1, self._ids[-1], rules)):
                if not self._allowed.allows(path, level):
                    break
                yield level
                path.append(level.tokens[0])
            else:
                return
        text, scores = [*self._ids, *path], self._begun()
        for token in path:
            scores = self._noted(self.state.next, token)
        while scores is not None and (level_behind := self._allowed.level(scores, text, len(self._ids))) is not None:
            yield level_behind
            text.append(level_behind.tokens[0])
            scores = self._noted(self.state.next, text[-1])

    def _begun(self) -> Scores | None:
        """Return the scores of what follows the text; None where the head does not know the text."""
        return self._noted(self.state.begin, len(self._ids) - 1, self._ids[-1])

    def _noted(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Return what a call of the head returns, and note it."""
        begun = perf_counter()
        result = call(*args, **keywords)
        self.own_s -= perf_counter() - begun
        self.calls.append(self.state.shared)
        if self._context.recorder is not None:
            for n_rows, share in self.state.evaluated:
                self._context.recorder.evaluated(n_rows, share)
        return result

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got; the session itself keeps the hidden states that the head reads.

        Raises:
            DrafterRestsError: The head accepts far less than its card promises, as the wrong target would cause.
        """
        self._ids.extend(verification.token_ids)
        if self._first is None:
            return
        self._tally.n_drafts += 1
        self._tally.n_right += self._first == verification.token_ids[0]
        self._first, self._tally.why = None, self.state.judge(self._tally.n_drafts, self._tally.n_right) or ""
        if self._tally.why:
            self.state.rest()
            raise DrafterRestsError(self._tally.why)

    @property
    def followed_s(self) -> float:
        """Seconds that the head has read the text, drafts not included."""
        return self.state.read_s - self._begun_s

    def idle(self) -> None:
        """Stop reading the text; see edgedec.drafter_traits.Following."""
        self.state.rest()

    def summary(self) -> str:
        """Return the head's name, its bytes and the time that it took to read the text, for a person."""
        return f"{self.state.summary}, which took {1000 * self.followed_s:.1f} ms to read the text,"

    def memory_bytes(self) -> int:
        """Return the bytes of the text's tokens and of a row of logits; the head has terms in the memory plan."""
        return 16 * len(self._ids) + self._allowed.n_bytes


class HeadFactory:
    """Makes the drafters of a head that was loaded with the target, and sheds the head for all sessions.

    Attributes:
        state: The head's state in one of the sessions.
        shedding: The head's weights, and what it knows of the texts of all sessions.
    """

    shedding = Shedding(70, "the draft head", returns=False)
    begin_prompt = staticmethod(HeadDrafter.begin_prompt)

    def __init__(self, state: HeadState) -> None:
        self.state = state

    def __call__(self, context: DraftContext) -> HeadDrafter:
        """Make the drafter of one generation (raises what HeadDrafter raises)."""
        return HeadDrafter(context)

    def memory_bytes(self) -> int:
        """Return the bytes of the head; 0 once it is shed."""
        return 0 if self.state.gone else self.state.held_bytes

    def shed(self) -> None:
        """Free the head."""
        self.state.let_go()


class _Allowed:
    """What a grammar allows of the head's scores, as levels and laws over the target's vocabulary.

    Attributes:
        levels: Makes levels and laws. Its rows have the head's own tokens; those of the whole vocabulary where a
            grammar, a bias or a penalty is asked for.
    """

    def __init__(self, context: DraftContext, state: HeadState) -> None:
        self._constraint, sampling = context.constraint, context.sampling
        self._n_vocab, self._token_ids, self._ops = context.target.model.card.n_vocab, state.token_ids, state.ops
        self._spreads = self._constraint is not None or bool(sampling.logit_bias) or sampling.has_penalties
        self._order = np.argsort(self._token_ids)
        listed = None if self._spreads else self._token_ids[self._order].astype(np.int64)
        self.levels = LevelMaker(context, self._n_vocab, _DRAWS, listed)
        self._row: Scores = np.empty(0, np.float32)

    @property
    def n_bytes(self) -> int:
        """Bytes of a row of logits, where one was needed."""
        return self._row.nbytes

    def allows(self, path: Sequence[int], level: Level) -> bool:
        """Tell whether the grammar allows the chain's token of a level behind a path."""
        return self._constraint is None or not level.tokens or self._constraint.allows(path, level.tokens[0])

    def level(self, scores: Scores, text: Sequence[int], n_ids: int) -> Level | None:
        """Return the level behind a text by the head's scores; None where the grammar allows no token of the head.

        Where the best token is allowed, the mask is not needed, which takes longer to make than a drafted token.
        """
        row, path = self._spread(scores), text[n_ids:]
        if self._constraint is None or not self.levels.draws:
            level = self.levels.level(Forward(row[None], ops=self._ops), 0, text)
            if self.allows(path, level):
                return level
        masked = self._masked(row, path)
        return None if masked is None else self.levels.level(masked, 0, text)

    def law(self, scores: Scores, text: Sequence[int], n_ids: int) -> Distribution | None:
        """Return q behind a text by the head's scores; None where the grammar allows no token of the head."""
        masked = self._masked(self._spread(scores), text[n_ids:])
        return None if masked is None else self.levels.law(masked, 0, text)

    def _spread(self, scores: Scores) -> Scores:
        """Return the head's scores as a row of logits of the tokens that `levels` has, valid until the next call."""
        if not self._spreads:
            return scores[self._order]
        if not len(self._row):
            self._row = np.full(self._n_vocab, _IMPOSSIBLE, np.float32)
        self._row[self._token_ids] = scores
        return self._row

    def _masked(self, row: Scores, path: Sequence[int]) -> Forward | None:
        """Return the scores of the tokens that the grammar allows behind a path, as a row of logits; None for none."""
        try:
            masked = row if self._constraint is None else self._constraint.masked(row, path)
        except RequestError:  # a dead end or a limit, at a place that the text may never reach
            return None
        if masked.max() <= _IMPOSSIBLE:
            return None
        np.maximum(masked, _IMPOSSIBLE, out=masked)
        return Forward(masked[None], ops=self._ops)


def _levels_of(chain: DraftedChain) -> Iterator[Level]:
    for token, p, second, second_p, sure in zip(
        chain.tokens, chain.p, chain.second_tokens, chain.second_p, chain.sure, strict=True
    ):
        left = (1 - sure) / max(1 - p, 1e-9)  # what the head is not sure of falls to the other tokens
        yield Level([token, second], [sure, left * second_p]) if second >= 0 else Level([token], [sure])


def _traits(state: HeadState, context: DraftContext) -> DrafterTraits:
    traits, whole_s = DrafterTraits(DraftCost.CALLS, Draws.SHAPES, follows=True), context.curve.seconds(1)
    if state.reach:
        traits = replace(traits, rate=sum(state.reach) / (1 + sum(state.reach[:-1])))
    if whole_s is not None:
        price = state.price.times(whole_s)
        traits = replace(traits, level_s=price.level, once_s=price.once)
    return traits
