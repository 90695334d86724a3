"""A head that drafts blocks on the cpu runtime: it scores as plain formulas do, and its state goes with the session."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT, loaded, of_floats, of_integers, oracle
from support.heads.reference_block import NOT_SELECTED
from support.heads.tiny_blocks import tiny_block
from support.heads.together import drafted_together
from support.models.tiny_quantized import Tiny

from edgedec.errors import ModelFormatError
from edgedec.head_state import ChainRules, HeadState
from edgedec.load_options import LoadOptions
from edgedec.model import Model, RowGroup, Session, Span
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor

pytestmark = pytest.mark.slow

Rows = list[NDArray[np.float32]]
VANILLA = {"markov": "vanilla", "rank": 6}
SELECTOR = {"markov": "selector", "rank": 6, "top_k": 7, "shifted": False}
KINDS: dict[str, HeadCard] = {
    "plain": of_floats(),
    "unshifted": of_floats({"shifted": False}),
    "causal": of_floats({"causal": True}),
    "two layers": of_floats({"n_layer": 2, **VANILLA}),
    "vanilla, unshifted": of_floats({**VANILLA, "shifted": False}),
    "gated": of_floats({"markov": "gated", "rank": 6}),
    "rnn": of_floats({"markov": "rnn", "rank": 6, "n_layer": 2, "causal": True}),
    "rnn, unshifted": of_floats({"markov": "rnn", "rank": 6, "shifted": False}),
    "confidence": of_floats({**VANILLA, "confidence": True}),
    "confidence alone": of_floats({"confidence": True, "shifted": False}),
    "windows": of_floats({"n_layer": 2, "windows": (3, 0), "causal": True}),
    "a window of a whole block": of_floats({"windows": (5,)}),
    "one row": of_floats({"size": 1}),
    "full vocabulary": of_floats(VANILLA, n_vocab_draft=of_floats().n_vocab_target),
    "own matrices": of_floats(VANILLA, own_embedding=True, own_output=True),
    "mask token": of_floats({"mask_token": 3}),
    "convolutions": of_floats({"n_layer": 2, "conv_length": 2, "conv_group": 16, **VANILLA}),
    "convolutions, unshifted": of_floats({"conv_length": 16, "conv_group": 4, "shifted": False, "causal": True}),
    "selector": of_floats({**SELECTOR, "confidence": True}),
    "dflash2": of_floats({**SELECTOR, "n_layer": 2, "conv_length": 3, "conv_group": 8, "softcap": 9.0}),
    "all selected": of_floats({**SELECTOR, "top_k": 99}),
    "scales": of_floats({"logit_scale": 0.5, "softcap": 2.0, "embedding_scale": 3.0, **VANILLA}),
}
OF_FLOATS = tiny_block(of_floats({**VANILLA, "n_layer": 2}))
OF_INTEGERS = tiny_block(of_integers({"markov": "rnn", "rank": 32, "n_layer": 2, "size": 6, "confidence": True}))
GATED = tiny_block(of_integers({"markov": "gated", "rank": 32, "causal": True, "shifted": False}))
DFLASH2 = tiny_block(
    of_integers({**SELECTOR, "rank": 32, "n_layer": 2, "size": 6, "top_k": 9, "conv_length": 2, "conv_group": 16})
)
PAIRS = [(FLOATS, OF_FLOATS), (INTEGERS, OF_INTEGERS), (INTEGERS, GATED), (INTEGERS, DFLASH2)]


def head_of(session: Session) -> HeadState:
    """Return the head that follows a session."""
    assert session.draft_head is not None
    return session.draft_head


def read(session: Session, begin: int, end: int) -> None:
    """Evaluate a part of the text."""
    session.forward(TEXT[begin:end], n_past=begin)


def read_with_taps(model: Model, n: int, card: HeadCard) -> tuple[Session, NDArray[np.float32]]:
    """Return a session that holds TEXT[:n], and the taps that the head read."""
    session = model.session(320)
    if n == 0:
        return session, np.zeros((0, 3 * card.n_embd_target), np.float32)
    hidden = session.forward(TEXT[:n], n_past=0, taps=tuple(tap - 1 for tap in card.taps)).hidden
    return session, np.concatenate([hidden[tap - 1] for tap in card.taps], axis=1)


def scores(session: Session, n: int) -> Rows:
    """Return the scores after TEXT[: n + 1], of which the session holds n tokens, and after each drafted token."""
    head = head_of(session)
    row = head.begin(n, int(TEXT[n]))
    found = []
    while row is not None:
        found.append(row.copy())
        row = head.next(int(head.token_ids[row.argmax()]))
    return found


def fresh(model: Model, n: int) -> Rows:
    """Return the scores of a new session that read TEXT[:n] at once."""
    session = model.session(320)
    read(session, 0, n)
    return scores(session, n)


def same(found: Rows, expected: Rows) -> bool:
    """Return whether scores have the same bits."""
    return np.array_equal(np.stack(found), np.stack(expected))


def difference(found: Rows, folder: Path, head: Head, taps: NDArray[np.float32]) -> float:
    """Return how far scores are from the plain head's, as a share of its greatest score, along the same tokens.

    A selector may leave out another one of two tokens that are nearly alike; those that both have are compared.
    """
    plain = oracle(folder, head, taps)
    block, path, most = plain.block(int(TEXT[len(taps)])), list[int](), 0.0
    for row in found:
        expected = plain.logits(block, path)
        selected = expected > NOT_SELECTED
        both = selected & (row > NOT_SELECTED)
        assert np.count_nonzero(row > NOT_SELECTED) == np.count_nonzero(selected) <= np.count_nonzero(both) + 1
        most = max(most, float(np.abs(row - expected)[both].max() / np.abs(expected[both]).max()))
        path.append(int(head.d2t[row.argmax()]))
    return most


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_formulas(kind: str, tmp_path: Path) -> None:
    """With floats but for keys and values, all rows are within 0.3 % of the numpy head's largest score."""
    head = tiny_block(KINDS[kind])
    assert head.card.block is not None
    with loaded(tmp_path, FLOATS, head) as model:
        for n in (0, 1, 30, 150):
            session, taps = read_with_taps(model, n, head.card)
            found = scores(session, n)
            assert len(found) == head.card.block.n_drafts
            assert difference(found, tmp_path, head, taps) < 0.003
            session.close()


