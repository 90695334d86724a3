"""Deco-G: the format is always kept, and where the hidden Markov model is the model itself, the law is exact."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from support.decoding.table_branches import END, table_texts

from edgedec.errors import DeadEndError, OptionError
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec_methods.deco_g import Format, Hmm, chances, fitted, log_guide, log_likelihood, write

RNG = np.random.default_rng(3)
N_TOKENS, N_VOCAB = 4, 4
# An even number of tokens "a" (1) before the end, and no "c" (3) at all.
EVEN = Format(
    classes=np.array([0, 1, 0, 2]),
    moves=np.array([[0, 1, 2], [1, 0, 2], [2, 2, 2]]),
    accepts=np.array([True, False, False]),
)


def made(n_states: int = 2) -> Hmm:
    """Return a random model in which an end token is followed by end tokens alone."""
    start, move = RNG.dirichlet(np.ones(n_states)), RNG.dirichlet(np.ones(n_states), n_states)
    emit = RNG.dirichlet(np.ones(N_VOCAB), n_states)
    size = n_states + 1  # the last state writes end tokens for ever
    moves, emits = np.zeros((size, size)), np.zeros((size, N_VOCAB))
    moves[:-1, :-1], moves[-1, -1] = 0.75 * move, 1.0
    moves[:-1, -1] = 0.25
    emits[:-1, 1:], emits[-1, END] = emit[:, 1:] / emit[:, 1:].sum(1, keepdims=True), 1.0
    return Hmm(np.append(0.9 * start, 0.1), moves, emits)


def table_of(hmm: Hmm) -> dict[tuple[int, ...], np.ndarray]:
    """Return the model's next-token logits after every text."""
    found = {}
    for n in range(N_TOKENS + 1):
        for ids in product(range(1, N_VOCAB), repeat=n):
            law = hmm.start
            for token in ids:
                law = law * hmm.emit[:, token]
                law = (law / law.sum()) @ hmm.move
            found[ids] = np.log(law @ hmm.emit + 1e-300).astype(np.float32)
    return found


def padded(ids: tuple[int, ...]) -> np.ndarray:
    """Return a text filled up with end tokens."""
    return np.array([*ids, *[END] * (N_TOKENS - len(ids))])


def keeps(ids: tuple[int, ...]) -> bool:
    """Tell whether a text keeps to EVEN."""
    return ids.count(1) % 2 == 0 and 3 not in ids


def all_texts() -> list[tuple[int, ...]]:
    """Return every text without its end token."""
    return [ids for n in range(N_TOKENS + 1) for ids in product(range(1, N_VOCAB), repeat=n)]


def law_of(hmm: Hmm, table: dict[tuple[int, ...], np.ndarray]) -> dict[tuple[int, ...], float]:
    """Return the law of the texts of write() at temperature 1, enumerated token by token."""
    ahead, found = chances(hmm, EVEN, N_TOKENS), dict[tuple[int, ...], float]()

    def go(ids: tuple[int, ...], p: float, law: np.ndarray, place: int) -> None:
        if len(ids) == N_TOKENS:
            found[ids] = p
            return
        scores = table[ids] + log_guide(hmm, EVEN, law, place, ahead[N_TOKENS - len(ids) - 1])
        shares = np.exp(scores - scores.max())
        for token, share in enumerate(shares / shares.sum()):
            if share > 0 and token == END:
                found[ids] = p * share
            elif share > 0:
                after = law * hmm.emit[:, token]
                go(
                    (*ids, token),
                    p * share,
                    (after / after.sum()) @ hmm.move,
                    int(EVEN.moves[place, EVEN.classes[token]]),
                )

    go((), 1.0, hmm.start, 0)
    return found


def test_where_the_hidden_model_is_exact_the_law_is_the_models_own_given_the_format() -> None:
    """All texts of three letters and four tokens are enumerated."""
    hmm = made()
    texts = [ids for ids in all_texts() if keeps(ids)]
    own = np.exp([log_likelihood(hmm, padded(ids)[None])[0] for ids in texts])
    found = law_of(hmm, table_of(hmm))
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) <= set(texts)
    for ids, p in zip(texts, own / own.sum(), strict=True):
        assert found.get(ids, 0.0) == pytest.approx(p, abs=1e-6)


