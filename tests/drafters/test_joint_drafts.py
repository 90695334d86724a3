"""Drafts for several texts at a time: each text's draft is what it is alone, from forwards that all of them share."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest

from edgedec.draft import Draft
from edgedec.drafter import DraftContext
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.errors import SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.sampling import Noise, SamplingParams
from edgedec.sessions import batching
from edgedec.sessions.batching import Batcher
from edgedec.sessions.forks import SessionForks
from edgedec.sessions.joined_work import JointCalls
from edgedec_runtimes.cpu.runtime import Cpu

TEXTS = [[1, *(3 + byte for byte in text)] for text in (b"abcabcabcab", b"xyxyxyx", b"the end, the end, the")]
N_DRAFTS = 4


@dataclass
class Counted:
    """A model that notes of how many texts each of its forwards is, those of single sessions left out."""

    model: Model
    sizes: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate, and note it."""
        self.sizes.append(len(items))
        return self.model.forward(items)


@pytest.fixture(scope="module")
def target(tiny_path: Path) -> Iterator[Model]:
    """The tiny model on the cpu runtime."""
    with Cpu().load(tiny_path, LoadOptions(n_ctx=256, n_threads=1)) as model:
        yield model


@pytest.fixture
def small(tiny_path: Path) -> Iterator[Counted]:
    """The tiny model as a draft model, with few rows of logits."""
    with Cpu().load(tiny_path, LoadOptions(n_ctx=256, n_threads=1, max_rows=9)) as model:
        yield Counted(model)


def drafted(factory: Any, session: Session, text: Sequence[int], **options: Any) -> list[Draft]:
    """Return drafts of growing lengths behind a text, none of which is verified."""
    context = DraftContext(session, SamplingParams(**options), Noise(3))
    drafter = factory(context)
    drafter.begin(text)
    try:
        return [drafter.propose(n, 1e18) for n in range(2, 2 + N_DRAFTS)]
    finally:
        drafter.close()


@pytest.mark.parametrize("kind", [DraftModel, lambda model: CascadeModel(DraftModel(model))], ids=["model", "cascade"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_drafts_of_several_texts_share_forwards(
    target: Model, small: Counted, kind: Any, options: dict[str, Any]
) -> None:
    """Three threads draft for three forks: every node is that of drafting alone, and forwards are of several texts."""
    expected = [drafted(kind(small.model), target.session(256), text, **options) for text in TEXTS]
    factory, forks = kind(cast(Model, small)), SessionForks()
    sessions = [forks.fork(target.session(256)) for _ in TEXTS]
    forks.joint = joint = JointCalls(len(TEXTS))

    def draft(k: int) -> list[Draft]:
        try:
            return drafted(factory, sessions[k], TEXTS[k], **options)
        finally:
            joint.leave()

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(draft, range(len(TEXTS))))
    forks.close()
    assert found == expected
    assert max(small.sizes) == len(TEXTS)
    assert len(small.sizes) >= N_DRAFTS


def test_drafts_of_sessions_whose_forwards_are_joined_are_joined(
    target: Model, small: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions of a batcher that come at the same time have their rows of the draft model in one forward."""
    monkeypatch.setattr(batching, "_LONGEST_S", 20.0)
    batcher, begin, options = Batcher(target), Barrier(2), {"temperature": 0.0}
    batcher.last_s = 1000.0  # so that each waits for the other as long as is ever waited
    sessions = [batcher.session(256) for _ in TEXTS[:2]]
    expected = [drafted(DraftModel(small.model), target.session(256), text, **options) for text in TEXTS[:2]]
    factory = DraftModel(cast(Model, small))

    def draft(k: int) -> list[Draft]:
        with sessions[k].generating(1):
            begin.wait(30)
            return drafted(factory, sessions[k], TEXTS[k], **options)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(draft, range(2))) == expected
    assert small.sizes
    assert set(small.sizes) == {2}


@dataclass
class Call:
    """Implements edgedec.head_state.DraftCall: notes what it is answered together with, or fails."""

    kind: str
    log: list[list["Call"]]
    fails: bool = False
    n_rows = 1

    def answer(self, others: Sequence[Any]) -> None:
        """Note the calls, or fail."""
        if any(call.fails for call in (self, *others)):
            raise SessionError("a session is closed")
        self.log.append([self, *others])


def test_calls_are_answered_when_no_thread_is_at_work(target: Model) -> None:
    """By kind, and not before all others wait or have left; where one fails, each call that it came with fails."""
    log: list[list[Call]] = []
    session, joint = target.session(8), JointCalls(4)
    calls = [Call("a", log), Call("b", log), Call("a", log), Call("b", log, fails=True)]

    def ask(call: Call) -> int:
        try:
            return joint.answer(session, call).n_items
        finally:
            joint.leave()

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, call) for call in calls[:3]]
        assert not any(future.done() for future in futures)
        assert log == []
        futures.append(pool.submit(ask, calls[3]))
        assert [futures[k].result(30) for k in (0, 2)] == [2, 2]
        assert [type(futures[k].exception(30)) for k in (1, 3)] == [SessionError, SessionError]
    assert [{id(call) for call in answered} for answered in log] == [{id(calls[0]), id(calls[2])}]
