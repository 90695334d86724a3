"""Drafting while the target verifies: the same drafts and texts, one thread at a time, and none left behind."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any

import numpy as np
import pytest
from support.decoding.draft_models import SETTINGS, TEXT, Recorded, counted, depth, generate, loaded
from support.decoding.drawings import drawn
from support.models.tiny_models import BOS, byte_ids

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext
from edgedec.drafters.draft_model.model import SMALL_WINDOW, DraftModel, ModelDrafter
from edgedec.errors import SessionError
from edgedec.model import Forward, Model
from edgedec.sampling import Noise, SamplingParams
from edgedec.scheduler import plugin_guard
from edgedec.sequence import Generation
from edgedec.testing import check_drafter
from edgedec_apps.cli.shown.explain import explained
from edgedec_methods.overlapped import THREAD_NAME, OverlappedDrafter, OverlappedModel

pytestmark = pytest.mark.usefixtures("prompts_are_read_whole")

PATIENCE_S = 60.0


class Patient(OverlappedModel):
    """Whose thread has drafted all that it may before the target verifies."""

    def start(self, user: object, step: Callable[[], bool]) -> None:
        """Let the thread come to its end."""
        super().start(user, step)
        self.threads[user][0].join()


class Hasty(OverlappedModel):
    """Whose thread is stopped as soon as it has begun."""

    def start(self, user: object, step: Callable[[], bool]) -> None:
        """Stop it."""
        super().start(user, step)
        self.settle(user)


class Watched(OverlappedModel):
    """Whose session is used by one thread at a time, or the drafter fails; notes which thread read."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.busy = Lock()
        self.readers: list[str] = []

    def read(self, text: Any, window: Any, ahead: Any = ()) -> Forward:
        """Evaluate alone."""
        assert self.busy.acquire(blocking=False), "two threads read at once"
        try:
            self.readers.append(current_thread().name)
            time.sleep(0.001)  # so that the other thread has its turn
            return super().read(text, window, ahead)
        finally:
            self.busy.release()

    def close(self) -> None:
        """Leave the model open: several engines take turns with it."""
        self.settle()


class PatientWatched(Watched, Patient):
    """Both."""


KINDS = [OverlappedModel, Patient, Hasty]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, its threads are over when it is."""
    yield
    assert drafting_threads() == []


def drafting_threads() -> list[Thread]:
    """Return the threads that draft ahead now."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture
def equal(target: Path) -> Iterator[Model]:
    """The target as its own draft model."""
    with loaded(target) as model:
        yield model