@pytest.mark.parametrize("head", [OF_INTEGERS, GATED, DFLASH2])
def test_rounded_weights_give_about_the_same_scores(head: Head, tmp_path: Path) -> None:
    """With weights and activations of 8 bits and less the scores are within 5 % of the largest."""
    with loaded(tmp_path, INTEGERS, head) as model:
        session, taps = read_with_taps(model, 30, head.card)
        assert difference(scores(session, 30), tmp_path, head, taps) < 0.05


@pytest.mark.parametrize("kind", ["vanilla, unshifted", "rnn", "confidence", "confidence alone", "dflash2", "selector"])
def test_a_chain_is_the_best_tokens_until_its_path_is_unlikely(kind: str, tmp_path: Path) -> None:
    """It has the head's probabilities and second bests, and ends by how sure the head is, if it says so."""
    head = tiny_block(KINDS[kind])
    assert head.card.block is not None
    with loaded(tmp_path, FLOATS, head) as model:
        session, taps = read_with_taps(model, 20, head.card)
        chain = head_of(session).chain(20, int(TEXT[20]), ChainRules(4))
        assert [n for n, _ in head_of(session).evaluated] == [5 if kind != "rnn" else 4, 1, 1, 1]
        rows = [row.astype(np.float64) for row in scores(session, 20)]
        least = chain.sure[0] * chain.sure[1] * 1.01
        short = head_of(session).chain(20, int(TEXT[20]), ChainRules(4, least_path=least))
    ids, order = head.d2t, [np.argsort(-row, kind="stable") for row in rows[:4]]
    p = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows[:4]]
    assert chain.tokens == tuple(int(ids[best[0]]) for best in order)
    assert chain.second_tokens == tuple(int(ids[best[1]]) for best in order)
    assert np.allclose(chain.p, [row.max() for row in p], rtol=1e-5)
    assert np.allclose(chain.second_p, [np.sort(row)[-2] for row in p], rtol=1e-5)
    assert short.tokens == chain.tokens[:2]
    if not head.card.block.confidence:
        assert chain.sure == chain.p
        return
    plain = oracle(tmp_path, head, taps)
    block = plain.block(int(TEXT[20]))
    expected = [plain.confidence(block, chain.tokens[:i]) for i in range(4)]
    assert np.allclose(chain.sure, expected, atol=0.003)