@pytest.mark.slow
def test_tokens_are_drawn_by_the_chance_that_the_format_is_kept_behind_them() -> None:
    """By the hidden model's probabilities of all texts that begin so; its first token tells which state it stays in."""
    moves = np.array([[0.8, 0.0, 0.2], [0.0, 0.8, 0.2], [0.0, 0.0, 1.0]])
    emits = np.array([[0, 0.745, 0.25, 0.005], [0, 0.005, 0.25, 0.745], [1, 0, 0, 0]])
    hmm, params = Hmm(np.array([0.49, 0.49, 0.02]), moves, emits), SamplingParams(1.0, top_p=1.0)
    table = {ids: np.array([-4, 0, 0, 0], np.float32) for ids in all_texts()}
    own = {ids: math.exp(log_likelihood(hmm, padded(ids)[None])[0]) for ids in all_texts()}

    def guide(ids: tuple[int, ...]) -> float:
        found = {text: p for text, p in own.items() if tuple(padded(text)[: len(ids)]) == ids}
        kept = sum(p for text, p in found.items() if keeps(text))
        return math.log(kept / sum(found.values())) if kept else -math.inf

    for seed in range(30):
        ids = tuple[int, ...]()
        while len(ids) < N_TOKENS and END not in ids:
            scores = table[ids] + np.array([guide((*ids, token)) for token in range(N_VOCAB)], np.float32)
            ids = (*ids, draw(scores, params, (1, *ids), Noise(seed), 1 + len(ids)))
        with table_texts(table, max_tokens=N_TOKENS)[0] as texts:
            found = write(texts, hmm, EVEN, N_TOKENS, params, seed)
        assert found.token_ids == tuple(token for token in ids if token != END)


@pytest.mark.slow
def test_with_another_hidden_model_the_format_is_kept_and_drawn_texts_have_the_enumerated_law() -> None:
    """The guide is only as good as that model; what is drawn is what was enumerated."""
    hmm, table = made(), table_of(made(3))
    law = law_of(hmm, table)
    drawn, params = Counter[tuple[int, ...]](), SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    for seed in range(200):
        texts, branches = table_texts(table, max_tokens=N_TOKENS)
        with texts:
            drawn[write(texts, hmm, EVEN, N_TOKENS, params, seed).token_ids] += 1
        assert not branches.held
    assert all(keeps(ids) for ids in drawn)
    for ids, p in law.items():
        assert abs(drawn[ids] / 200 - p) <= 4.5 * math.sqrt(p * (1 - p) / 200) + 5e-3


@pytest.mark.slow
def test_fitting_makes_texts_more_likely_and_finds_a_made_model() -> None:
    """The fitted model's texts are nearly as likely as under the model that made them."""
    hmm = made()
    texts = np.zeros((400, N_TOKENS), np.int64)
    for row in texts:
        state = RNG.choice(3, p=hmm.start)
        for t in range(N_TOKENS):
            row[t] = RNG.choice(N_VOCAB, p=hmm.emit[state])
            state = RNG.choice(3, p=hmm.move[state])
    means = [log_likelihood(fitted(texts, 3, N_VOCAB, n_rounds=n), texts).mean() for n in (1, 5, 40)]
    assert means == sorted(means)
    assert means[-1] > log_likelihood(hmm, texts).mean() - 0.02


def test_what_is_refused() -> None:
    """Automatons whose numbers are out of range, and formats that nothing keeps to."""
    for wrong in ({"classes": np.array([0, 3])}, {"moves": np.array([[0, 1, 3]])}, {"accepts": np.array([True])}):
        with pytest.raises(OptionError):
            Format(**{"classes": EVEN.classes, "moves": EVEN.moves, "accepts": EVEN.accepts} | wrong)
    never = Format(EVEN.classes, EVEN.moves, np.array([False, False, False]))
    texts, _ = table_texts(table_of(made()), max_tokens=N_TOKENS)
    with texts, pytest.raises(DeadEndError):
        write(texts, made(), never, N_TOKENS, SamplingParams(), 0)
