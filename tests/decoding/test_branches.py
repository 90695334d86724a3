"""Branches of one prompt: the bits of each alone, limits with clear errors, and nothing left over."""

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import tiny_llama

from edgedec.decoding.branches import Branches, branches_on
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.errors import CancelledError, CapabilityError, ContextFullError, MemoryCapError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec.progress import CancelToken
from edgedec.sampling import SamplingParams
from edgedec.sequence import Request
from edgedec.sessions.batching import Batcher
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.library_model import LibraryModel

N_CTX, N_VOCAB = 256, 260
PROMPT = [int(token) for token in np.random.default_rng(0).integers(1, 250, 70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny llama on the cpu runtime."""
    path = tiny_llama(tmp_path_factory.mktemp("branches") / "tiny.gguf")
    with Cpu().load(path, LoadOptions(n_threads=1)) as loaded:
        yield loaded


@pytest.fixture(params=["alone", "beside other requests"])
def session(request: pytest.FixtureRequest, model: Model) -> Iterator[Session]:
    """A session of the model's own, and one whose forwards are joined with other sessions'."""
    opened = model.session(N_CTX) if request.param == "alone" else Batcher(model).session(N_CTX)
    yield opened
    opened.close()


def alone(model: Model, tokens: list[int]) -> NDArray[np.float32]:
    """Return the logits after a text that is read at once in a session of its own."""
    session = model.session(N_CTX)
    row: NDArray[np.float32] = session.forward(np.array([*PROMPT, *tokens], np.int32), n_past=0).logits[0].copy()
    session.close()
    return row


def branches_of(session: Session, prompt: list[int] = PROMPT, **options: Any) -> AbstractContextManager[Branches]:
    """Open branches of a prompt on a session that nobody else waits for."""
    slot = SessionSlot(session, fork_tokens=options.pop("fork_tokens", None))
    return branches_on(SessionPool([slot]), Request(tuple(prompt), SamplingParams(), 0), CancelToken(), **options)


def test_branches_have_the_bits_of_texts_alone(model: Model, session: Session) -> None:
    """Forked, dropped and rewound, with one token or several in a forward: each row is that of the text alone."""
    with branches_of(session) as branches:
        assert np.array_equal(branches.logits, alone(model, []))
        first, second = branches.root, *branches.fork(branches.root)
        rows = branches.forward({first: [5], second: [6, 7]})
        assert {name: row.shape for name, row in rows.items()} == {first: (1, N_VOCAB), second: (1, N_VOCAB)}
        assert np.array_equal(rows[first][0], alone(model, [5]))
        assert np.array_equal(rows[second][0], alone(model, [6, 7]))
        third, fourth = branches.fork(second, 2)
        branches.drop(second)
        rows = branches.forward({third: [8], first: [9, 10, 11], fourth: [12]}, rows="all")
        for i in range(3):
            assert np.array_equal(rows[first][i], alone(model, [5, 9, 10, 11][: i + 2]))
        assert np.array_equal(rows[third][0], alone(model, [6, 7, 8]))
        assert np.array_equal(rows[fourth][0], alone(model, [6, 7, 12]))
        branches.choose(third)
        assert branches.names == (third,)
        assert np.array_equal(branches.forward({third: [14]})[third][0], alone(model, [6, 7, 8, 14]))


def test_rows_beyond_what_a_forward_returns_take_several(model: Model, session: Session) -> None:
    """Where the rows of logits of all branches are more than a forward returns, each is still that of its text."""
    with branches_of(session) as branches:
        names = [branches.root, *branches.fork(branches.root, 9)]
        texts = {name: [name + 1] * 30 for name in names}
        rows = branches.forward(texts, rows="all")
        for name in names:
            assert np.array_equal(rows[name][29], alone(model, texts[name]))


def test_the_prompt_is_read_once_and_its_pages_are_shared(model: Model, session: Session) -> None:
    """Ten branches of a token each hold a page each beside the prompt's; forks share what is not written again."""
    with branches_of(session, fork_tokens=14 * 64) as branches:
        names = [branches.root, *branches.fork(branches.root, 9)]
        branches.forward({name: [1] for name in names})
        branches.fork(names[0], 5)
        with pytest.raises(MemoryCapError, match="room for 768; drop some"):
            branches.forward({name: [1] * 64 for name in names})
        assert all(branches.token_ids(name) == (1,) for name in names)
        for name in names[2:]:
            branches.drop(name)
        branches.forward({names[0]: [1] * 64, names[1]: [1] * 64})


def test_limits_are_errors_that_change_nothing(model: Model, session: Session) -> None:
    """Each error says what was found and what is possible; all branches hold what they held before."""
    for most in (0, -1, 257, True, 1.5):
        with (
            pytest.raises(RequestError, match=r"most is .*; it must be (from 1 to 256|a whole number)"),
            branches_of(session, most=most),
        ):
            pass
    with pytest.raises(RequestError, match="the prompt is empty"), branches_of(session, []):
        pass
    with branches_of(session, most=3) as branches:
        root, other = branches.root, *branches.fork(branches.root)
        for n in (0, 2, 10**6):
            with pytest.raises(RequestError, match="from 1 to 1 are possible"):
                branches.fork(root, n)
        with pytest.raises(RequestError, match=r"no branch 7; there are \[0, 1\]"):
            branches.fork(7)
        for wrong in ([], [N_VOCAB], [-1]):
            with pytest.raises(RequestError, match="takes ids from 0 to 259"):
                branches.forward({root: [1], other: wrong})
        with pytest.raises(ContextFullError, match="its context 256"):
            branches.forward({root: [1], other: [1] * (N_CTX - len(PROMPT) + 1)})
        with pytest.raises(RequestError, match="'last' or 'all'"):
            branches.forward({root: [1]}, rows="some")  # type: ignore[arg-type]
        assert branches.token_ids(root) == branches.token_ids(other) == ()
        branches.forward({root: [1], other: [1] * (N_CTX - len(PROMPT))})


def test_runtimes_without_shared_forwards_are_refused(model: Model) -> None:
    """Where a row depends on what else is in its forward, there are no branches."""

    class Dependent:
        batch_invariant = 4

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    session = cast(Session, SimpleNamespace(model=Dependent()))
    with pytest.raises(CapabilityError, match="depends on what else is in its forward"), branches_of(session):
        pass


def forward_for_ever(branches: Branches, texts: dict[int, list[int]]) -> None:
    """Add the same tokens to forks of branches again and again."""
    while True:
        forks = {branches.fork(name)[0]: tokens for name, tokens in texts.items()}
        branches.forward(forks)
        for name in forks:
            branches.drop(name)


def test_a_cancelled_forward_leaves_the_branches_as_they_were(model: Model, session: Session) -> None:
    """cancel() from another thread ends the common forward with CancelledError; the same forward then works."""
    with branches_of(session) as branches:
        names = [branches.root, *branches.fork(branches.root, 7)]
        texts = {name: [1] * 180 for name in names}
        stop = threading.Event()

        def cancelling() -> None:
            while not stop.is_set():
                branches.cancel()

        thread = threading.Thread(target=cancelling)
        thread.start()
        try:
            with pytest.raises(CancelledError):
                forward_for_ever(branches, texts)
        finally:
            stop.set()
            thread.join()
        assert all(branches.token_ids(name) == () for name in names)
        rows = branches.forward(texts)
        assert all(np.array_equal(rows[name][0], alone(model, [1] * 180)) for name in names)


def n_sessions(model: Model) -> int:
    """Return how many sessions of a model are open."""
    assert isinstance(model, LibraryModel)
    return model.n_sessions


@pytest.mark.slow
def test_all_sessions_are_closed(model: Model, session: Session) -> None:
    """Leaving the block closes every fork, after an exception too; the session that read the prompt goes on."""
    gc.collect()
    before = n_sessions(model)
    with suppress(KeyError), branches_of(session) as branches:
        branches.fork(branches.root, 3)
        assert n_sessions(model) == before + 4
        raise KeyError
    assert branches.names == ()
    gc.collect()
    assert n_sessions(model) == before
    again = session.forward(np.array([5], np.int32), n_past=len(PROMPT)).logits[0]
    assert np.array_equal(again, alone(model, [5]))


def test_branches_that_were_refused_leave_nothing_that_was_not_read(model: Model) -> None:
    """A slot with another text, whose branches are refused before the prompt is read, still holds that text."""
    pool = SessionPool([SessionSlot(model.session(N_CTX))])
    slot, old, prompt = pool.slots[0], list(range(4, 104)), (*PROMPT, 40, 50)
    slot.session.forward(np.array(old, np.int32), n_past=0)
    slot.cached_ids, slot.n_exact = old, len(old)
    request = Request(prompt, SamplingParams(temperature=0.0), 0)
    with pytest.raises(RequestError, match="must be from 1"), branches_on(pool, request, CancelToken(), most=0):
        pass
    assert slot.cached_ids == old
    with branches_on(pool, request, CancelToken()) as branches:
        assert (branches.logits.view(np.uint32) == alone(model, [40, 50]).view(np.uint32)).all()
    assert slot.cached_ids == list(prompt)
