"""Simulated generations without a model: a known text, a fake clock, and a table of what forwards cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, Floor, ProposalLog, Store
from edgedec.drafter_traits import DraftCost
from edgedec.model import Session
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.stats import DecodeStats
from edgedec.verification.coupled import verify_coupled
from support.decoding.stub_drafter import StubDrafter

N_VOCAB = 1000
N_MAX = 15
WINDOW = 512  # tokens that a costly drafter reads at most
GREEDY = SamplingParams(temperature=0)


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time, as perf_counter and monotonic do."""
        return self.now


def fake_session(*, trees: bool = True, n_vocab: int = N_VOCAB, taps: bool = False) -> Session:
    """Return a stand-in for a session, with the attributes that policies and drafters use."""
    card = SimpleNamespace(n_vocab=n_vocab, n_layer=4, runtime="fake")
    model = SimpleNamespace(card=card, capabilities=Capabilities(trees=trees, taps=taps), tokenizer=None)
    return cast(Session, SimpleNamespace(model=model, n_ctx=4096))


def context(store: Store | None = None) -> DraftContext:
    """Return what a drafter is opened with."""
    return DraftContext(fake_session(), GREEDY, Noise(0), Store() if store is None else store)


@dataclass(slots=True)
class Oracle(StubDrafter):
    """A drafter that knows the text and gets each token right with probability `p`; it says `says`.

    Attributes:
        text: Prompt and what will follow.
        level_s: What each token of a draft takes, on `clock`.
        depth: Most tokens of a draft.
        floor: Where it looks up how probable a path must be to go on.
        n_asked: How often it was asked.
    """

    text: Sequence[int]
    p: float
    says: float | None = None
    clock: Clock = field(default_factory=Clock)
    level_s: float = 0.0
    depth: int = N_MAX
    floor: Floor = field(default_factory=Floor)
    n_asked: int = 0
    position: int = 0
    read: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.position = len(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return the coming tokens, some of them wrong; reading what came since takes a tenth of a level a token."""
        self.n_asked += 1
        n = min(n_max, self.depth, len(self.text) - self.position)
        says = self.p if self.says is None else self.says
        while n > 1 and says ** (n - 1) < self.floor.path_probability:
            n -= 1
        self.clock.now += (n + 0.1 * min(WINDOW, self.position - self.read)) * self.level_s
        self.read = self.position
        right = (self.rng.random(n) < self.p).cumprod()
        tokens = [(self.text[self.position + i] + 1 - int(right[i])) % N_VOCAB for i in range(n)]
        return Draft.chain(tokens, says)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Go on in the text."""
        self.position += len(verification.token_ids)


@dataclass(slots=True)
class Run:
    """What a simulated generation did: its tokens, its seconds, and the nodes verified in each step."""

    token_ids: list[int]
    seconds: float
    drafted: list[int]
    stats: DecodeStats

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.token_ids) / self.seconds


def policy_of(
    members: Sequence[ActiveDrafter],
    curve: CostCurve,
    *,
    trees: bool = True,
    always: bool = False,
    coupled: bool = True,
    recorder: ProposalLog | None = None,
    n_max: int = N_MAX,
    n_vocab: int = N_VOCAB,
) -> Policy:
    """Return a policy over so many tokens."""
    floor = next((one.drafter.floor for one in members if isinstance(one.drafter, Oracle)), Floor())
    options = PolicyOptions(n_max, always=always, coupled=coupled, trees=trees)
    return Policy(members, n_vocab, curve, options, floor, recorder)


def member(
    drafter: Oracle, *, costly: bool = False, record: DrafterRecord | None = None, greedy: bool = True
) -> ActiveDrafter:
    """Return an oracle as a policy's member."""
    cost = DraftCost.MODEL if costly else DraftCost.NOTHING
    return ActiveDrafter("oracle", drafter, record or DrafterRecord(), cost, greedy)


def decode(
    policy: Policy,
    text: Sequence[int],
    curve: CostCurve,
    seconds: Callable[[int], float],
    clock: Clock | None = None,
    *,
    observe: bool = True,
    stats: DecodeStats | None = None,
    n_before: int = 0,
) -> Run:
    """Decode a known text to its end, behind a prompt, under a policy; a forward over n rows takes `seconds(n)`."""
    clock, stats = clock or Clock(), stats or DecodeStats()
    begun, token_ids = clock.now, list[int]()
    drafted: list[int] = []
    while len(token_ids) < len(text):
        draft = policy.propose(stats, n_before + len(token_ids), len(text) - len(token_ids) - 1)
        spent = seconds(1 + len(draft))
        clock.now += spent
        if observe:
            curve.observe(1 + len(draft), spent, n_before + len(token_ids))
        start = len(token_ids)
        verification = verify_coupled(draft, lambda row, accepted, start=start: text[start + len(accepted)])  # type: ignore[misc]
        token_ids.extend(verification.token_ids)
        drafted.append(len(draft))
        policy.learn(stats, draft, verification, {})
    policy.close()
    return Run(token_ids, clock.now - begun, drafted, stats)


def best_fixed(p: float, seconds: Callable[[int], float], level_s: float = 0.0) -> float:
    """Return the tokens per second of the best draft length, or of none, where every token is right with `p`."""
    rates = [sum(p**i for i in range(n + 1)) / (seconds(n + 1) + n * level_s) for n in range(N_MAX + 1)]
    return max(rates)


def a_text(n: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(0, N_VOCAB, n).tolist()
    return found
