"""Padded steps: on a runtime with a kernel for one row, one for two to five and one for more, drafts change no text."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.runtime import check_runtime
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.errors import CapabilityError, ModelFormatError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import ExactRows, Forward, ForwardItem, Model, Session
from edgedec.progress import OnProgress
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec_methods.padded_steps import PaddedModel, with_padded_steps
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.invariance import measured_invariance

pytestmark = pytest.mark.slow

N_CTX = 256
BORDERS = (1, 5)  # the most rows of the first two kernels
PROMPT = "ab ab ab cab ab ab cab ab "


class KernelModel(OuterModel):
    """A model whose logits depend on how many rows a forward has, as a library's with several kernels do."""

    def __init__(self, inner: Model, borders: tuple[int, ...] = BORDERS, *, by_place: bool = False) -> None:
        super().__init__(
            inner, inner.card, replace(inner.capabilities, max_rows=16, exact_trees=False, hidden_input=False)
        )
        shifts = np.random.default_rng(5).standard_normal((len(borders) + 1, inner.card.n_vocab))
        self.borders, self.shifts, self.by_place = borders, shifts.astype(np.float32), by_place

    @property
    def batch_invariant(self) -> int:
        """What is measured of these kernels."""
        return measured_invariance(self, None)

    def session(self, n_ctx: int) -> "KernelSession":
        """Open a session."""
        return KernelSession(self.inner.session(n_ctx), self)

    def forward(self, items: Any) -> list[Forward]:
        """Evaluate items one after another."""
        return [item.session.evaluate(item, None) for item in items]


