"""A head that drafts blocks on the cpu runtime: it scores as plain formulas do, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.heads.followed import (
    BLOCK_FLOATS,
    DFLASH2,
    GATED,
    RNN,
    SELECTOR,
    VANILLA,
    chain,
    fresh,
    head_of,
    read,
    scores,
)
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT, loaded, of_floats, oracle
from support.heads.reference_block import NOT_SELECTED
from support.heads.tiny_blocks import tiny_block
from support.models.tiny_quantized import Tiny

from edgedec.errors import ModelFormatError
from edgedec.head_state import ChainRules
from edgedec.model import Model, RowGroup, Session, Span
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor

pytestmark = pytest.mark.slow

Rows = NDArray[np.float32]

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
PAIRS = [(FLOATS, BLOCK_FLOATS), (INTEGERS, RNN), (INTEGERS, GATED), (INTEGERS, DFLASH2)]


def read_with_taps(model: Model, n: int, card: HeadCard) -> tuple[Session, Rows]:
    """Return a session that holds TEXT[:n], and the taps that the head read."""
    session = model.session(320)
    if n == 0:
        return session, np.zeros((0, 3 * card.n_embd_target), np.float32)
    hidden = session.forward(TEXT[:n], n_past=0, taps=tuple(tap - 1 for tap in card.taps)).hidden
    return session, np.concatenate([hidden[tap - 1] for tap in card.taps], axis=1)


def difference(found: Rows, folder: Path, head: Head, taps: Rows) -> float:
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


@pytest.mark.parametrize("head", [RNN, GATED, DFLASH2])
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
        best = chain(session, 20, ChainRules(4))
        assert [n for n, _ in head_of(session).evaluated] == [5 if kind != "rnn" else 4, 1, 1, 1]
        rows = scores(session, 20, 4).astype(np.float64)
        short = chain(session, 20, ChainRules(4, least_path=best.sure[0] * best.sure[1] * 1.01))
    ids, order = head.d2t, [np.argsort(-row, kind="stable") for row in rows]
    p = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows]
    assert best.tokens == tuple(int(ids[first]) for first, *_ in order)
    assert best.second_tokens == tuple(int(ids[second]) for _, second, *_ in order)
    assert np.allclose(best.p, [row.max() for row in p], rtol=1e-5)
    assert np.allclose(best.second_p, [np.sort(row)[-2] for row in p], rtol=1e-5)
    assert short.tokens == best.tokens[:2]
    if not head.card.block.confidence:
        assert best.sure == best.p
        return
    plain = oracle(tmp_path, head, taps)
    block = plain.block(int(TEXT[20]))
    expected = [plain.confidence(block, best.tokens[:i]) for i in range(4)]
    assert np.allclose(best.sure, expected, atol=0.003)


def test_a_chain_has_no_more_tokens_than_a_block_drafts(tmp_path: Path) -> None:
    with loaded(tmp_path, FLOATS, BLOCK_FLOATS) as model:
        session = model.session(100)
        read(session, 0, 20)
        assert len(chain(session, 20, ChainRules(50)).tokens) == 5
        assert len(scores(session, 20)) == 5


@pytest.mark.parametrize("kind", ["plain", "vanilla, unshifted", "gated", "rnn", "dflash2"])
def test_branches_score_as_chains_along_their_paths(kind: str, tmp_path: Path) -> None:
    """A node's scores have the bits of next() after the tokens of its path; below the last row there is no room."""
    head = tiny_block(KINDS[kind])
    tokens, parents = [7, 9, 5, 6, 7, 2], [-1, -1, 0, 0, 1, 4]
    with loaded(tmp_path, FLOATS, head) as model:
        session = model.session(100)
        read(session, 0, 20)
        state, found = head_of(session), dict[int, Rows]()
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
            long = chain(session, 20, ChainRules(5))
            short = chain(session, 20, ChainRules(2))
            assert head_of(session).evaluated[0][0] == n_rows
        assert (short.tokens, short.p, short.second_p) == (long.tokens[:2], long.p[:2], long.second_p[:2])


def test_a_step_back_costs_nothing(tmp_path: Path) -> None:
    """Keys and values of the features before stay, so that drafts go on at once."""
    with loaded(tmp_path, FLOATS, BLOCK_FLOATS) as model:
        session = model.session(200)
        read(session, 0, 50)
        scores(session, 50)
        assert np.array_equal(scores(session, 30), fresh(model, 30))
        assert head_of(session).begin(31, int(TEXT[31])) is None
        read(session, 0, 50)
        states = session.forward(TEXT[50:51], n_past=50, taps=(2,)).hidden[2].copy()
        evaluated(session, 50, RowGroup(vectors=states, span=Span(enter=3)))  # rows without tokens have no taps
        assert head_of(session).begin(51, int(TEXT[51])) is None
        read(session, 51, 53)
        assert len(scores(session, 53)) == 5


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
        assert all(np.array_equal(rows, found[0]) for rows in found)
        assert difference(found[0], tmp_path, pair[1], taps) < (0.003 if pair[0] is FLOATS else 0.05)


def test_frequencies_are_divided(tmp_path: Path) -> None:
    """Of features and of rows of blocks alike."""
    divisors = HeadTensor.of(np.linspace(1, 4, 8, dtype=np.float32))
    head = replace(BLOCK_FLOATS, tensors={**BLOCK_FLOATS.tensors, "rope_divisors": divisors})
    with loaded(tmp_path, FLOATS, head) as model:
        session, taps = read_with_taps(model, 40, head.card)
        found = scores(session, 40)
    assert difference(found, tmp_path, head, taps) < 0.003
    assert difference(found, tmp_path, BLOCK_FLOATS, taps) > 0.01


@pytest.mark.parametrize(
    "name",
    [
        *("markov_w1", "markov_w2", "mask", "layers.1.q", "output_norm"),
        *("layers.0.mlp_conv_base", "layers.1.attention_conv_proj", "selector_hidden", "selector_successor"),
    ],
)
def test_scores_that_are_no_numbers_are_refused(name: str, tmp_path: Path) -> None:
    head = BLOCK_FLOATS if name in BLOCK_FLOATS.tensors else tiny_block(KINDS["dflash2"])
    values = head.tensors[name].floats().copy()
    values[..., 1] = np.nan
    damaged = replace(head, tensors={**head.tensors, name: HeadTensor.of(values)})
    with loaded(tmp_path, FLOATS, damaged) as model:
        session = model.session(200)
        read(session, 0, 20)
        with pytest.raises(ModelFormatError, match="infinite or no number"):
            chain(session, 20, ChainRules(3))


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    """Keys and values of all layers; the session's own bytes are below what the plan has for it."""
    with loaded(tmp_path, FLOATS, BLOCK_FLOATS) as model:
        held = {term.name: term.n_bytes for term in model.memory(320, 256)}
        session = model.session(320)
        read(session, 0, 300)
        scores(session, 299)
        assert held["KV cache of the draft head"] == 320 * 2 * 2 * 2 * 16
        assert head_of(session).n_bytes < held["KV cache of the draft head"] + held["taps of the draft head"]
