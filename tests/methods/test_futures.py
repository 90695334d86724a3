"""ASAp: the law of the next text is enumerated after each text that was learned, and nears the model's own law."""

import math
from typing import Any

import numpy as np
import pytest
from support.decoding.table_branches import END, Ids, random_table
from support.decoding.table_language import LanguageState, divergence, kept_law

from edgedec.constraint import DrawPlace
from edgedec.errors import DeadEndError, OptionError
from edgedec.sampling import Noise, SamplingParams, distribution
from edgedec_methods.futures import AlignedConstraint, Futures

N_VOCAB = 4
TABLE = random_table(8, n_vocab=N_VOCAB, length=4, spread=1.2)
TEXTS: tuple[Ids, ...] = ((1, 3, 1, 2), (1, 2), (1, 2, 3), (2, 1), (2, 3, 3), (3, 3), (3, 1, 1, 1), (3, 1, 2))
LAW, MASS = kept_law(TABLE, TEXTS, N_VOCAB)


def opened(futures: Futures, most: int = 5, dead: tuple[Ids, ...] = (), temperature: float = 1.0) -> AlignedConstraint:
    """Return the constraint of one text."""
    constraint = AlignedConstraint(LanguageState(TEXTS, N_VOCAB, dead), futures, "prompt", temperature)
    constraint.begin(most)
    return constraint


def written(
    futures: Futures, seed: int, most: int = 5, dead: tuple[Ids, ...] = (), temperature: float = 1.0
) -> tuple[Ids, float]:
    """Write a text, which the futures learn; return it with its end token, and the log of its weight."""
    constraint, text = opened(futures, most, dead, temperature), list[int]()
    params = SamplingParams(temperature, top_p=1.0)
    try:
        while not constraint.is_over:
            row = TABLE[tuple(text)]
            token = constraint.choose(DrawPlace(row, params, (), Noise(seed), len(text)), ())
            mass = constraint.log_mass(row, (), temperature)
            text.append(constraint.commit(token))
            constraint.logprob += mass
    except DeadEndError:
        pass
    constraint.close()
    return tuple(text), constraint.logprob


def law_now(futures: Futures, temperature: float = 1.0) -> dict[Ids, float]:
    """Return the law of the next text, by the masked row after every beginning, reached as the path of a draft."""
    constraint, found = opened(futures, temperature=temperature), dict[Ids, float]()
    texts: dict[Ids, float] = {(): 1.0}
    while texts:
        longer = dict[Ids, float]()
        for text, p in texts.items():
            law = distribution(constraint.masked(TABLE[text], text), SamplingParams(temperature, top_p=1.0))
            for token, share in zip(law.token_ids.tolist(), law.probs.tolist(), strict=True):
                ids = (*text, token)
                (found if ids in LAW else longer)[ids] = p * share
        texts = longer
    return found


@pytest.mark.slow
def test_the_law_nears_the_models_own_text_by_text() -> None:
    """KL to the law of the model's texts that keep to the grammar falls, and is 0 once every text was written."""
    futures, seen, kl = Futures(), set[Ids](), [divergence(law_now(Futures()), LAW)]
    for seed in range(600):
        text, weight = written(futures, seed)
        seen.add(text)
        assert text in LAW
        assert weight <= 1e-6 or seed
        kl.append(divergence(law_now(futures), LAW))
    assert kl[0] > 0.5
    assert kl[0] > 2 * kl[10] > 4 * kl[100]
    assert kl[-1] == pytest.approx(0, abs=1e-4 if len(seen) < len(LAW) else 1e-7)
    root = futures.root(("prompt", 5))
    assert root is not None
    assert 1 - root.missing == pytest.approx(MASS, rel=1e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_weights_stay_right_whatever_was_learned(temperature: float) -> None:
    """exp(logprob) is p(text) over the probability with which the text was drawn from what was known then."""
    futures, table = Futures(), {text: row / np.float32(temperature) for text, row in TABLE.items()}
    own, mass = kept_law(table, TEXTS, N_VOCAB)
    for seed in range(40):
        law = law_now(futures, temperature)
        text, weight = written(futures, seed, temperature=temperature)
        assert weight == pytest.approx(math.log(own[text] * mass / law[text]), abs=1e-5)


@pytest.mark.slow
def test_what_was_cut_or_led_nowhere_is_avoided() -> None:
    """Beginnings after which no text ends within the limit, or that have no next token, are drawn less and less."""
    futures = Futures()
    late = [len(written(futures, seed, most=2)[0]) == 2 and written(futures, seed, most=2)[0] for seed in range(200)]
    whole = {(1, 2), (2, 1), (3, 3)}
    assert sum(text in whole for text in late[:20]) < 20
    assert all(text in whole for text in late[100:])
    nowhere = Futures()
    ends = [written(nowhere, seed, dead=((2, 2),))[0] for seed in range(200)]
    assert (2, 2) in ends[:40]
    assert (2, 2) not in ends[40:]


def test_a_text_sees_what_was_known_when_it_began() -> None:
    """A text that ends meanwhile changes nothing; one that was stopped in the middle teaches the rows that it had."""
    futures = Futures()
    early = opened(futures)
    before = early.masked(TABLE[()])
    written(futures, 1)
    assert (early.masked(TABLE[()]) == before).all()
    assert (opened(futures).masked(TABLE[()]) != before).any()
    stopped = Futures()
    constraint = opened(stopped)
    constraint.log_mass(TABLE[()], (), 1.0)
    constraint.commit(3)
    constraint.log_mass(TABLE[3,], (), 1.0)
    constraint.commit(1)
    constraint.close()
    constraint.close()
    root = stopped.root(("prompt", 5))
    assert root is not None
    assert set(root.children) == {3}
    assert root.children[3][1].children == {}


def test_a_text_that_goes_on_from_another_teaches_nothing() -> None:
    """Its first tokens were drawn elsewhere, so their probabilities are not known here."""
    futures = Futures()
    constraint = opened(futures)
    constraint.commit(3)
    constraint.log_mass(TABLE[3,], (), 1.0)
    constraint.commit(3)
    constraint.close()
    assert len(futures) == 0


@pytest.mark.slow
def test_what_is_kept_has_a_limit() -> None:
    """A single prompt learns no more beginnings than there is room for; of several, the oldest are forgotten."""
    for most in (1, 2, 3, 5, 50):
        futures = Futures(most)
        for seed in range(100):
            written(futures, seed)
            assert len(futures) <= most + 1
    futures = Futures(4)
    for most_tokens in (5, 4, 3):
        written(futures, 0, most_tokens)
    assert len(futures) <= 5
    assert futures.root(("prompt", 5)) is None
    assert futures.root(("prompt", 3)) is not None
    wrong: Any
    for wrong in (0, True, 1.5):
        with pytest.raises(OptionError, match="most_nodes"):
            Futures(wrong)


@pytest.mark.slow
def test_end_tokens_count() -> None:
    """A text that could have gone on has its end token in its law: "1 2" and "1 2 3" share their beginning."""
    futures = Futures()
    for seed in range(200):
        written(futures, seed)
    law = law_now(futures)
    assert law[1, 2, END] / law[1, 2, 3] == pytest.approx(LAW[1, 2, END] / LAW[1, 2, 3], rel=1e-3)
