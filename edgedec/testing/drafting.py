"""Generations with a drafter under test, whose proposals are noted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import cycle
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.decoding.step import Decoder, step
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds, Floor, Store
from edgedec.model import Model, Session
from edgedec.sampling import Noise, SamplingParams
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.sequence import Request, TextState
from edgedec.testing.results import NotApplicableError, require

SEED = 11
GREEDY = SamplingParams(temperature=0, seed=SEED)
_TEXT = "the cat sat on the mat, the dog sat on the log, the cat sat on the "


@dataclass(frozen=True, slots=True)
class Proposal:
    """One call of propose(): the most nodes allowed, the draft, and the seconds by which it missed its deadline."""

    n_max: int
    draft: Draft
    late_s: float


@dataclass(slots=True)
class Recorder:
    """A drafter that passes every call on to another one and notes the proposals.

    Attributes:
        drafter: The drafter that the calls are passed on to.
        patience_s: The time given to each propose(); None for the time that the decoder gives.
    """

    drafter: Drafter
    patience_s: float | None = None
    proposals: list[Proposal] = field(default_factory=list)

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter needs of the target."""
        return self.drafter.needs

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.drafter.begin(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose, and note it."""
        if self.patience_s is not None:
            deadline_s = monotonic() + self.patience_s
        draft = self.drafter.propose(n_max, deadline_s)
        self.proposals.append(Proposal(n_max, draft, monotonic() - deadline_s))
        return draft

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome of a step."""
        self.drafter.learn(verification, hidden)

    def memory_bytes(self) -> int:
        """Return the memory that the drafter holds."""
        return self.drafter.memory_bytes()


class HeldSessions:
    """The sessions that a check opened, which are closed after it."""

    def __init__(self) -> None:
        self._held = ExitStack()

    def adopt(self, session: Session) -> Session:
        """Return a session that is closed when the check is over."""
        return self._held.enter_context(closing(session))

    def close_sessions(self) -> None:
        """Close every session adopted so far."""
        self._held.close()


class DrafterSubject(HeldSessions):
    """The drafter under test, and the model it drafts for; a check generates `n_tokens` tokens."""

    def __init__(self, factory: DrafterFactory, load: Callable[[], Model], n_tokens: int, budget_bytes: int) -> None:
        self.factory = factory
        self.n_tokens = n_tokens
        self.budget_bytes = budget_bytes
        self.model = load()
        super().__init__()

    def clean_up(self, *, failed: bool) -> None:
        """Close the check's sessions."""
        self.close_sessions()

    def close(self) -> None:
        """Close the model."""
        self.close_sessions()
        self.model.close()

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """Yield three prompts: a text that repeats itself, random tokens, and a single token."""
        n_vocab = self.model.card.n_vocab
        ids = np.random.default_rng(SEED).integers(0, n_vocab, 20).tolist()
        yield tuple(self.model.tokenizer.encode(_TEXT))
        yield tuple(ids)
        yield (ids[0],)

    def n_draft_most(self) -> int:
        """Return the most nodes of a draft whose rows have a plain step's bits; for longer ones no text is promised."""
        claim, max_rows = self.model.batch_invariant, self.model.capabilities.max_rows
        most = min(8, max_rows - 1, max_rows if claim is True else claim - 1)
        if most < 1:
            raise NotApplicableError(f"batch_invariant is {claim} and max_rows is {max_rows}, so no draft is exact")
        return most

    def open(self, params: SamplingParams = GREEDY, store: Store | None = None) -> tuple[Drafter, Session]:
        """Return a new drafter on `store` (None: a new one) and its session; skip where the model lacks its needs."""
        session = self.adopt(self.model.session(max(map(len, self.prompts())) + self.n_tokens + 1))
        store = Store(self.budget_bytes) if store is None else store
        drafter = self.factory(DraftContext(session, params, Noise(SEED), store))
        for capability, needed in (("taps", drafter.needs.taps), ("layers", drafter.needs.layers)):
            if needed and not getattr(self.model.capabilities, capability):
                raise NotApplicableError(f"the drafter needs {capability!r}, which the model does not declare")
        return drafter, session

    def generate(
        self,
        prompt: tuple[int, ...],
        session: Session,
        drafter: Drafter | None,
        params: SamplingParams = GREEDY,
        lengths: Sequence[int] = (4,),
    ) -> list[int]:
        """Return the generated tokens; `lengths` are the most nodes of the drafts, step by step and over again.

        Raises:
            ConformanceError: The drafter failed, and decoding went on without it.
        """
        sequence = TextState(Request(prompt, params, SEED), list(prompt))
        policy = None
        if drafter is not None:
            drafter.begin(prompt)
            can = session.model.capabilities
            trees = can.trees and can.exact_trees  # other trees change bits, and with them the text
            options = PolicyOptions(max(lengths), always=True, trees=trees)
            active = ActiveDrafter("drafter", drafter, DrafterRecord(), greedy=params.greedy)
            policy = Policy([active], session.model.card.n_vocab, CostCurve(), options, Floor())
        decoder = Decoder(session, Noise(SEED), CostCurve(), policy)
        for n_max in cycle(lengths):
            if sequence.n_generated >= self.n_tokens:
                break
            decoder.forward_rows = 1 + n_max
            step(sequence, decoder)
            require(policy is None or bool(policy.drafters.all), "; ".join(sequence.stats.reasons))
        return sequence.token_ids[len(prompt) :][: self.n_tokens]