def test_a_chain_has_no_more_tokens_than_a_block_drafts(tmp_path: Path) -> None:
    """Whatever the rules allow."""
    with loaded(tmp_path, FLOATS, OF_FLOATS) as model:
        session = model.session(100)
        read(session, 0, 20)
        chain = head_of(session).chain(20, int(TEXT[20]), ChainRules(50))
        assert len(chain.tokens) == 5
        assert len(scores(session, 20)) == 5


@pytest.mark.parametrize("kind", ["plain", "vanilla, unshifted", "gated", "rnn", "dflash2"])
def test_branches_score_as_chains_along_their_paths(kind: str, tmp_path: Path) -> None:
    """A node's scores have the bits of next() after the tokens of its path; below the last row there is no room."""
    head = tiny_block(KINDS[kind])
    tokens, parents = [7, 9, 5, 6, 7, 2], [-1, -1, 0, 0, 1, 4]
    with loaded(tmp_path, FLOATS, head) as model:
        session = model.session(100)
        read(session, 0, 20)
        state, found = head_of(session), dict[int, NDArray[np.float32]]()
        assert state.begin(20, int(TEXT[20])) is not None
        for n, n_new in ((2, 2), (5, 3), (6, 1)):
            rows = state.branches(tokens[:n], parents[:n], n_new)
            assert rows is not None
            found |= dict(zip(range(n - n_new, n), rows.copy(), strict=True))
        assert (state.branches([*tokens, 3], [*parents, 5], 1) is None) == (kind in ("vanilla, unshifted", "dflash2"))
        assert state.branches([*tokens, 3, 3], [*parents, 5, 6], 1) is None
        for node, row in found.items():
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            state.begin(20, int(TEXT[20]))
            along = [state.next(tokens[i]) for i in path]
            assert along[-1] is not None
            assert np.array_equal(row, along[-1])


def test_rows_of_a_causal_block_do_not_depend_on_the_rows_behind_them(tmp_path: Path) -> None:
    """A chain of two tokens has the bits of a longer one's first two; of a whole block, all rows are always made."""
    convolved = of_floats({"causal": True, "conv_length": 3, "conv_group": 8})
    for card, n_rows in ((of_floats({**VANILLA, "causal": True}), 2), (convolved, 2), (of_floats(VANILLA), 5)):
        with loaded(tmp_path, FLOATS, tiny_block(card)) as model:
            session = model.session(100)
            read(session, 0, 20)
            long = head_of(session).chain(20, int(TEXT[20]), ChainRules(5))
            short = head_of(session).chain(20, int(TEXT[20]), ChainRules(2))
            assert head_of(session).evaluated[0][0] == n_rows
        assert (short.tokens, short.p, short.second_p) == (long.tokens[:2], long.p[:2], long.second_p[:2])


