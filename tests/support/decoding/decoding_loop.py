"""Many short generations with drafts, and how often each text should come: the whole loop against plain sampling."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import erfc, exp, lgamma, log, sqrt

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.decoding.generate import TokenStream
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, LoadedDraftModel, ModelFactory
from edgedec.model import Session
from edgedec.sampling import Distribution, SamplingParams, distribution
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Request
from edgedec_methods.drawn.rules import Drawing
from support.decoding.stub_drafter import StubDrafter

Text = tuple[int, ...]
Propose = Callable[["Plugin", int], Draft]

_NEVER = 1e-7  # a token less probable than this is taken for ruled out
_LEAST = 5.0  # texts expected in a cell, at least, so that the statistic is distributed as chi-square


def exact(session: Session, prompt: Text, params: SamplingParams, n_tokens: int) -> dict[Text, float]:
    """Return the probability of every text of that length, from plain forwards of every prefix."""
    found: dict[Text, float] = {(): 1.0}
    for _ in range(n_tokens):
        longer: dict[Text, float] = {}
        for text, above in found.items():
            tokens = np.array([*prompt, *text], np.int32)
            law = distribution(session.forward(tokens, n_past=0).logits[0], params, tokens.tolist())
            for token, p in zip(law.token_ids.tolist(), law.probs.tolist(), strict=True):
                if p > _NEVER:
                    longer[*text, token] = above * p
        found = longer
    return found


@dataclass(slots=True)
class Sample:
    """What many generations led to.

    Attributes:
        texts: How often each text came.
        n_drafted, n_accepted: Nodes that were verified, and those that stood.
    """

    texts: Counter[Text] = field(default_factory=Counter)
    n_drafted: int = 0
    n_accepted: int = 0


def generated(
    session: Session,
    prompt: Text,
    params: SamplingParams,
    rule: str,
    drafters: Mapping[str, DrafterFactory],
    *,
    n_tokens: int,
    seeds: Iterable[int],
    n_draft: int = 8,
    curve: CostCurve | None = None,
    records: Mapping[str, DrafterRecord] | None = None,
    tree: str | None = None,
) -> Sample:
    """Generate once a seed and count the first `n_tokens` tokens.

    A text may grow by three tokens more, so that drafts have room: of at most `n_draft` nodes. The drafters are pinned;
    where a curve is given, the policy decides by it.
    """
    drafting = Drafting(drafters, n_draft, always=curve is None, records=dict(records or {}), tree=tree)
    target = SessionSlot(session, curve=curve or CostCurve(), drafting=drafting)
    params = replace(params, max_tokens=n_tokens + 3, ignore_end=True)
    sample = Sample()
    for seed in seeds:
        stream = TokenStream(SessionPool([target]), Request(prompt, params, seed, rule=rule))
        text = tuple(next(stream).token_id for _ in range(n_tokens))
        stream.close()
        stats = stream.generation.stats
        assert not any(counts["failed"] for counts in stats.drafters.values()), stats.reasons
        sample.texts[text] += 1
        sample.n_drafted += stats.n_draft_tokens
        sample.n_accepted += stats.n_accepted_tokens
    return sample


def p_value(counts: Mapping[Text, int], law: Mapping[Text, float]) -> float:
    """Return how probable counts at least as odd are under the law: Pearson's chi-square, rare texts put together."""
    n = sum(counts.values())
    if not set(counts) <= set(law):
        return 0.0  # a text that the target rules out
    cells: list[tuple[int, float]] = []  # found, expected
    found, expected = 0, 0.0
    for text in sorted(law, key=lambda text: -law[text]):
        found, expected = found + counts.get(text, 0), expected + n * law[text]
        if expected >= _LEAST:
            cells.append((found, expected))
            found, expected = 0, 0.0
    last = cells.pop()
    cells.append((last[0] + found, last[1] + expected))
    return survival(sum((found - expected) ** 2 / expected for found, expected in cells), len(cells) - 1)


def survival(chi_square: float, freedom: int) -> float:
    """Return P(a chi-square variable of that many degrees of freedom is larger).

    By the recurrence of the incomplete gamma function, Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1).
    """
    if chi_square <= 0:
        return 1.0
    x = chi_square / 2
    a, total = (0.5, erfc(sqrt(x))) if freedom % 2 else (1.0, exp(-x))
    while a < freedom / 2:
        total += exp(a * log(x) - x - lgamma(a + 1))
        a += 1
    return total


@dataclass(slots=True)
class Hotter:
    """A ModelFactory whose drafters draw at another temperature than the target, and so often something else."""

    factory: ModelFactory
    temperature: float = 2.5

    def __call__(self, context: DraftContext) -> Drafter:
        """Make the drafter of one generation."""
        params, drawing = replace(context.sampling, temperature=self.temperature), context.drawing
        if isinstance(drawing, Drawing) and drawing.params is not None:
            drawing = replace(drawing, params=replace(drawing.params, temperature=self.temperature))
        return self.factory(replace(context, sampling=params, drawing=drawing))

    @property
    def source(self) -> LoadedDraftModel:
        """The model."""
        return self.factory.source

    def forget(self) -> None:
        """Drop what is kept."""
        self.factory.forget()

    def close(self) -> None:
        """Free the model."""
        self.factory.close()


class Plugin(StubDrafter):
    """A drafter that draws from laws of its own, which have nothing to do with the target's, and tells them.

    Attributes:
        rng: Its numbers, new ones for every token drawn.
        text: The sequence so far.
    """

    def __init__(self, context: DraftContext, token_ids: Sequence[int], propose: Propose) -> None:
        self.rng = np.random.default_rng(context.noise.seed + 1_000_003)
        self.text: list[int] = []
        self._token_ids = np.array(sorted(token_ids), np.int64)
        self._propose = propose

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.text = list(token_ids)

    def law(self, drafted: Sequence[int]) -> Distribution:
        """Return q after some drafted tokens: a function of the text alone, a new object every time."""
        last = [*self.text, *drafted][-2:]
        probs = np.random.default_rng(last).dirichlet(np.full(len(self._token_ids), 0.8))
        return Distribution(self._token_ids, probs)

    def draw(self, law: Distribution) -> int:
        """Draw a token."""
        return int(self.rng.choice(law.token_ids, p=law.probs))

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose."""
        return self._propose(self, n_max)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self.text.extend(verification.token_ids)


def plugin(token_ids: Sequence[int], propose: Propose) -> DrafterFactory:
    """Return the factory of a drafter of these tokens."""

    def make(context: DraftContext) -> Drafter:
        return Plugin(context, token_ids, propose)

    return make


def two_paths(drafter: Plugin, n_max: int) -> Draft:
    """Draw two independent chains side by side, one where there is room for one node."""
    depth = max(1, min(2, n_max // 2))
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[Distribution] = []
    for path in range(min(2, n_max)):
        for _ in range(depth):
            laws.append(drafter.law(tokens[path * depth :]))
            parents.append(-1 if len(tokens) % depth == 0 else len(tokens) - 1)
            tokens.append(drafter.draw(laws[-1]))
    return replace(Draft.tree(tokens, parents, [0.5] * len(tokens)), q=tuple(laws))


def likely_alone(drafter: Plugin, n_max: int) -> Draft:
    """Draw a token, and propose it only if it is a likely one: no drafter may, and a test has to find it out."""
    ids = drafter.law(()).token_ids
    law = Distribution(ids, np.array([0.5] + [0.5 / (len(ids) - 1)] * (len(ids) - 1)))
    token = drafter.draw(law)
    if token != ids[0]:
        return Draft.chain([])
    return replace(Draft.chain([token], 0.5), q=(law,))