def opened(path: Path, source: OverlappedModel | None, n_draft_max: int = 8) -> edgedec.Engine:
    """Load a target with this drafter pinned, made and asked in the thread that generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_guard, "GuardedFactory", lambda factory: factory)
        return edgedec.load(path, runtime="cpu", n_threads=1, n_ctx=512, draft=source, n_draft_max=n_draft_max)


def text_of(engine: edgedec.Engine, n_tokens: int, **options: Any) -> Generation:
    """Generate after TEXT; at the end nobody drafts any more."""
    found = engine.generate(TEXT, max_tokens=n_tokens, seed=5, ignore_end=True, **options)
    assert drafting_threads() == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OverlappedModel, Patient])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_plain_decodings(target: Path, draft_model: Model, name: str, kind: Any) -> None:
    """However far the thread comes, with a draft model that is always right and one that is nearly always wrong."""
    plain = generate(target, None, **SETTINGS[name])
    found = generate(target, kind(draft_model), **SETTINGS[name])
    assert found.token_ids == plain.token_ids
    assert found.stats.n_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "truncated"])
def test_one_thread_reads_at_a_time_and_any_length_gives_the_text(target: Path, draft_model: Model, name: str) -> None:
    """For random lengths of texts and drafts, one after another on the same draft model; nothing fails."""
    rng = np.random.default_rng(4)
    plain = generate(target, None, n_tokens=32, **SETTINGS[name])
    source = Watched(draft_model)
    for _ in range(4):
        with opened(target, source, int(rng.integers(1, 13))) as engine:
            for n_tokens in rng.integers(3, 33, 2).tolist():
                found = text_of(engine, n_tokens, **SETTINGS[name])
                assert found.token_ids == plain.token_ids[:n_tokens]
                assert found.stats.reasons == []
    assert {main_thread().name, THREAD_NAME} == set(source.readers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["greedy", "penalized"])
def test_the_drafts_are_the_draft_models_own(target: Path, draft_model: Model, name: str, kind: Any) -> None:
    """Node for node, whatever was there already."""
    expected = Recorded(DraftModel(draft_model))
    generate(target, expected, **SETTINGS[name])
    source = kind(draft_model)
    found = Recorded(source)
    generate(target, found, **SETTINGS[name])
    source.settle()
    assert found.drafts == expected.drafts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_what_was_drafted_ahead_is_used(target: Path, equal: Model, name: str) -> None:
    """With a draft model that is always right, only the first draft is drafted while the target waits."""
    source = PatientWatched(equal)
    session = counted(source)
    with opened(target, source) as engine:
        found = text_of(engine, 40, **SETTINGS[name])
    n_first = source.readers.count(main_thread().name)
    n_ahead = len(source.readers) - n_first
    assert source.readers == [main_thread().name] * n_first + [THREAD_NAME] * n_ahead
    counts = found.stats.drafters["custom"]
    assert 0 < n_first <= 8
    assert (counts["ahead"], counts["used"]) == (n_ahead, 39 - n_first)
    session.assert_evaluated_once([BOS, *byte_ids(TEXT), *found.token_ids])
    line = f"custom: {n_ahead} tokens drafted while the target verified, {39 - n_first} used"
    assert line in explained(found.stats, "all")


class Failing(Patient):
    """Whose third read in a thread fails."""

    n_read = 0

    def read(self, text: Any, window: Any, ahead: Any = ()) -> Forward:
        """Evaluate, or fail."""
        is_ahead = current_thread().name == THREAD_NAME
        self.n_read += is_ahead
        if is_ahead and self.n_read == 3:
            raise ZeroDivisionError("in the thread")
        return super().read(text, window, ahead)


def test_a_thread_that_fails_is_told_as_the_drafters_fault(target: Path, equal: Model) -> None:
    """The first draft is verified, the second one asked for in vain; the text is plain decoding's."""
    plain = generate(target, None, temperature=0)
    with opened(target, Failing(equal)) as engine:
        found = text_of(engine, 40, temperature=0)
    assert found.token_ids == plain.token_ids
    assert found.stats.reasons == ["custom off: the drafter failed (ZeroDivisionError: in the thread)"]
    assert (found.stats.n_drafts, found.stats.drafters["custom"]["failed"]) == (1, 1)


class Held(OverlappedModel):
    """Whose thread stays in its first read until it is let go."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.drafting, self.let_go = Event(), Event()

    def read(self, text: Any, window: Any, ahead: Any = ()) -> Forward:
        """Evaluate, in the thread when it is let go."""
        if current_thread().name == THREAD_NAME:
            self.drafting.set()
            assert self.let_go.wait(PATIENCE_S)
        return super().read(text, window, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["cancel", "close"])
def test_a_text_that_ends_while_the_thread_drafts(target: Path, equal: Model, ending: str) -> None:
    """Cancelled, or with the engine closed from another thread: the text ends, then the thread, then the model."""
    plain = generate(target, None, temperature=0)
    source = Held(equal)
    found: list[Generation] = []
    with opened(target, source) as engine:
        stream = engine.stream(TEXT, max_tokens=40, temperature=0, ignore_end=True)

        def generates() -> None:
            list(stream)
            found.append(stream.generation)

        threads = [Thread(target=generates)]
        threads[0].start()
        assert source.drafting.wait(PATIENCE_S)
        if ending == "cancel":
            stream.cancel()
        else:
            threads.append(Thread(target=engine.close))
            threads[1].start()
            while not engine.pool.slots[0].closing:
                time.sleep(0.001)
        source.let_go.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert drafting_threads() == []
    (generation,) = found
    assert generation.finish_reason == "cancelled"
    n = len(generation.token_ids)
    assert 0 < n < 40
    assert generation.token_ids == plain.token_ids[:n]
    with pytest.raises(SessionError, match="closed"):
        equal.session(8)


def test_a_stream_that_is_dropped_leaves_no_thread(target: Path, equal: Model) -> None:
    """In the middle of a step's tokens; the next text on the same engine is plain decoding's."""
    plain = generate(target, None, temperature=0)
    with opened(target, OverlappedModel(equal)) as engine:
        stream = engine.stream(TEXT, max_tokens=40, temperature=0, ignore_end=True)
        assert [next(stream).token_id for _ in range(3)] == list(plain.token_ids[:3])
        stream.close()
        assert drafting_threads() == []
        assert text_of(engine, 40, temperature=0).token_ids == plain.token_ids


def context_for(model: Model, *, coupled: bool = True, **options: Any) -> DraftContext:
    """Return the context of a generation on a model."""
    params = SamplingParams(**options)
    return DraftContext(model.session(512), params, Noise(3), **drawn(params, coupled=coupled))


def test_a_smaller_window_waits_for_the_thread(equal: Model) -> None:
    """The session is exchanged when nobody reads; what was drafted stays, and the next draft is a new drafter's."""
    source, prompt = Watched(equal), byte_ids(TEXT)
    drafter = source(context_for(equal, temperature=0))
    drafter.begin(prompt)
    token = int(drafter.propose(4, 1e18).tokens[0])
    source.shrink()
    assert drafting_threads() == []
    assert source.n_ctx == SMALL_WINDOW
    drafter.learn(Verification((), (token,)), {})
    found = drafter.propose(8, 1e18)
    source.settle()
    fresh = DraftModel(equal)(context_for(equal, temperature=0))
    fresh.begin([*prompt, token])
    assert nodes(found) == nodes(fresh.propose(8, 1e18))


