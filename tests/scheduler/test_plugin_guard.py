"""A drafter of somebody else's: late, failing or talking nonsense, it costs a count and a reason, never the text."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from time import monotonic
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.simulation import GREEDY, a_text, decode, fake_session

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec.draft import Draft, Draws, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds, DraftLateError
from edgedec.drafter_traits import Demands, DraftCost, DrafterTraits
from edgedec.errors import CancelledError, EdgedecError, PluginError, RequestError
from edgedec.load_plan import LoadPlan
from edgedec.model import Session
from edgedec.sampling import Noise
from edgedec.scheduler.active_drafters import ActiveDrafter, close_drafter
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.drafter_set import Drafting, begin_prompt, open_policy
from edgedec.scheduler.plugin_guard import Guarded, GuardedFactory
from edgedec.scheduler.policy import Policy
from edgedec.sequence import Request, TextState

TEXT = a_text(60)
MODEL_TRAITS = DrafterTraits(DraftCost.MODEL, Draws.CHAINS, rate=0.5, level_s=0.25)
SECONDS = 60.0  # long enough for any machine; nothing waits for it where all goes well


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give pinned drafters, and their constructors, as long."""
    monkeypatch.setattr("edgedec.scheduler.policy.DEADLINE_S", SECONDS)
    monkeypatch.setattr("edgedec.scheduler.plugin_guard._MAKING_S", SECONDS)


def nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(slots=True)
class Foreign:
    """A drafter made of functions."""

    on_propose: Callable[[int], Any] = lambda n: Draft.chain([1])
    on_begin: Callable[[Any], object] = nothing
    on_learn: Callable[[Any, Any], object] = nothing
    needs: Any = field(default_factory=DrafterNeeds)
    held: Any = 0

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.on_begin(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose."""
        return cast(Draft, self.on_propose(n_max))

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome."""
        self.on_learn(verification, hidden)

    def memory_bytes(self) -> int:
        """Return what it was told to."""
        return cast(int, self.held)


def generated(drafter: Foreign) -> tuple[list[int], dict[str, float], list[str]]:
    """Generate with a pinned drafter; return the text, the drafter's counts and the reasons."""
    policy, sequence = opened_with(lambda context: drafter)
    assert policy is not None
    run = decode(policy, TEXT, CostCurve(), lambda n: 1.0, stats=sequence.stats)
    return run.token_ids, run.stats.drafters.get("foreign", {}), run.stats.reasons


def running(drafter: Foreign) -> Guarded:
    """Return a drafter in a thread of its own."""
    return Guarded(lambda: cast(Drafter, drafter))


def fail(*_: object) -> None:
    """Raise."""
    raise ValueError("no luck")


def leave(*_: object) -> None:
    """Try to end the application."""
    sys.exit(3)


class Unprintable(Exception):
    """An error whose message is an error."""

    def __str__(self) -> str:
        raise RuntimeError


def fail_unprintably(*_: object) -> None:
    """Raise what can't be shown."""
    raise Unprintable


ONE, ROOT, P = (1,), (-1,), (0.5,)
NONSENSE: dict[str, Any] = {
    "none": None,
    "a list": [1, 2],
    "a vocabulary too large": Draft.chain([1, 1000]),
    "negative tokens": Draft.chain([-1]),
    "a cycle": Draft.tree([1, 2], [1, 0], [0.5, 0.5]),
    "its own parent": Draft.tree([1], [0], [0.5]),
    "a parent before the root": Draft.tree([1], [-2], [0.5]),
    "NaN": Draft.tree([1], [-1], [float("nan")]),
    "infinite": Draft.tree([1], [-1], [float("inf")]),
    "more than certain": Draft.tree([1], [-1], [1.5]),
    "an array": Draft(cast(Any, np.array(ONE)), ROOT, P),
    "numbers of numpy": Draft.chain(cast(Any, np.array(ONE))),
    "a token that is no number": Draft(cast(Any, (None,)), ROOT, P),
    "a p_accept that is no number": Draft(ONE, ROOT, cast(Any, ("0.5",))),
    "floats as tokens": Draft(cast(Any, (1.0,)), ROOT, P),
    "truth as a token": Draft((True,), ROOT, P),
    "lists": Draft(cast(Any, [1]), cast(Any, [-1]), cast(Any, [0.5])),
    "lengths that differ": Draft(ONE, (-1, 0), P),
    "masked": Draft.chain(np.ma.masked_array(ONE, [True]).tolist()),
    "q of another length": Draft(ONE, ROOT, P, (None, None, None)),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_ends_the_drafter_and_not_the_text(kind: str) -> None:
    """The first such proposal is the last; the text is whole, the reason told, the failure counted."""
    asked = []

    def propose(n_max: int) -> Any:
        asked.append(n_max)
        return NONSENSE[kind]

    text, counts, reasons = generated(Foreign(propose))
    assert text == TEXT
    assert len(asked) == 1
    assert counts["failed"] == 1
    assert len(reasons) == 1
    assert reasons[0].startswith("foreign off: the drafter failed (")


@pytest.mark.parametrize("how", [fail, leave, fail_unprintably])
@pytest.mark.parametrize("where", ["begin", "propose", "learn"])
def test_a_drafter_that_raises_ends_itself_only(where: str, how: Callable[..., None]) -> None:
    """Wherever it raises, and whatever, even what would end the process."""
    drafter = {"begin": Foreign(on_begin=how), "propose": Foreign(how), "learn": Foreign(on_learn=how)}[where]
    text, counts, reasons = generated(drafter)
    assert text == TEXT
    assert counts["failed"] == 1
    assert len(reasons) == 1


def held(gate: Event) -> Foreign:
    """Return a drafter that takes no prompt, and so comes to nothing, before a gate is opened."""
    return Foreign(lambda n: Draft.chain([n]), on_begin=lambda _: gate.wait(SECONDS))


def test_a_late_draft_is_left_out_and_the_third_in_a_row_is_the_last() -> None:
    """Steps go on plain; a draft that comes later is not taken for the one asked for then."""
    gate = Event()
    drafter = running(held(gate))
    drafter.begin([1])
    for n in (1, 2):
        with pytest.raises(DraftLateError):
            drafter.propose(n, monotonic())
    with pytest.raises(PluginError, match="3 drafts in a row came after their deadline"):
        drafter.propose(3, monotonic())
    gate.set()
    assert drafter.propose(4, monotonic() + SECONDS).tokens == (4,)
    drafter.close()


def test_misses_count_only_in_a_row() -> None:
    """One in time begins the count anew."""
    gate = Event()
    drafter = running(held(gate))
    for _ in range(3):
        gate.clear()
        drafter.begin([1])
        for _ in range(2):
            with pytest.raises(DraftLateError):
                drafter.propose(1, monotonic())
        gate.set()
        assert len(drafter.propose(1, monotonic() + SECONDS)) == 1
    drafter.close()


def test_a_drafter_that_never_answers_costs_three_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is whole; three late drafts are counted, then it is not asked again."""
    monkeypatch.setattr("edgedec.scheduler.policy.DEADLINE_S", 0.0)
    gate = Event()
    text, counts, reasons = generated(held(gate))
    gate.set()
    assert text == TEXT
    assert (counts["late"], counts["failed"]) == (3, 1)
    assert [reason.split(";")[0] for reason in reasons] == [
        "foreign: drafts came after their deadline and were left out",
        "foreign off: the drafter failed (DraftLateError: 3 drafts in a row came after their deadline",
    ]


def test_the_drafter_is_told_everything_in_order_and_gets_copies() -> None:
    """Prompt, then draft and outcome of each step; hidden states hold although the target's memory is used again."""
    told: list[Any] = []

    def propose(n_max: int) -> Draft:
        told.append(n_max)
        return Draft.chain([n_max])

    drafter = running(Foreign(propose, told.append, lambda verification, hidden: told.append((verification, hidden))))
    hidden = np.ones((1, 2), np.float32)
    drafter.begin([5, 6])
    drafter.propose(3, monotonic() + SECONDS)
    drafter.learn(Verification((), (7,)), {0: hidden})
    hidden[:] = 0
    drafter.propose(4, monotonic() + SECONDS)
    assert told[:2] == [(5, 6), 3]
    assert told[2][0].token_ids == (7,)
    assert told[2][1][0].tolist() == [[1, 1]]
    assert told[3] == 4
    drafter.close()


BAD_NEEDS: list[Any] = [
    None,
    DrafterNeeds(taps=(99,)),
    DrafterNeeds(taps=(-1,)),
    DrafterNeeds(layers=True),
    DrafterNeeds(candidates=-1),
    DrafterNeeds(candidates=cast(int, "many")),
]


def test_one_that_does_not_fit_leaves_its_memory_to_the_next() -> None:
    """The budget is that of those that draft."""
    sequence = TextState(Request((1,), GREEDY, 0), [1])

    def holding(n_bytes: int) -> DrafterFactory:
        def make(context: DraftContext) -> Drafter:
            return Foreign(held=n_bytes)

        return make

    drafting = Drafting({"a": holding(60), "b": holding(60), "c": holding(40)}, 15, False, 100)
    policy = open_policy(drafting, fake_session(), CostCurve(), sequence, Noise(0))
    assert policy is not None
    assert [reason.split(" ")[0] for reason in sequence.stats.reasons] == ["b"]


@pytest.mark.slow
def test_threads_end_with_their_generations() -> None:
    """After fifty generations, some with a drafter that fails, no thread is left."""
    before = threading.active_count()
    for i in range(50):
        generated(Foreign(on_learn=fail if i % 3 == 0 else nothing))
    join(before)


def test_a_constructor_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text begins without it, and so do the next ones, at once, until it returns; then it is called again."""
    monkeypatch.setattr("edgedec.scheduler.plugin_guard._MAKING_S", 0.05)
    before = threading.active_count()
    gate, begun, called = Event(), Event(), list[threading.Thread]()

    def make(context: DraftContext) -> Drafter:
        called.append(threading.current_thread())
        begun.set()
        gate.wait(SECONDS)
        return cast(Drafter, Foreign())

    factory = GuardedFactory(make)
    for reason in ("its constructor took over 0 s", "has not returned yet"):
        policy, sequence = opened_with(factory, guard=False)
        assert policy is None
        assert reason in sequence.stats.reasons[0]
        assert begun.wait(SECONDS)
    assert len(called) == 1
    gate.set()
    join(before)
    monkeypatch.setattr("edgedec.scheduler.plugin_guard._MAKING_S", SECONDS)
    policy, _ = opened_with(factory, guard=False)
    assert policy is not None
    assert policy.drafters.needs == DrafterNeeds()
    policy.close()
    assert len(called) == 2
    assert threading.current_thread() not in called
    join(before)


def opened_with(factory: Any, *, guard: bool = True, budget: int | None = None) -> tuple[Policy | None, TextState]:
    """Open a policy with a drafter of that factory, as a generation does."""
    sequence = TextState(Request((1, 2, 3), GREEDY, 0), [1, 2, 3])
    drafting = Drafting({"foreign": GuardedFactory(factory) if guard else factory}, 15, True, budget)
    return open_policy(drafting, fake_session(taps=True), CostCurve(), sequence, Noise(0)), sequence


def join(n_before: int) -> None:
    """Wait until no more threads than that are left."""
    for thread in threading.enumerate():
        if thread.name == "edgedec-drafter":
            thread.join(SECONDS)
    assert threading.active_count() <= n_before


@dataclass(slots=True)
class Declared(Foreign):
    """A drafter that declares what it costs."""

    traits: Any = MODEL_TRAITS


def broken(what: str) -> Callable[[DraftContext], object]:
    """Return what makes a drafter that fails when it is asked what it needs or holds."""
    members = {"needs": DrafterNeeds(), "memory_bytes": nothing, what: property(fail)}
    return lambda context: type("Broken", (), members)()


FAILED = "foreign off: the drafter failed (ValueError: no luck)"
NO_TRAITS = "its traits are str; they must be edgedec.drafter_traits.DrafterTraits"
NOT_FOLLOWING = "it must have what edgedec.drafter_traits.Following says"


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        *((lambda context, needs=needs: Foreign(needs=needs), "") for needs in BAD_NEEDS),
        *((lambda context, held=held: Foreign(held=held), "") for held in (101, "much", None)),
        (fail, FAILED),
        *((how, "") for how in (leave, fail_unprintably)),
        *((broken(what), FAILED) for what in ("needs", "memory_bytes")),
        (lambda context: Declared(traits="none"), NO_TRAITS),
        (lambda context: Declared(traits=DrafterTraits(follows=True)), NOT_FOLLOWING),
    ],
)
def test_what_can_not_draft_is_refused_at_the_beginning(factory: Any, words: str) -> None:
    """Not by a forward in the middle of a text, whatever it raises, even what would end the process; its thread ends.

    It needs what no step could meet, holds more than the budget of 100 bytes, or no number, or declares wrong traits.
    """
    before = threading.active_count()
    policy, sequence = opened_with(factory, budget=100)
    assert policy is None
    (reason,) = sequence.stats.reasons
    assert reason == words if words == FAILED else words in reason
    assert sequence.stats.drafters["foreign"]["failed"] == 1
    join(before)


def test_what_a_drafter_of_another_package_declares_counts() -> None:
    """Its cost, and what it is expected to bring and to take; one that declares nothing looks tokens up."""
    for drafter, cost, rate, price in [
        (Declared(), DraftCost.MODEL, 0.5, DraftPrice(0.25)),
        (Foreign(), DraftCost.NOTHING, 0.7, None),
    ]:
        policy, _ = opened_with(lambda context, drafter=drafter: drafter)
        assert policy is not None
        (active,) = policy.drafters.all
        assert (active.cost, active.record.price) == (cost, price)
        assert active.record.rate(True) == pytest.approx(rate)
        policy.close()


@dataclass(slots=True)
class Reading(Declared):
    """A drafter that reads texts along, and notes that it was told to leave one alone."""

    traits: Any = field(default_factory=lambda: DrafterTraits(DraftCost.CALLS, follows=True))
    followed_s: float = 0.0
    idled: Event = field(default_factory=Event)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome, and read its tokens."""
        self.followed_s += 0.25 * len(verification.token_ids)

    def idle(self) -> None:
        """Note that it is told to read no more."""
        self.idled.set()


def test_a_drafter_of_another_package_may_follow_texts() -> None:
    """What reading takes counts as lost while drafts do not pay; once that lost its share, it leaves texts alone."""
    records: dict[str, DrafterRecord] = {}

    def following(reading: Reading) -> ActiveDrafter:
        drafting = Drafting({"foreign": GuardedFactory(lambda context: reading)}, 15, records=records)
        sequence = TextState(Request((1, 2, 3), GREEDY, 0), [1, 2, 3])
        policy = open_policy(drafting, fake_session(), CostCurve(), sequence, Noise(0))
        assert policy is not None
        (active,) = policy.drafters.all
        return active

    first = following(Reading())
    assert not first.idles  # nothing is known of it yet
    first.drafter.learn(Verification((), (7, 8)), {})
    assert len(first.drafter.propose(1, monotonic() + SECONDS)) == 1  # and so the step before was taken
    for _ in range(20):
        first.worth.note(0.0, 0.002, is_trial=True)
    first.is_due(0.01, 1)
    first.count_following(10)
    assert first.record.trials.lost_s == 0.5
    second = following(reading := Reading())
    assert second.idles
    assert reading.idled.wait(SECONDS)
    for active in (first, second):
        close_drafter(active.drafter)


@pytest.mark.parametrize("error", [CancelledError("stopped"), RequestError("no text"), ZeroDivisionError("none")])
def test_what_opening_raises_is_told_as_it_is(error: Exception) -> None:
    """A cancel ends the load, and an error of ours says why; only a fault is a plug-in's error."""
    factory = GuardedFactory(cast(DrafterFactory, Mock(opened=Mock(side_effect=error), demands=Demands())))
    with pytest.raises(type(error) if isinstance(error, EdgedecError) else PluginError, match=str(error)):
        factory.opened(fake_session(), cast(LoadPlan, None))


@dataclass(slots=True)
class Told:
    """A factory that is told of prompts that several texts have in common."""

    told: list[bool] = field(default_factory=list)
    waits: Event | None = None

    def begin_prompt(self, session: Session, *, follows: bool) -> None:
        """Note what it is told."""
        if self.waits is not None:
            self.waits.wait(SECONDS)
        self.told.append(follows)

    def __call__(self, context: DraftContext) -> Drafter:
        """Make a drafter."""
        return Reading()


def test_a_factory_of_another_package_is_told_of_a_shared_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows the prompt unless drafts did not pay; it is not told after it was switched off, nor waited for."""
    factory, record = Told(), DrafterRecord()
    drafting = Drafting({"foreign": GuardedFactory(factory)}, 15, records={"foreign": record})
    begin_prompt(drafting, fake_session(), greedy=True)
    for _ in range(20):
        record.worth[True].note(0.0, 0.002, is_trial=True)
    record.worth[True].paid = False
    record.trials.lost_s = 1.0
    begin_prompt(drafting, fake_session(), greedy=True)
    assert factory.told == [True, False]
    drafting.switch_off("foreign", "foreign off")
    begin_prompt(drafting, fake_session(), greedy=True)
    assert factory.told == [True, False]
    monkeypatch.setattr("edgedec.scheduler.plugin_guard._MAKING_S", 0.05)
    waiting = Told(waits=Event())
    begin_prompt(Drafting({"foreign": GuardedFactory(waiting)}, 15), fake_session(), greedy=True)
    assert waiting.told == []
    assert waiting.waits is not None
    waiting.waits.set()
