"""Models with short convolutions go back, fork, branch and are restored anywhere in a long text, with the same bits.

A session holds the columns of its newest tokens, and of older ones only those at the ends of pages of 64 tokens: from
there it evaluates up to 63 rows again (native/forward/short_conv.h). So the texts here are longer than what is held.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forwards import evaluated
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, write_tiny
from support.models.tiny_runs import Bits, Tokens, bits, extend, paths

from edgedec.errors import CancelledError, ModelFormatError, SessionError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Span
from edgedec_methods.sliding_window import SlidingSession
from edgedec_runtimes.cpu import kv_types
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

TINY = replace(ARCHITECTURES["lfm2"], n_ctx_train=4096)
N_TEXT = 640
TEXT: Tokens = np.random.default_rng(5).integers(0, 260, N_TEXT + 16).astype(np.int32)
PLACES = st.integers(1, N_TEXT) | st.sampled_from([1, 2, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, N_TEXT])
OFTEN = settings(max_examples=20, deadline=None)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the bits of the logits behind every token of TEXT, from chunks of a prefill."""

    model: Model
    expected: Bits


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny LFM2 with matrices of all types."""
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", replace(TINY, types=TILE_TYPES))
    with Cpu().load(path, LoadOptions(n_ctx=1024, n_parallel=4, n_threads=2)) as model:
        yield Case(model, extend(model.session(1024), TEXT, (200,) * 3))


def check_end(case: Case, session: Any, n_past: int, n: int) -> None:
    """Check the bits of the n rows behind the first n_past tokens."""
    found = bits(session.forward(TEXT[n_past : n_past + n], n_past=n_past, rows="all").logits)
    np.testing.assert_array_equal(found, case.expected[n_past : n_past + n])


@OFTEN
@given(steps=st.lists(st.tuples(PLACES, st.integers(1, 150)), min_size=1, max_size=5))
def test_going_back_anywhere(case: Case, steps: list[tuple[int, int]]) -> None:
    """To any place of a long text, several times in turn, and on from there."""
    session = case.model.session(1024)
    session.forward(TEXT[:N_TEXT], n_past=0)
    for place, n in steps:
        n_past = min(place, session.n_cached)
        check_end(case, session, n_past, min(n, N_TEXT - n_past + 1))


@OFTEN
@given(n_back=PLACES, n_fork=PLACES)
def test_forks_go_back_by_themselves(case: Case, n_back: int, n_fork: int) -> None:
    """Neither a fork nor its origin changes what the other one holds."""
    first = case.model.session(1024)
    first.forward(TEXT[:N_TEXT], n_past=0)
    second = first.fork()
    check_end(case, second, n_back, 3)
    check_end(case, first, n_fork, 9)
    third = second.fork()
    first.close()
    check_end(case, second, min(n_fork, second.n_cached), 1)
    check_end(case, third, third.n_cached, 2)


@OFTEN
@given(n_saved=PLACES, n_back=PLACES)
def test_saved_states_go_back(case: Case, n_saved: int, n_back: int) -> None:
    """A restored session goes on, and back to places whose columns were not saved."""
    first, second = case.model.session(1024), case.model.session(1024)
    first.forward(TEXT[:n_saved], n_past=0)
    second.forward(TEXT[:30][::-1].copy(), n_past=0)
    second.load(first.save(), n_saved)
    check_end(case, second, n_saved, 1)
    check_end(case, second, min(n_back, n_saved), 5)
    again = case.model.session(1024)
    again.load(second.save(), second.n_cached)
    check_end(case, again, again.n_cached, 2)


@OFTEN
@given(data=st.data(), n_past=PLACES, n_rows=st.integers(1, 12))
def test_trees_behind_any_place(case: Case, data: st.DataObject, n_past: int, n_rows: int) -> None:
    """Each node has its path's bits; the path that is kept goes on as a chain, also back into the path."""
    parents = np.array([data.draw(st.integers(-1, i - 1)) for i in range(n_rows)], np.int32)
    nodes, session, chain = TEXT[:n_rows][::-1].copy(), case.model.session(1024), case.model.session(1024)
    session.forward(TEXT[:N_TEXT], n_past=0)
    chain.forward(TEXT[:n_past], n_past=0)
    found = bits(session.forward(nodes, n_past=n_past, parents=parents, rows="all").logits)
    for row, path in enumerate(paths(parents)):
        np.testing.assert_array_equal(found[row : row + 1], bits(chain.forward(nodes[path], n_past=n_past).logits))
    path = paths(parents)[data.draw(st.integers(0, n_rows - 1))]
    session.keep(np.array(path, np.int32))
    chain.forward(nodes[path], n_past=n_past)
    for n_back in (n_past + len(path), n_past + len(path) // 2, max(0, n_past - 70)):
        expected = bits(chain.forward(TEXT[:2], n_past=n_back, rows="all").logits)
        np.testing.assert_array_equal(bits(session.forward(TEXT[:2], n_past=n_back, rows="all").logits), expected)


@OFTEN
@given(places=st.lists(PLACES, min_size=2, max_size=3))
def test_sessions_that_go_back_in_one_forward(case: Case, places: list[int]) -> None:
    """Each as if it were alone."""
    items = []
    for place in places:
        session = case.model.session(1024)
        session.forward(TEXT[:N_TEXT], n_past=0)
        items.append(ForwardItem(session, place, (RowGroup(TEXT[place : place + 2]),), rows="all"))
    for forward, place in zip(case.model.forward(items), places, strict=True):
        np.testing.assert_array_equal(bits(forward.logits), case.expected[place : place + 2])


@pytest.mark.parametrize("n_past", [1, 70, 130, 200])
def test_rows_are_evaluated_again_as_they_were(case: Case, n_past: int) -> None:
    """Through the same half-layers, also where tokens went through different ones, or resumed from hidden states."""
    some = LayerSet(np.array([True, False, True, True]), np.array([True, True, False, True]))
    session, other = case.model.session(1024), case.model.session(1024)
    for each, n in ((session, 600), (other, n_past)):  # the other one holds no more than is asked for
        hidden = each.forward(TEXT[: min(50, n)], n_past=0, taps=(1,)).hidden[1]
        evaluated(each, 0, RowGroup(vectors=hidden, span=Span(enter=2)))
        for begin in range(50, n, 50):
            each.forward(TEXT[begin : min(begin + 50, n)], n_past=begin, layers=some)
    expected = other.forward(TEXT[:3], n_past=n_past, layers=some, rows="all").logits
    found = session.forward(TEXT[:3], n_past=n_past, layers=some, rows="all").logits
    np.testing.assert_array_equal(bits(found), bits(expected))


def test_states_without_tokens_can_not_be_evaluated_again(case: Case) -> None:
    """A text of hidden states alone is refused where its columns are gone, and taken where they are there."""
    session = case.model.session(1024)
    hidden = np.random.default_rng(1).standard_normal((400, case.model.card.n_embd)).astype(np.float32)
    above = LayerSet(np.array([False, False, True, True]), np.array([False, False, True, True]))
    evaluated(session, 0, RowGroup(vectors=hidden, span=Span(enter=2)))
    evaluated(session, 399, RowGroup(vectors=hidden[:2], span=Span(enter=2)))
    with pytest.raises(SessionError, match="began with hidden states"):
        session.forward(TEXT[:1], n_past=70, layers=above)
    evaluated(session, 64, RowGroup(vectors=hidden[:2], span=Span(enter=2)))


def test_what_is_cancelled_while_it_goes_back_is_made_up_for(case: Case) -> None:
    """After a cancellation at any moment the session goes on to the same bits."""
    session = case.model.session(1024)
    for place in (100, 170, 333):
        for delay_s in (0.0, 0.0005, 0.001, 0.002):
            session.forward(TEXT[session.n_cached : N_TEXT], n_past=session.n_cached)
            timer = threading.Timer(delay_s, session.cancel)
            timer.start()
            try:
                session.forward(TEXT[place : place + 300], n_past=place)
            except CancelledError:
                session.save()
            timer.join()
            check_end(case, session, min(place, session.n_cached), 2)


def test_a_context_that_slides(case: Case) -> None:
    """Every row has the bits of its own window."""
    session, plain = SlidingSession(case.model.session(128)), case.model.session(128)
    for begin in range(0, 400, 40):
        found = bits(session.forward(TEXT[begin : begin + 40], n_past=begin).logits)
        n, stride = begin + 40, (128 - 4) // 2
        first = 0 if n <= 128 else 4 + stride * ((n - 1 - 128) // stride + 1)
        held = TEXT[:n] if first == 0 else np.concatenate([TEXT[:4], TEXT[first:n]])
        np.testing.assert_array_equal(found, bits(plain.forward(held, n_past=0).logits))


def test_a_damaged_state_is_refused(case: Case) -> None:
    """A state that is cut short, and one with tokens that the model has not; the session then holds what it held."""
    session = case.model.session(1024)
    session.forward(TEXT[:100], n_past=0)
    data = session.save()
    with pytest.raises(ModelFormatError, match="is not one of 100 tokens"):
        session.load(data[:-4], 100)
    width = 2 * case.model.card.n_layer
    columns = (1 * 2 + 1 * 2) * 3 * case.model.card.n_embd * 4  # of the first page's end and of the last two tokens
    at = len(data) - columns - 100 * (4 + width)
    assert np.frombuffer(data, np.int32, 100, at).tolist() == TEXT[:100].tolist()
    damaged = data[:at] + np.int32(N_VOCAB).tobytes() + data[at + 4 :]
    with pytest.raises(SessionError, match="damaged"):
        session.load(damaged, 100)
    check_end(case, session, 100, 5)


def test_the_memory_plan_counts_the_columns(tmp_path: Path) -> None:
    """Whole pages for the newest tokens, the last two columns of all other pages, and what is noted of each token."""
    path = write_tiny(tmp_path / "m.gguf", TINY)
    options = LoadOptions(n_ctx=2048, n_parallel=2)
    terms = {term.name: term for term in Cpu().plan(path, options)}
    n_pages, of_column = 2048 // 64, 3 * TINY.n_embd * 4
    expected = (6 * 64 + (n_pages - 6) * 2) * of_column + 2048 * (4 + 2 * TINY.n_layer)
    assert terms["columns of convolutions"].n_bytes == 2 * expected
    keys = 2 * TINY.n_head_kv * TINY.head_dim * 2  # of the one layer with attention
    assert terms["KV cache"].n_bytes == 2 * 2048 * keys
    network = read_network(read_gguf(path))
    assert kv_types.column_bytes(network, 64) == 64 * of_column + 64 * (4 + 2 * TINY.n_layer)
