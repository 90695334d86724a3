"""Generations with a drafter under test, step by step and recorded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgedec.conformance.results import NotApplicableError, require
from edgedec.cost_curve import CostCurve
from edgedec.decoding.step import Decoder, step
from edgedec.draft import Draft, DraftContext, Drafter, DrafterFactory, DrafterNeeds, Floor, Verification
from edgedec.model import Model, Session
from edgedec.noise import Noise
from edgedec.sampling import SamplingParams
from edgedec.scheduler.drafter_record import ActiveDrafter, DrafterRecord
from edgedec.scheduler.node_choice import PolicyOptions
from edgedec.scheduler.policy import Policy
from edgedec.sequence import Request
from edgedec.sequence import Sequence as TokenSequence

SEED = 11
GREEDY = SamplingParams(temperature=0, seed=SEED)
_TEXT = "the cat sat on the mat, the dog sat on the log, the cat sat on the "


@dataclass(frozen=True, slots=True)
class Proposal:
    """One call of draft(): what was asked for, what came back, and how far beyond the deadline it came."""

    n_max: int
    draft: Draft
    late_s: float


@dataclass(slots=True)
class Recorder:
    """A drafter that passes everything on and notes the proposals.

    Attributes:
        patience_s: Where set, the time given to each draft() instead of what the decoder gives.
    """

    drafter: Drafter
    patience_s: float | None = None
    proposals: list[Proposal] = field(default_factory=list)
    n_accepts: int = 0

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter asks of the target."""
        return self.drafter.needs

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.drafter.begin(token_ids)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Propose, and note it."""
        if self.patience_s is not None:
            deadline_s = monotonic() + self.patience_s
        draft = self.drafter.draft(n_max, deadline_s)
        self.proposals.append(Proposal(n_max, draft, monotonic() - deadline_s))
        return draft

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome of a step."""
        self.drafter.accept(verification, hidden)
        self.n_accepts += 1

    def memory_bytes(self) -> int:
        """Return the memory it holds."""
        return self.drafter.memory_bytes()


class DrafterSubject:
    """The drafter under test, and the model it drafts for.

    Args:
        factory: Makes the drafter.
        load: Loads the model.
        n_tokens: How many tokens a check generates.
        budget_bytes: What the drafter may hold.
    """

    def __init__(self, factory: DrafterFactory, load: Callable[[], Model], n_tokens: int, budget_bytes: int) -> None:
        self.factory = factory
        self.n_tokens = n_tokens
        self.budget_bytes = budget_bytes
        self.model = load()
        self._sessions: list[Session] = []

    def clean_up(self, *, failed: bool) -> None:
        """Close the check's sessions."""
        self.close_sessions()

    def close_sessions(self) -> None:
        """Close every session opened so far."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    def close(self) -> None:
        """Close the model."""
        self.close_sessions()
        self.model.close()

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """Yield a text that repeats itself, random tokens, and a single token."""
        n_vocab = self.model.card.n_vocab
        ids = np.random.default_rng(SEED).integers(0, n_vocab, 20).tolist()
        yield tuple(self.model.tokenizer.encode(_TEXT))
        yield tuple(ids)
        yield (ids[0],)

    def n_draft_most(self) -> int:
        """Return the longest draft whose rows still have a plain step's bits; only then is the text promised."""
        claim, max_rows = self.model.batch_invariant, self.model.capabilities.max_rows
        most = min(8, max_rows - 1) if claim is True else min(8, max_rows - 1, claim - 1)
        if most < 1:
            raise NotApplicableError(f"the model's batch_invariant is {claim}, max_rows {max_rows}: no exact drafts")
        return most

    def open(self, params: SamplingParams = GREEDY, session: Session | None = None) -> tuple[Drafter, Session]:
        """Make a drafter on a session (its own where none is given); skip where the model lacks what it needs."""
        if session is None:
            longest = max(len(prompt) for prompt in self.prompts())
            session = self.model.session(longest + self.n_tokens + 1)
            self._sessions.append(session)
        noise = Noise(SEED)
        drafter = self.factory(DraftContext(session, self.model.tokenizer, params, noise, self.budget_bytes))
        for capability, needed in (("taps", bool(drafter.needs.taps)), ("layers", drafter.needs.layers)):
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
        """Return the tokens generated; the longest drafts allowed are `lengths`, step by step and over again.

        Raises:
            ConformanceError: The drafter failed, so that decoding went on without it.
        """
        sequence = TokenSequence(Request(prompt, params, SEED), list(prompt))
        policy = None
        if drafter is not None:
            drafter.begin(prompt)
            trees = session.model.capabilities.trees
            options = PolicyOptions(max(lengths), greedy=params.greedy, always=True, trees=trees)
            active = ActiveDrafter("drafter", drafter, DrafterRecord())
            policy = Policy([active], session.model.card.n_vocab, CostCurve(), options, Floor())
        decoder = Decoder(session, Noise(SEED), CostCurve(), policy)
        for n_max in cycle(lengths):
            if sequence.n_generated >= self.n_tokens:
                break
            decoder.max_rows = 1 + n_max
            step(sequence, decoder)
            require(policy is None or bool(policy.drafters.all), "; ".join(sequence.stats.reasons))
        return sequence.token_ids[len(prompt) :][: self.n_tokens]
