"""What drafting costs, per step and text, beside what it brings: drafters that lose rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.simulation import Clock, Oracle, policy_of

from edgedec.cost_curve import CostCurve, DraftPrice, SharedForward
from edgedec.draft import Draft, Verification
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.drafter_record import DrafterRecord, Followed, Worth
from edgedec.scheduler.policy import Policy
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.stats import DecodeStats

STEP_S = 0.010
TEXT = [1] * 4000


@dataclass(slots=True)
class Timed(Oracle):
    """Proposes the next token, right from `right_from` on; asking and teaching it take seconds of the clock."""

    right_from: int = 10**9
    ask_s: float = 0.0005
    teach_s: float = 0.0

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose one token."""
        self.n_asked += 1
        self.clock.now += self.ask_s
        return Draft.chain([1 if self.position >= self.right_from else 0], 0.5)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Go on in the text."""
        self.clock.now += self.teach_s
        self.position += len(verification.token_ids)


@dataclass(slots=True)
class Text:
    """One of several texts: its policy, its curve and its drafter."""

    policy: Policy
    curve: CostCurve
    drafter: Timed
    n_tokens: int = 0


def texts_of(
    n: int, clock: Clock, record: DrafterRecord, *, head: bool = False, right_from: int = 10**9, ask_s: float = 0.0005
) -> list[Text]:
    """Return n texts in one forward; it takes a tenth longer for each row more than they are."""
    common, lock, found = CostCurve({rows: STEP_S * max(1.0, 1 + (rows - n) / 10) for rows in range(1, 33)}), Lock(), []
    for _ in range(n):
        curve = JoinedCurve(common, lock)
        curve.shared = SharedForward(STEP_S, n, n)
        drafter = Timed(TEXT, 0.0, clock=clock, right_from=right_from, ask_s=ask_s)
        active = ActiveDrafter("one", drafter, record, DraftCost.CALLS if head else DraftCost.NOTHING)
        found.append(Text(policy_of([active], curve), curve, drafter))
    return found


def write(texts: list[Text], n_steps: int, clock: Clock) -> None:
    """Make steps of texts that one thread writes: all are drafted for, then one forward, then all learn."""
    stats, n = DecodeStats(), len(texts)
    for _ in range(n_steps):
        drafts = [text.policy.propose(stats, 0, 8) for text in texts]
        rows = n + sum(map(len, drafts))
        spent_s = STEP_S * max(1.0, 1 + (rows - n) / 10)
        clock.now += spent_s
        shared = SharedForward(spent_s, rows, n)
        for text, draft in zip(texts, drafts, strict=True):
            text.curve.shared = shared
            right = [token for token in draft.tokens if token == 1]
            if not text.policy.skips:
                text.curve.observe(1 + len(draft), spent_s)
            path = tuple(range(len(right)))
            text.policy.learn(stats, draft, Verification(path, (*right, 1)), {})
            text.n_tokens += 1 + len(right)


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("n", [1, 8])
def test_drafters_that_bring_nothing_take_a_hundredth_of_the_time_however_many_texts_wait(
    n: int, head: bool, clock: Clock
) -> None:
    """What one text's drafting takes, all texts wait for: so a drafter is asked the more seldom, the more they are."""
    record = DrafterRecord(price=DraftPrice(0.0005))
    texts = texts_of(n, clock, record, head=head)
    write(texts, 100, clock)  # it takes some drafts to find out
    begun, asked = clock.now, sum(text.drafter.n_asked for text in texts)
    write(texts, 2000, clock)
    seconds, n_asked = clock.now - begun, sum(text.drafter.n_asked for text in texts) - asked
    assert n_asked > 0
    assert seconds - 2000 * STEP_S <= 0.012 * seconds


def test_what_one_text_has_shown_counts_in_the_next_one(clock: Clock) -> None:
    """Short texts, one after another, don't find out anew that a drafter brings nothing."""
    record = DrafterRecord()
    for _ in range(3):
        write(texts_of(4, clock, record), 100, clock)
    begun = clock.now
    for _ in range(20):
        write(texts_of(4, clock, record), 50, clock)
    assert clock.now - begun <= 1.012 * 20 * 50 * STEP_S


def test_a_drafter_that_begins_to_pay_is_asked_before_each_step_again(clock: Clock) -> None:
    """By the first trials that bring tokens."""
    texts = texts_of(2, clock, DrafterRecord(), right_from=600)
    write(texts, 600, clock)
    assert sum(text.drafter.n_asked for text in texts) < 300
    write(texts, 400, clock)  # what the drafter says of its tokens has to be trusted again, too
    before = sum(text.drafter.n_asked for text in texts)
    write(texts, 100, clock)
    assert sum(text.drafter.n_asked for text in texts) - before >= 190
    assert all(text.n_tokens >= 1300 for text in texts)


def test_a_text_whose_drafters_rest_is_not_looked_at(clock: Clock) -> None:
    """The steps pass without a look at the drafters; the drafter learns their tokens when it is asked again."""
    (text,) = texts_of(1, clock, DrafterRecord(), ask_s=0.005)
    n_skipped = 0
    for _ in range(400):
        write([text], 1, clock)
        n_skipped += text.policy.skips
    assert n_skipped > 300
    assert text.drafter.position < 400
    n_asked = text.drafter.n_asked
    assert f"no drafter asked in {400 - n_asked}, as" in text.policy.explain()[0]
    text.policy.close()
    assert text.drafter.position == 400