class KernelSession(OuterSession):
    """A session of a KernelModel."""

    model: KernelModel

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """As measured in a short context."""
        return Session.exact_rows(self, n_past)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Add what the kernel for so many rows adds."""
        tokens = item.groups[0].tokens
        if tokens is None:
            raise CapabilityError("no hidden states")
        forward = super().evaluate(item)
        if len(forward.logits) > self.model.capabilities.max_rows:
            raise CapabilityError("more rows than there are kernels for")
        kernel = sum(len(tokens) > border for border in self.model.borders)
        shift = self.model.shifts[kernel] * (np.arange(len(forward.logits))[:, None] if self.model.by_place else 1)
        return replace(forward, logits=forward.logits + shift.astype(np.float32), best=[])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama's file."""
    return tiny_llama(tmp_path_factory.mktemp("padded") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[KernelModel]:
    """It with kernels."""
    with Reference().load(path, LoadOptions(n_ctx=N_CTX)) as loaded:
        yield KernelModel(loaded)


def ids(*tokens: int) -> Any:
    """Return int32[n]."""
    return np.array(tokens, np.int32)


def written(path: Path, **options: Any) -> tuple[list[tuple[int, ...]], edgedec.Generation]:
    """Return the tokens of three texts, and the result of the last of them."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "seed": 4},
    ]
    with edgedec.load(path, runtime="reference", n_ctx=N_CTX, **options) as engine:
        results = [engine.generate(PROMPT, max_tokens=400, ignore_end=True, **way) for way in ways]
    return [result.token_ids for result in results], results[-1]


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference runtime have these kernels."""
    load = Reference.load
    monkeypatch.setattr(Reference, "load", lambda self, path, options: KernelModel(load(self, path, options)))


@pytest.mark.usefixtures("_kernels")
def test_drafts_change_no_padded_text(path: Path) -> None:
    """The texts end with the context, where padding has no room; unpadded steps write others and draft nothing."""
    plain, _ = written(path, draft="off", drafting=DraftOptions(numerics="padded"))
    drafted, result = written(path, draft="suffix", drafting=DraftOptions(numerics="padded"))
    assert drafted == plain
    assert result.stats.n_drafts > 5
    assert result.stats.n_draft_tokens > result.stats.n_drafts  # of more than one token
    assert any("every step has at least 2 rows" in reason for reason in result.stats.notes)
    strict, result = written(path, draft="suffix")
    assert strict != plain
    assert result.stats.n_drafts == 0


def test_the_class_with_the_least_padding_is_taken(model: KernelModel) -> None:
    """Two to five rows are enough; where they are not, more padding is tried. Rows up to the padding are equal."""
    padded, note = with_padded_steps(model, N_CTX, None)
    assert isinstance(padded, PaddedModel)
    assert (padded.n_least, padded.batch_invariant) == (2, 5)
    assert note is not None
    assert "up to 5 rows of a draft are exact" in note
    wider, _ = with_padded_steps(KernelModel(model.inner, (1, 2, 4)), N_CTX, None)
    assert isinstance(wider, PaddedModel)
    assert (wider.n_least, wider.batch_invariant) == (3, 4)
    narrow, _ = with_padded_steps(KernelModel(model.inner, tuple(range(1, 16))), N_CTX, None)
    assert isinstance(narrow, PaddedModel)
    assert (narrow.n_least, narrow.batch_invariant) == (4, 4)


def test_without_a_class_nothing_is_padded(model: KernelModel) -> None:
    """And a sentence says so; exact rows need no padding and no sentence."""
    uneven = KernelModel(model.inner, by_place=True)
    found, note = with_padded_steps(uneven, N_CTX, None)
    assert found is uneven
    assert note == "steps are not padded: on the reference runtime 1 row is exact without, and no more with padding"
    assert with_padded_steps(model.inner, N_CTX, None) == (model.inner, None)
    stuck = KernelModel(model.inner)
    stuck.capabilities = replace(stuck.capabilities, rollback=False)
    found, note = with_padded_steps(stuck, N_CTX, None)
    assert found is stuck
    assert note is not None
    assert "can't go back" in note


def test_what_pads_is_never_cached(model: KernelModel) -> None:
    """n_cached counts the rows that were asked for; a forward behind them is refused, one at them is sound."""
    padded = PaddedModel(model, 3, None)
    session = padded.session(N_CTX)
    assert session.forward(ids(5, 6), n_past=0, rows="all").logits.shape == (2, padded.card.n_vocab)
    assert session.n_cached == 2
    with pytest.raises(SessionError, match="n_past is 3; the session has cached 2 tokens"):
        session.forward(ids(7), n_past=3)
    with pytest.raises(RequestError, match="row 1 is wanted of a forward of 1 rows"):
        session.forward(ids(7), n_past=2, rows=ids(1))
    with pytest.raises(CapabilityError, match="trees"):
        session.forward(ids(7, 8), n_past=2, parents=ids(-1, -1))
    assert session.n_cached == 2
    found = session.forward(ids(7), n_past=2).logits.copy()
    other = model.session(N_CTX)
    other.forward(ids(5, 6), n_past=0)
    expected = other.forward(ids(7, 7, 7), n_past=2, rows="all").logits[:1]
    assert np.array_equal(found, expected)
    session.close()
    other.close()


def test_a_saved_session_goes_on(model: KernelModel) -> None:
    """What padded its last forward is saved with it and forgotten; bytes of unpadded sessions are refused."""
    padded = PaddedModel(model, 2, None)
    session, other = padded.session(N_CTX), padded.session(N_CTX)
    session.forward(ids(5, 6, 7), n_past=0)
    session.forward(ids(8), n_past=3)
    data = session.save()
    expected = session.forward(ids(9), n_past=4).logits.copy()
    other.load(data, 4)
    assert other.n_cached == 4
    assert np.array_equal(other.forward(ids(9), n_past=4).logits, expected)
    with pytest.raises(ModelFormatError, match="saved"):
        other.load(session.inner.save(), 4)
    with pytest.raises(ModelFormatError, match="holds no 3 tokens"):
        other.load(data, 3)
    session.close()
    other.close()


def test_no_row_is_called_exact_where_padding_has_no_room(model: KernelModel) -> None:
    """At the end of the context, and where another range of positions begins."""
    session = PaddedModel(model, 3, None).session(N_CTX)
    session.forward(np.zeros(N_CTX - 20, np.int32) + 5, n_past=0)
    assert session.exact_rows(100).possible == 5
    assert [session.exact_rows(n).possible for n in (N_CTX - 7, N_CTX - 6, N_CTX - 4, N_CTX - 3, N_CTX - 2)] == [
        5,
        4,
        2,
        1,
        1,
    ]
    assert session.exact_rows(N_CTX - 4, measure=3).sure == 2
    assert session.exact_rows(N_CTX - 2, measure=1).sure == 1
    session.close()


def test_it_conforms(path: Path) -> None:
    """The suite for runtimes finds nothing, forks and saved sessions among it."""
    results = check_runtime(
        lambda: PaddedModel(KernelModel(Reference().load(path, LoadOptions(n_ctx=N_CTX, n_parallel=3))), 2, None)
    )
    assert [f"{result.name}: {result.detail}" for result in results if result.status == "failed"] == []
