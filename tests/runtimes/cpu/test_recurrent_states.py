"""Models with states or short convolutions go back, fork, branch and are restored anywhere, with the same bits.

A session holds the states behind its verified rows, a log of the rows after them, and a few checkpoints
(native/forward/recurrent_state.h). Of convolutions it holds the columns of its newest tokens, and of older ones only
those at the ends of pages of 64 tokens (native/forward/short_conv.h): from there it evaluates rows again. So the texts
here are longer than what is held.
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
from support.models.code_paths import each_architecture
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, write_tiny
from support.models.tiny_runs import Bits, Tokens, bits, extend, one_by_one, paths

from edgedec.errors import CancelledError, ModelFormatError, SessionError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Span
from edgedec_methods.sliding_window import SlidingSession
from edgedec_runtimes.cpu import kv_types
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

NAMES = each_architecture(
    ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "falcon-h1", "nemotron_h_moe", "mamba2", "lfm2")
)
N_TEXT = 640
TEXT: Tokens = np.random.default_rng(5).integers(0, 260, N_TEXT + 16).astype(np.int32)
OF_PAGES = [63, 64, 65, 66, 127, 128, 129, 191, 192, 193]
PLACES = st.integers(1, N_TEXT) | st.sampled_from(
    [1, 2, 3, 4, 31, 32, 33, 200, 400, 568, 600, 608, 609, N_TEXT, *OF_PAGES]
)
OFTEN = settings(max_examples=6, deadline=None)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the bits of the logits behind every token of TEXT, evaluated one by one."""

    model: Model
    expected: Bits


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny model with matrices of all types."""
    tiny = replace(ARCHITECTURES[request.param], types=TILE_TYPES, n_ctx_train=4096)
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny)
    with Cpu().load(path, LoadOptions(n_ctx=1024, n_parallel=4, n_threads=2)) as model:
        yield Case(model, one_by_one(model.session(1024), TEXT))


def check_end(case: Case, session: Any, n_past: int, n: int) -> None:
    """Check the bits of the n rows behind the first n_past tokens."""
    found = bits(session.forward(TEXT[n_past : n_past + n], n_past=n_past, rows="all").logits)
    np.testing.assert_array_equal(found, case.expected[n_past : n_past + n])


def some_layers(case: Case, attn: tuple[bool, ...], mlp: tuple[bool, ...]) -> LayerSet:
    """Return the half-layers of these patterns, which repeat."""
    return LayerSet(np.resize(attn, case.model.card.n_layer), np.resize(mlp, case.model.card.n_layer))


@OFTEN
@given(sizes=st.lists(st.integers(1, 90), max_size=12))
def test_any_split_of_a_text(case: Case, sizes: list[int]) -> None:
    """With all logits, and with those of the last row of each piece, which folds the rows of long pieces at once."""
    pieces = (*sizes, 200, 200, 200)
    np.testing.assert_array_equal(extend(case.model.session(1024), TEXT, pieces), case.expected)
    session, begin = case.model.session(1024), 0
    for size in (*pieces, 256):
        found = bits(session.forward(TEXT[begin : begin + size], n_past=begin).logits)
        begin = min(begin + size, len(TEXT))
        np.testing.assert_array_equal(found, case.expected[begin - 1 : begin])
        if begin == len(TEXT):
            break


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_and_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, n_threads: int
) -> None:
    """Each instruction set has the same bits on any number of threads, whatever the split."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=TILE_TYPES))
    for isa in instruction_sets():
        monkeypatch.setenv("EDGEDEC_CPU_ISA", isa)
        with Cpu().load(path, LoadOptions(n_ctx=256, n_threads=2)) as model:
            expected = one_by_one(model.session(256), TEXT[:120])
        with Cpu().load(path, LoadOptions(n_ctx=256, n_threads=n_threads)) as model:
            np.testing.assert_array_equal(extend(model.session(256), TEXT[:120], (1, 70, 2)), expected)


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
@given(accepted=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12))
def test_rejected_rows(case: Case, accepted: list[tuple[int, int]]) -> None:
    """Drafts of which some rows are accepted: the next forward begins behind any of them, or none."""
    session, n_past = case.model.session(1024), 150
    session.forward(TEXT[:n_past], n_past=0)
    for n_right, n_wrong in accepted:
        end = min(n_past + n_right, N_TEXT)
        draft = np.concatenate([TEXT[n_past:end], TEXT[::-1][:n_wrong]])
        found = bits(session.forward(draft, n_past=n_past, rows="all").logits)
        np.testing.assert_array_equal(found[: end - n_past], case.expected[n_past:end])
        n_past = end
    check_end(case, session, n_past, 2)