@pytest.mark.parametrize("pair", PAIRS)
def test_texts_are_drafted_together_as_alone(pair: tuple[Tiny, Head], tmp_path: Path) -> None:
    """Texts of different lengths, with few, many and no rows to read first: each gets the bits that it gets alone."""
    lengths = [3, 20, 41, 70, 89, 20, 289]
    with loaded(tmp_path, *pair) as model:
        groups = []
        for _ in range(2):
            sessions = [model.session(320) for _ in (*lengths, 0)]
            for session, n in zip(sessions, lengths, strict=False):
                read(session, 0, n - 1)
                read(session, n - 1, n)
            groups.append(list(zip(sessions, [*lengths, 30], strict=True)))
        sure = sorted(head_of(session).chain(n, int(TEXT[n]), ChainRules(1)).sure for session, n in groups[0][:-1])
        for rules in (ChainRules(6), ChainRules(3), ChainRules(6, least_path=sure[3][0])):
            alone = [head_of(session).chain(n, int(TEXT[n]), rules) for session, n in groups[0]]
            assert drafted_together(groups[1], TEXT, rules) == alone
            assert alone[-1].tokens == ()
            assert alone[0].tokens
        assert len({len(chain.tokens) for chain in alone}) > 2  # chains that ended while others went on
        for session, n in groups[1][:-1]:  # and the states go on from there
            read(session, n, n + 1)
            assert same(scores(session, n + 1), fresh(model, n + 1))


@pytest.mark.parametrize("pair", PAIRS)
def test_how_a_text_was_read_changes_nothing(pair: tuple[Tiny, Head], tmp_path: Path) -> None:
    """A text read at once, token by token, and in pieces with rejected drafts between them, gives the same scores."""
    n = 70
    with loaded(tmp_path, *pair) as model:
        expected = fresh(model, n)
        slow, drafting, tree = (model.session(200) for _ in range(3))
        for i in range(n):
            read(slow, i, i + 1)
        assert same(scores(slow, n), expected)
        assert same(scores(slow, n), expected)  # with what the first block has left behind the text
        read(drafting, 0, 5)
        for i in range(5, n, 3):  # row 0 stands, two drafted tokens are right, two are not
            head_of(drafting).chain(i, int(TEXT[i]), ChainRules(4))
            wrong = (TEXT[i + 3 : i + 5] + 1) % 100
            drafting.forward(np.concatenate([TEXT[i : i + 3], wrong]), n_past=i, rows="all")
        assert same(scores(drafting, n), expected)
        read(tree, 0, 5)
        for i in range(5, n, 2):  # of two branches the second one is right
            tokens = np.array([TEXT[i], (TEXT[i + 1] + 1) % 100, TEXT[i + 1]], np.int32)
            tree.forward(tokens, n_past=i, parents=np.array([-1, 0, 0], np.int32), rows="all")
            tree.keep(np.array([0, 2], np.int32))
        read(tree, n - 1, n)
        assert same(scores(tree, n), expected)


def test_a_step_back_costs_nothing(tmp_path: Path) -> None:
    """Keys and values of the features before stay, so that drafts go on at once."""
    with loaded(tmp_path, FLOATS, OF_FLOATS) as model:
        session = model.session(200)
        read(session, 0, 50)
        scores(session, 50)
        assert same(scores(session, 30), fresh(model, 30))
        assert head_of(session).begin(31, int(TEXT[31])) is None
        read(session, 0, 50)
        states = session.forward(TEXT[50:51], n_past=50, taps=(2,)).hidden[2].copy()
        evaluated(session, 50, RowGroup(vectors=states, span=Span(enter=3)))  # rows without tokens have no taps
        assert head_of(session).begin(51, int(TEXT[51])) is None
        read(session, 51, 53)
        assert len(scores(session, 53)) == 5


@pytest.mark.parametrize("pair", PAIRS)
def test_forks_and_saved_states_carry_the_head(pair: tuple[Tiny, Head], tmp_path: Path) -> None:
    """A fork, and a session restored from bytes, draft what the first session drafts; so they do after more text."""
    with loaded(tmp_path, *pair) as model, Cpu().load(tmp_path / "m.gguf", LoadOptions(n_ctx=320)) as plain:
        session, other, without = model.session(200), model.session(200), plain.session(200)
        read(session, 0, 40)
        fork, data = session.fork(), session.save()
        other.load(data, 40)
        expected = fresh(model, 40)
        for one in (session, fork, other):
            assert same(scores(one, 40), expected)
            read(one, 40, 60)
            assert same(scores(one, 60), fresh(model, 60))
        read(without, 0, 40)
        other.load(without.save(), 40)
        assert head_of(other).begin(40, int(TEXT[40])) is None
        read(other, 40, 42)
        assert len(scores(other, 42)) == len(expected)