def test_all_texts_of_a_forward_try_a_drafter_in_the_same_step(clock: Clock) -> None:
    """So their calls of a model are made together, and threads are there for just these steps."""
    record = DrafterRecord(price=DraftPrice(0.002))
    texts = texts_of(4, clock, record, head=True, ask_s=0.002)
    write(texts, 60, clock)
    n_together = 0
    for _ in range(2000):
        before = [text.drafter.n_asked for text in texts]
        expected = sum(text.policy.will_call for text in texts)
        write(texts, 1, clock)
        n_asked = sum(text.drafter.n_asked - n for text, n in zip(texts, before, strict=True))
        assert n_asked in (0, 4)
        assert not n_asked or expected == 4
        n_together += n_asked == 4
    assert n_together > 0


class Reader(Timed):
    """A drafter that reads each text along, asked or not."""

    followed_s = 0.030
    idled = False

    def idle(self) -> None:
        """Note that it was told to read no more."""
        self.idled = True


def test_a_drafter_that_reads_along_leaves_texts_alone_while_it_does_not_pay(clock: Clock) -> None:
    """What it reads is lost as its trials are; once they have lost their share, whole texts go without it."""
    record = DrafterRecord(price=DraftPrice(0.002))

    def opened() -> tuple[ActiveDrafter, Reader]:
        reader = Reader(TEXT, 0.5, clock=clock)
        active = ActiveDrafter("reader", reader, record, DraftCost.CALLS, following=reader)
        active.idle_if_dear(30, None)
        return active, reader

    first, _ = opened()
    assert not first.idles  # nothing is known of it yet
    worth = first.worth
    worth.price_s = 0.002
    for _ in range(20):
        worth.note(0.0, 0.002, is_trial=True)
    assert not first.is_due(STEP_S, 1) or first.tries
    first.count_following(10)
    assert record.trials.lost_s >= 0.030
    second, reader = opened()
    assert second.idles
    assert reader.idled
    assert not second.is_due(STEP_S, 1)
    assert second.wait_s(STEP_S, 1) == float("inf")
    lost_s = record.trials.lost_s
    second.count_following(10)
    assert record.trials.lost_s == lost_s
    record.trials.total_s = lost_s / 0.009  # time has passed: 1 % of it may be lost
    assert not opened()[0].idles


def test_a_long_prompt_is_left_alone_where_earlier_texts_did_not_repay_their_reading() -> None:
    """A head that pays in a chat reads no long prompt for a short answer, unless that may be lost to find out."""
    record = DrafterRecord()
    chat = Followed()
    chat.note(200, 100, 0.004, 0.010)  # 20 us for each token that is read, 100 us gained for each that comes
    assert chat.loss_s(100, None) == 0.0
    assert chat.loss_s(1000, None) == pytest.approx(1100 * 20e-6 - 100 * 100e-6)
    assert chat.loss_s(100, 20) == pytest.approx(120 * 20e-6 - 20 * 100e-6)
    loss_s = chat.loss_s(1000, None)
    assert record.goes_without(True, loss_s)
    assert not record.goes_without(True, 0.0)
    record.trials.total_s = 1.01 * loss_s / 0.01
    assert not record.goes_without(True, loss_s)


def test_nothing_is_expected_of_a_head_before_texts_have_shown_it() -> None:
    """A few tokens tell too little, and later texts count more than earlier ones."""
    followed = Followed()
    followed.note(1000, 63, 1.0, 0.0)
    assert followed.loss_s(1000, None) == 0.0
    followed.note(1000, 64, 1.0, 0.0)
    assert followed.loss_s(1000, None) > 1.0
    for _ in range(30):
        followed.note(1000, 64, 1.0, 2.0)
    assert followed.loss_s(1000, 64) == 0.0


def test_what_drafts_repaid_of_reading_is_not_lost(clock: Clock) -> None:
    """Of 30 ms that a text took to read, its drafts gained 20 ms; a text that was left alone lost nothing."""
    record = DrafterRecord()
    reader = Reader(TEXT, 0.5, clock=clock)
    active = ActiveDrafter("reader", reader, record, DraftCost.CALLS, following=reader, gained_s=0.020)
    active.idle_if_dear(100, None)
    active.count_following(64)
    assert record.trials.lost_s == pytest.approx(0.010)
    assert record.followed[True] == Followed(1, 164, 64, 0.030, 0.020)


def test_texts_that_share_a_forward_spend_less_of_it_on_trials() -> None:
    """Nine texts that try a drafter in one step learn nine times as much, and may lose a third of the share."""
    active = ActiveDrafter("one", Oracle(TEXT, 0.5), DrafterRecord())
    assert active.share(9) == pytest.approx(active.share(1) / 3)


def test_a_token_is_worth_less_where_more_texts_wait() -> None:
    """The same gain and the same price pay for one text, and not where eight share a step."""
    worth = Worth(0.002)
    for _ in range(50):
        worth.note(0.5, 0.002, is_trial=False)
    assert worth.pays(0.010)
    assert not worth.pays(0.010 / 8)


def test_a_forward_that_several_sessions_shared_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them reports it, with the same rows and seconds."""
    common, shared, lock = CostCurve(), SharedForward(0.020, 2, 2), Lock()
    curves = [JoinedCurve(common, lock) for _ in range(2)]
    noted, observe = list[int](), common.observe

    def note(n_rows: int, seconds: float, n_past: int, keep_s: float | None) -> None:
        noted.append(n_rows)
        observe(n_rows, seconds, n_past, keep_s)

    monkeypatch.setattr(common, "observe", note)
    for curve in curves:
        curve.shared = shared
        curve.observe(1, 0.020)
        assert curve.latest_s == pytest.approx(0.020)
    assert noted == [2]