@OFTEN
@given(n_back=PLACES, n_fork=PLACES)
def test_forks_go_back_by_themselves(case: Case, n_back: int, n_fork: int) -> None:
    """Neither a fork nor its origin changes what the other one holds."""
    first = case.model.session(1024)
    first.forward(TEXT[:N_TEXT], n_past=0)
    second = first.fork()
    check_end(case, first, N_TEXT, 4)
    check_end(case, second, n_back, 3)
    check_end(case, first, n_fork, 9)
    third = second.fork()
    first.close()
    check_end(case, second, min(n_fork, second.n_cached), 1)
    check_end(case, third, third.n_cached, 2)


@OFTEN
@given(n_saved=PLACES, n_back=PLACES)
def test_saved_states_go_back(case: Case, n_saved: int, n_back: int) -> None:
    """A restored session goes on, and back to places whose states were not saved."""
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
@given(data=st.data(), n_past=PLACES, n_rows=st.integers(1, 14))
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
@given(places=st.lists(PLACES, min_size=2, max_size=3), n_row=st.integers(1, 80))
def test_sessions_that_go_back_in_one_forward(case: Case, places: list[int], n_row: int) -> None:
    items = []
    for place in places:
        session = case.model.session(1024)
        session.forward(TEXT[:N_TEXT], n_past=0)
        items.append(ForwardItem(session, place, (RowGroup(TEXT[place : place + n_row]),), rows="last"))
    for forward, place in zip(case.model.forward(items), places, strict=True):
        last = min(place + n_row, len(TEXT))
        np.testing.assert_array_equal(bits(forward.logits), case.expected[last - 1 : last])


@pytest.mark.parametrize("n_past", [1, 70, 130, 200])
def test_rows_are_evaluated_again_as_they_were(case: Case, n_past: int) -> None:
    """Through the same half-layers, also where tokens went through different ones, or resumed from hidden states."""
    some = some_layers(case, (True, False, True, True), (True, True, False, True))
    session, other = case.model.session(1024), case.model.session(1024)
    for each, n in ((session, 600), (other, n_past)):  # the other one holds no more than is asked for
        hidden = each.forward(TEXT[: min(50, n)], n_past=0, taps=(1,)).hidden[1]
        evaluated(each, 0, RowGroup(vectors=hidden, span=Span(enter=2)))
        for begin in range(50, n, 50):
            each.forward(TEXT[begin : min(begin + 50, n)], n_past=begin, layers=some)
    expected = other.forward(TEXT[:3], n_past=n_past, layers=some, rows="all").logits
    found = session.forward(TEXT[:3], n_past=n_past, layers=some, rows="all").logits
    np.testing.assert_array_equal(bits(found), bits(expected))