def test_a_head_rests_when_told_to(tmp_path: Path) -> None:
    """A head at rest drafts nothing and reads nothing; it goes on with what comes after follow()."""
    with loaded(tmp_path, FLOATS, OF_FLOATS) as model:
        session = model.session(200)
        read(session, 0, 20)
        head_of(session).rest()
        read(session, 20, 30)
        assert head_of(session).chain(30, int(TEXT[30]), ChainRules(3)).tokens == ()
        assert head_of(session).read_s == 0.0
        head_of(session).follow()
        assert head_of(session).chain(30, int(TEXT[30]), ChainRules(3)).tokens == ()
        read(session, 30, 60)
        assert len(scores(session, 60)) == 5
        head_of(session).let_go()
        assert head_of(session).gone
        assert head_of(session).begin(60, int(TEXT[60])) is None


@pytest.mark.parametrize("pair", PAIRS)
def test_threads_change_no_bit(pair: tuple[Tiny, Head], tmp_path: Path) -> None:
    """With every instruction set of this processor, each of which scores as plain formulas do."""
    for name in instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEDEC_CPU_ISA", name)
            found = []
            for n_threads in (1, 2, 3):
                with loaded(tmp_path, *pair, n_threads=n_threads) as model:
                    session, taps = read_with_taps(model, 150, pair[1].card)
                    found.append(scores(session, 150))
        assert all(same(rows, found[0]) for rows in found)
        assert difference(found[0], tmp_path, pair[1], taps) < (0.003 if pair[0] is FLOATS else 0.05)


def test_frequencies_are_divided(tmp_path: Path) -> None:
    """Of features and of rows of blocks alike."""
    divisors = HeadTensor.of(np.linspace(1, 4, 8, dtype=np.float32))
    head = replace(OF_FLOATS, tensors={**OF_FLOATS.tensors, "rope_divisors": divisors})
    with loaded(tmp_path, FLOATS, head) as model:
        session, taps = read_with_taps(model, 40, head.card)
        found = scores(session, 40)
    assert difference(found, tmp_path, head, taps) < 0.003
    assert difference(found, tmp_path, OF_FLOATS, taps) > 0.01


@pytest.mark.parametrize(
    "name",
    [
        *("markov_w1", "markov_w2", "mask", "layers.1.q", "output_norm"),
        *("layers.0.mlp_conv_base", "layers.1.attention_conv_proj", "selector_hidden", "selector_successor"),
    ],
)
def test_scores_that_are_no_numbers_are_refused(name: str, tmp_path: Path) -> None:
    """Wherever the damage is."""
    head = OF_FLOATS if name in OF_FLOATS.tensors else tiny_block(KINDS["dflash2"])
    values = head.tensors[name].floats().copy()
    values[..., 1] = np.nan
    damaged = replace(head, tensors={**head.tensors, name: HeadTensor.of(values)})
    with loaded(tmp_path, FLOATS, damaged) as model:
        session = model.session(200)
        read(session, 0, 20)
        with pytest.raises(ModelFormatError, match="infinite or no number"):
            head_of(session).chain(20, int(TEXT[20]), ChainRules(3))


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    """Keys and values of all layers; the session's own bytes are below what the plan has for it."""
    with loaded(tmp_path, FLOATS, OF_FLOATS) as model:
        held = {term.name: term.n_bytes for term in model.memory(320, 256)}
        session = model.session(320)
        read(session, 0, 300)
        scores(session, 299)
        assert held["KV cache of the draft head"] == 320 * 2 * 2 * 2 * 16
        assert head_of(session).n_bytes < held["KV cache of the draft head"] + held["taps of the draft head"]