@pytest.mark.parametrize(("two_rows_s", "waited_s"), [(0.012, 0.0085), (0.040, 0.0075), (None, 0.01)])
def test_a_token_that_was_drafted_meanwhile_is_not_waited_for(
    equal: Model, two_rows_s: float | None, waited_s: float
) -> None:
    """It is there if two tokens in a row were right, as far as half of a forward of two rows has room for it."""
    curve = CostCurve() if two_rows_s is None else CostCurve({2: two_rows_s})
    source = OverlappedModel(equal)
    source.token_s = 0.01
    drafter = source(replace(context_for(equal, temperature=0), curve=curve))
    rate = drafter.traits.rate
    assert drafter.traits.level_s == pytest.approx(0.01 - (0.01 - waited_s) * 4 * rate * rate)


def nodes(draft: Draft) -> list[tuple[int, int, float]]:
    """Return each node's token, parent and p."""
    return list(zip(draft.tokens, list(draft.parents), draft.p_accept, strict=True))


def test_a_correction_drops_what_was_drafted(equal: Model) -> None:
    """Of 4 + 1 + 4 tokens at most; the next draft is what a new drafter would propose, and none of them is used."""
    source, prompt = Patient(equal), byte_ids(TEXT)
    drafter = source(context_for(equal, temperature=0))
    assert isinstance(drafter, OverlappedDrafter)
    drafter.begin(prompt)
    first = drafter.propose(4, 1e18)
    assert drafter.n_ahead == 5
    wrong = (int(first.tokens[0]) + 1) % 260
    drafter.learn(Verification((), (wrong,)), {})
    fresh = DraftModel(equal)(context_for(equal, temperature=0))
    fresh.begin([*prompt, wrong])
    assert nodes(drafter.propose(4, 1e18)) == nodes(fresh.propose(4, 1e18))
    assert (drafter.n_ahead, drafter.n_used) == (10, 0)


def test_the_thread_ends_where_the_next_draft_would(equal: Model) -> None:
    """The policy's floor ends a draft after the node whose path falls below it, and so what is drafted ahead."""
    source = Patient(equal)
    context = context_for(equal, temperature=0)
    drafter = source(context)
    assert isinstance(drafter, OverlappedDrafter)
    drafter.begin(byte_ids(TEXT))
    context.floor.path_probability = 1.0
    assert depth(drafter.propose(8, 1e18)) == 1
    assert drafter.n_ahead == 2  # the bonus token, and a draft of one


def test_under_another_rule_nothing_overlaps(target: Path, equal: Model) -> None:
    """A ModelDrafter drafts then: its nodes are drawn with numbers of their own."""
    source = OverlappedModel(equal)
    assert type(source(context_for(equal, coupled=False))) is ModelDrafter
    with opened(target, source) as engine:
        found = text_of(engine, 20, temperature=1.0, verify="tokenwise")
    assert found.stats.n_drafts > 0
    assert "ahead" not in found.stats.drafters["custom"]


@pytest.mark.slow
def test_the_conformance_suite_passes(target: Path, draft_model: Model) -> None:
    """Every check of a drafter."""
    source = OverlappedModel(draft_model)
    results = check_drafter(source, lambda: loaded(target), n_tokens=16)
    source.settle()
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []
