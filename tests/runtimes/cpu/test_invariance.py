"""A row's logits are the same bits however they are asked for: by tokens, chunks, trees, forks, sessions and threads.

Every way is compared with single steps on one thread, on tiny models whose matrices have all the tensor types, for
each instruction set of this machine, and with less effort on SmolLM2 135M.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forwards import evaluated
from support.models.code_paths import CODE_PATHS, each_architecture
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, write_tiny
from support.models.tiny_runs import Bits, Tokens, bits, extend, one_by_one, paths

from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session, Span
from edgedec_runtimes.cpu.library import KV_TYPES, instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

N_CTX = 128
N_TEXT = 40
GUARDS = ("llama", "mamba2", "gpt-oss")  # a dense, a recurrent and a mixture model: with the best instruction set
CHUNK = 256  # rows that go through the layers together
QUICK = settings(max_examples=5, deadline=None)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on two threads, a text, and the text's logits from single steps on one thread."""

    model: Model
    text: Tokens
    expected: Bits

    def session(self, n_cached: int = 0) -> Session:
        """Open a session that holds the first tokens of the text."""
        session = self.model.session(N_CTX)
        if n_cached:
            session.forward(self.text[:n_cached], n_past=0)
        return session


@dataclass(frozen=True, slots=True)
class Kind:
    """An architecture, an instruction set and an element type of the KV cache."""

    architecture: str
    instruction_set: str
    kv_type: str

    def __str__(self) -> str:
        isa = "best" if self.instruction_set == instruction_sets()[0] else self.instruction_set
        return f"{self.architecture}-{isa}-{self.kv_type}"


def kinds() -> list[Any]:
    """Return parameters: every architecture with every instruction set, with KV types in turn.

    The lane `long` has most of them. The others are llama with every instruction set, each member of CODE_PATHS with
    one of them in turn, and an architecture with biases of its keys with every KV type that rounds.
    """
    isas, kv_types = instruction_sets(), tuple(KV_TYPES)
    found: list[Any] = [Kind("qwen2", isas[0], kv_type) for kv_type in kv_types if kv_type != "f16"]
    for i, name in enumerate([*CODE_PATHS, *(name for name in ARCHITECTURES if name not in CODE_PATHS)]):
        for j, isa in enumerate(isas):
            is_short = name == "llama" or (name in CODE_PATHS and j == i % len(isas)) or (name in GUARDS and j == 0)
            kind = Kind(name, isa, kv_types[(i // len(isas) + j) % len(kv_types)])
            found.append(pytest.param(kind, marks=() if is_short else pytest.mark.long))
    return found


def load(path: Path, kind: Kind, n_threads: int) -> Model:
    """Load a model with an instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEDEC_CPU_ISA", kind.instruction_set)
        options = LoadOptions(n_ctx=N_CTX, n_parallel=4, n_threads=n_threads, kv_type=kind.kv_type)
        return Cpu().load(path, options)


def tokens(n: int, n_vocab: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


@pytest.fixture(scope="module", params=kinds(), ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny model of an architecture with matrices of all types."""
    kind: Kind = request.param
    tiny = replace(ARCHITECTURES[kind.architecture], types=TILE_TYPES, seed=3)
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny)
    text = tokens(N_TEXT, 260)
    with load(path, kind, 1) as model:
        expected = one_by_one(model.session(N_CTX), text)
    with load(path, kind, 2) as model:
        yield Case(model, text, expected)


@pytest.fixture(scope="module", params=list(KV_TYPES))
def real(request: pytest.FixtureRequest, smollm_path: Path) -> Iterator[Case]:
    """The real 135M model, with a shorter text."""
    kind = Kind("llama", instruction_sets()[0], request.param)
    with load(smollm_path, kind, 1) as model:
        text = np.array(model.tokenizer.encode("The quick brown fox jumps over the lazy dog, and the"), np.int32)
        expected = one_by_one(model.session(N_CTX), text)
    with load(smollm_path, kind, 2) as model:
        yield Case(model, text, expected)


@QUICK
@given(sizes=st.lists(st.integers(1, 13), max_size=40).map(tuple))
def test_any_split_of_the_prompt(case: Case, sizes: tuple[int, ...]) -> None:
    """One forward, single steps and any chunks in between."""
    session = case.session()
    np.testing.assert_array_equal(extend(session, case.text, sizes), case.expected)
    session.close()


@QUICK
@given(wanted=st.sets(st.integers(0, N_TEXT - 1), min_size=1))
def test_any_rows_asked_for(case: Case, wanted: set[int]) -> None:
    """A row is the same whichever others are returned."""
    rows = np.array(sorted(wanted), np.int32)
    logits = case.session().forward(case.text, n_past=0, rows=rows).logits
    np.testing.assert_array_equal(bits(logits), case.expected[rows])


@QUICK
@given(data=st.data())
def test_going_back_and_on(case: Case, data: st.DataObject) -> None:
    """After other tokens, a rollback by n_past leaves no trace."""
    session = case.session()
    for seed in range(3):
        n_kept = data.draw(st.integers(0, session.n_cached))
        n_other = data.draw(st.integers(1, 20))
        session.forward(tokens(n_other, case.model.card.n_vocab, seed), n_past=n_kept)
        n_back = min(n_kept, data.draw(st.integers(0, N_TEXT - 1)))
        found = bits(session.forward(case.text[n_back:], n_past=n_back, rows="all").logits)
        np.testing.assert_array_equal(found, case.expected[n_back:])


@QUICK
@given(cuts=st.lists(st.integers(1, N_TEXT - 1), min_size=2, max_size=4, unique=True), n_more=st.integers(1, 9))
def test_rows_of_other_sessions(case: Case, cuts: list[int], n_more: int) -> None:
    """Sessions at different positions in one forward, chains and single tokens, do not touch each other."""
    sessions = [case.session(cut) for cut in cuts]
    ends = [min(N_TEXT, cut + (n_more if i % 2 else 1)) for i, cut in enumerate(cuts)]
    items = [
        ForwardItem(session, cut, (RowGroup(case.text[cut:end]),), rows="all")
        for session, cut, end in zip(sessions, cuts, ends, strict=True)
    ]
    for forward, cut, end in zip(case.model.forward(items), cuts, ends, strict=True):
        np.testing.assert_array_equal(bits(forward.logits), case.expected[cut:end])


@QUICK
@given(data=st.data(), n_prefix=st.integers(0, 37), n_rows=st.integers(1, 24))
def test_trees_equal_their_chains(case: Case, data: st.DataObject, n_prefix: int, n_rows: int) -> None:
    """Every node has its path's bits; after keep() the session goes on as if the path had been a chain."""
    check_tree(case, data, n_prefix, n_rows)


def check_tree(case: Case, data: st.DataObject, n_prefix: int, n_rows: int) -> None:
    """Draw a tree, compare every node, keep one path and go on."""
    parents = np.array([data.draw(st.integers(-1, i - 1)) for i in range(n_rows)], np.int32)
    nodes = tokens(n_rows, case.model.card.n_vocab, n_rows)
    session, chain = case.session(n_prefix), case.session(n_prefix)
    found = bits(session.forward(nodes, n_past=n_prefix, parents=parents, rows="all").logits)
    for row, path in enumerate(paths(parents)):
        logits = chain.forward(nodes[path], n_past=n_prefix).logits
        np.testing.assert_array_equal(found[row : row + 1], bits(logits))
    path = paths(parents)[data.draw(st.integers(0, n_rows - 1))]
    session.keep(np.array(path, np.int32))
    chain.forward(nodes[path], n_past=n_prefix)
    assert session.n_cached == chain.n_cached == n_prefix + len(path)
    np.testing.assert_array_equal(extend(session, case.text[:5]), one_by_one(chain, case.text[:5]))


def test_trees_beside_chains_of_other_sessions(case: Case) -> None:
    """A tree and a chain in one forward are what each is by itself."""
    parents = np.array([-1, 0, 0, 1, -1, 4], np.int32)
    alone, together, chain = case.session(9), case.session(9), case.session(20)
    expected = bits(alone.forward(case.text[:6], n_past=9, parents=parents, rows="all").logits)
    items = [
        ForwardItem(together, 9, (RowGroup(case.text[:6], sees=parents),), rows="all"),
        ForwardItem(chain, 20, (RowGroup(case.text[20:25]),), rows="all"),
    ]
    tree, others = case.model.forward(items)
    np.testing.assert_array_equal(bits(tree.logits), expected)
    np.testing.assert_array_equal(bits(others.logits), case.expected[20:25])


@QUICK
@given(n_shared=st.integers(1, N_TEXT - 1), n_other=st.integers(1, 30))
def test_forks_go_on_by_themselves(case: Case, n_shared: int, n_other: int) -> None:
    """Both sessions write behind the shared prefix, and neither sees the other."""
    first = case.session(n_shared)
    second = first.fork()
    third = second.fork()
    first.forward(tokens(n_other, case.model.card.n_vocab), n_past=n_shared)
    np.testing.assert_array_equal(extend(second, case.text[n_shared:]), case.expected[n_shared:])
    first.close()
    np.testing.assert_array_equal(extend(third, case.text[n_shared:], (1, 2, 3)), case.expected[n_shared:])
    np.testing.assert_array_equal(bits(second.forward(case.text[1:], n_past=1, rows="all").logits), case.expected[1:])


@pytest.mark.parametrize("n_prefix", [0, 11])
def test_hidden_states_resume(case: Case, n_prefix: int) -> None:
    """The layers above a tap, resumed from it, give the whole forward's bits, in chunks and with a tree as well."""
    if not case.model.capabilities.hidden_input:
        pytest.skip("its layers also read tokens")
    session = case.session(n_prefix)
    rows = case.text[n_prefix : n_prefix + 12]
    layers = tuple(range(case.model.card.n_layer - 1))
    hidden = session.forward(rows, n_past=n_prefix, taps=layers).hidden
    for layer in layers:
        again = evaluated(session, n_prefix, RowGroup(vectors=hidden[layer], span=Span(enter=layer + 1)), rows="all")
        np.testing.assert_array_equal(bits(again.logits), case.expected[n_prefix : n_prefix + len(rows)])
        for i in (0, 5):
            end = len(rows) if i else 5
            part = evaluated(session, n_prefix + i, RowGroup(vectors=hidden[layer][i:end], span=Span(enter=layer + 1)))
            np.testing.assert_array_equal(bits(part.logits), case.expected[n_prefix + end - 1 : n_prefix + end])


def test_saved_sessions_go_on(case: Case) -> None:
    session, other = case.session(17), case.session(30)
    other.load(session.save(), 17)
    np.testing.assert_array_equal(extend(other, case.text[17:]), case.expected[17:])


@pytest.mark.parametrize("name", each_architecture())
def test_prefill_in_several_chunks(tmp_path: Path, name: str) -> None:
    """Over borders of chunks, in any pieces, and beside a second session, the bits are those of single steps.

    The architectures have the element types of keys and values in turn.
    """
    tiny = replace(ARCHITECTURES[name], types=TILE_TYPES, seed=4)
    path, n = write_tiny(tmp_path / "m.gguf", tiny), CHUNK + 70
    wanted = np.array([0, 63, 64, CHUNK - 1, CHUNK, CHUNK + 1, n - 1], np.int32)
    kv_types = tuple(KV_TYPES)
    kind = Kind(name, instruction_sets()[0], kv_types[list(ARCHITECTURES).index(name) % len(kv_types)])
    with load(path, kind, 2) as model:
        text = tokens(n, 260, 5)
        expected = one_by_one(model.session(n), text)
        found = model.session(n).forward(text, n_past=0, rows=wanted).logits
        np.testing.assert_array_equal(bits(found), expected[wanted])
        for sizes in ((15, 16, 17, 131, 97), (65, 1, 256)):  # from 16 rows on, weights are unpacked once
            np.testing.assert_array_equal(extend(model.session(n), text, sizes), expected)
        odd = model.session(n)
        odd.forward(text[:100], n_past=0)
        second = model.session(n)
        both = model.forward(
            [
                ForwardItem(odd, 100, (RowGroup(text[100:]),)),
                ForwardItem(second, 0, (RowGroup(text[:300]),), rows=wanted[:5]),
            ]
        )
        np.testing.assert_array_equal(bits(both[0].logits), expected[-1:])
        np.testing.assert_array_equal(bits(both[1].logits), expected[wanted[:5]])
        for forward in both:
            assert forward.best == forward.logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
@pytest.mark.parametrize(
    "name", each_architecture(("llama", "gemma3", "gemma4", "gemma4-moe"), short=("llama", "gemma4"))
)
def test_long_contexts_on_any_number_of_threads(tmp_path: Path, name: str, kv_type: str) -> None:
    """Threads share one query's attention over a long context; a step, a chain and a tree have a prefill's bits."""
    tiny = replace(ARCHITECTURES[name], types=TILE_TYPES, seed=6)
    path, text = write_tiny(tmp_path / "m.gguf", tiny), tokens(300, 260, 7)
    parents = np.array([-1, 0, 1, -1, 3, 4], np.int32)  # two equal branches
    for isa in instruction_sets():
        with load(path, Kind(name, isa, kv_type), 1) as model:
            expected = extend(model.session(300), text, (250,))
        for n_threads in (2, 3):
            with load(path, Kind(name, isa, kv_type), n_threads) as model:
                session = model.session(303)
                session.forward(text[:297], n_past=0)
                for n_past in (297, 257, 255, 254, 127, 126):
                    branch = expected[n_past : n_past + 3]
                    for n in (1, 2):
                        chain = session.forward(text[n_past : n_past + n], n_past=n_past, rows="all")
                        np.testing.assert_array_equal(bits(chain.logits), branch[:n])
                    twice = np.tile(text[n_past : n_past + 3], 2)
                    tree = session.forward(twice, n_past=n_past, parents=parents, rows="all")
                    np.testing.assert_array_equal(bits(tree.logits), np.concatenate([branch, branch]))


@pytest.mark.model
def test_a_real_model_in_chunks_and_steps(real: Case) -> None:
    """Single steps on one thread, one forward on two, and chunks."""
    for sizes in ((), (5, 1, 2), (8,)):
        np.testing.assert_array_equal(extend(real.session(), real.text, sizes), real.expected)


@pytest.mark.model
@settings(max_examples=3, deadline=None)
@given(data=st.data(), n_rows=st.integers(2, 16))
def test_trees_of_a_real_model(real: Case, data: st.DataObject, n_rows: int) -> None:
    check_tree(real, data, 7, n_rows)


@pytest.mark.model
def test_forks_sessions_and_resumed_forwards_of_a_real_model(real: Case) -> None:
    """Two forks in one forward with a third session; then hidden states."""
    text, expected = real.text, real.expected
    first, other = real.session(6), real.session(2)
    second = first.fork()
    items = [
        ForwardItem(first, 6, (RowGroup(text[6:9]),), rows="all"),
        ForwardItem(second, 6, (RowGroup(text[6:7]),)),
        ForwardItem(other, 2, (RowGroup(text[2:3]),)),
    ]
    forwards = real.model.forward(items)
    np.testing.assert_array_equal(bits(forwards[0].logits), expected[6:9])
    np.testing.assert_array_equal(bits(forwards[1].logits), expected[6:7])
    np.testing.assert_array_equal(bits(forwards[2].logits), expected[2:3])
    hidden = second.forward(text[7:], n_past=7, taps=(14,)).hidden[14]
    again = evaluated(second, 7, RowGroup(vectors=hidden, span=Span(enter=15)), rows="all")
    np.testing.assert_array_equal(bits(again.logits), expected[7:])