@OFTEN
@given(n_past=st.integers(60, 500), drafted=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_drafts_through_some_layers(case: Case, n_past: int, drafted: list[int]) -> None:
    """Rows that leave layers out are drafts: they are evaluated once more, and change nothing of the text."""
    some = some_layers(case, (True, False, True, False), (True, False, False, True))
    session = case.model.session(1024)
    session.forward(TEXT[:n_past], n_past=0)
    for n in drafted:
        for i in range(n):
            session.forward(TEXT[n_past + i : n_past + i + 1], n_past=n_past + i, layers=some)
        check_end(case, session, n_past, n + 1)
        n_past += n


def test_a_text_through_some_layers_goes_on(case: Case) -> None:
    """A long text of which every row leaves layers out has the same bits, whatever the split."""
    some = some_layers(case, (True, False, True, True), (True, True, False, True))
    first, second = case.model.session(1024), case.model.session(1024)
    expected = [bits(first.forward(TEXT[i : i + 1], n_past=i, layers=some).logits) for i in range(100)]
    found = bits(second.forward(TEXT[:100], n_past=0, layers=some, rows="all").logits)
    np.testing.assert_array_equal(found, np.concatenate(expected))


def test_states_without_tokens_can_not_be_evaluated_again(case: Case) -> None:
    """A text of hidden states alone is refused where its states are gone, and taken where they are there."""
    session = case.model.session(1024)
    hidden = np.random.default_rng(1).standard_normal((400, case.model.card.n_embd)).astype(np.float32)
    above = LayerSet(*(np.arange(case.model.card.n_layer) > 1 for _ in range(2)))
    evaluated(session, 0, RowGroup(vectors=hidden, span=Span(enter=2)))
    evaluated(session, 399, RowGroup(vectors=hidden[:2], span=Span(enter=2)))
    with pytest.raises(SessionError, match="began with hidden states"):
        session.forward(TEXT[:1], n_past=70, layers=above)
    if case.model.card.architecture == "lfm2":  # whose columns at the end of a page are there
        evaluated(session, 64, RowGroup(vectors=hidden[:2], span=Span(enter=2)))


def test_what_is_cancelled_is_made_up_for(case: Case) -> None:
    """After a cancellation at any moment the session goes on to the same bits."""
    session = case.model.session(1024)
    for place in (100, 170, 333):
        for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
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
    """Every row has the bits of its own window, which is read again."""
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
    at = data.index(TEXT[:100].tobytes())
    damaged = data[:at] + np.int32(N_VOCAB).tobytes() + data[at + 4 :]
    with pytest.raises(SessionError, match="damaged"):
        session.load(damaged, 100)
    check_end(case, session, 100, 5)


def test_the_memory_plan_counts_the_states(tmp_path: Path) -> None:
    """States and checkpoints don't grow with the text; the log has the rows that a forward may take back."""
    tiny = ARCHITECTURES["qwen35"]
    path = write_tiny(tmp_path / "m.gguf", tiny)
    terms = {term.name: term for term in Cpu().plan(path, LoadOptions(n_ctx=2048, n_parallel=2, max_rows=48))}
    n_values, n_keys = tiny.n_state_head * tiny.n_state, tiny.n_state_key_head * tiny.n_state
    states = 3 * 4 * tiny.n_state_head * tiny.n_state**2
    row = 3 * 4 * ((2 * n_keys + n_values) + n_keys + tiny.n_state_head + n_values)
    assert terms["recurrent states"].n_bytes == 2 * states
    assert terms["rows that may be taken back"].n_bytes == 2 * (48 + 3 + 8) * row
    assert terms["checkpoints of states"].n_bytes == 2 * 4 * (states + 3 * row)
    assert not any(terms[name].grows for name in ("recurrent states", "checkpoints of states"))
    assert terms["KV cache"].n_bytes == 2 * 2048 * 2 * tiny.n_head_kv * tiny.head_dim * 2  # of one layer


def test_the_memory_plan_counts_the_columns(tmp_path: Path) -> None:
    """Whole pages for the newest tokens, the last two columns of all other pages, and what is noted of each token."""
    tiny = replace(ARCHITECTURES["lfm2"], n_ctx_train=4096)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    options = LoadOptions(n_ctx=2048, n_parallel=2)
    terms = {term.name: term for term in Cpu().plan(path, options)}
    n_pages, of_column = 2048 // 64, 3 * tiny.n_embd * 4
    expected = (6 * 64 + (n_pages - 6) * 2) * of_column + 2048 * (4 + 2 * tiny.n_layer)
    assert terms["columns of convolutions"].n_bytes == 2 * expected
    keys = 2 * tiny.n_head_kv * tiny.head_dim * 2  # of the one layer with attention
    assert terms["KV cache"].n_bytes == 2 * 2048 * keys
    network = read_network(read_gguf(path))
    assert kv_types.column_bytes(network, 64) == 64 * of_column + 64 * (4 + 2 * tiny.n_layer)
