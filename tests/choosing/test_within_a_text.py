"""CNTP, AdaDec, pruning in mid-text and PG-TD against plain forms without forks, and what they reduce to."""

import math

import numpy as np
import pytest
from support.table_branches import END, Ids, Table, letters, log_law, random_table, table_texts

from edgedec.choosing.adadec import LookAhead, reranked
from edgedec.choosing.cntp import Caution, cautious
from edgedec.choosing.judgement import Question, chance_yes
from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.planning import Planning, planned
from edgedec.choosing.sampled_steps import seeds_from
from edgedec.choosing.self_evaluation import auroc, pruned
from edgedec.errors import OptionError
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.noise import Noise
from edgedec.sampling import SamplingParams, draw

PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
N_VOCAB, LENGTH = 5, 6
PROMPT = (1,)


def table_of(seed: int) -> Table:
    """Return a table whose texts have up to LENGTH tokens."""
    return random_table(seed, n_vocab=N_VOCAB, length=LENGTH)


def said(text: PartialText) -> Ids:
    """Return a text's tokens, its end token included."""
    return (*text.token_ids, END) if text.ended == "stop" else text.token_ids


def is_over(ids: Ids) -> bool:
    """Tell whether a text has ended."""
    return len(ids) >= LENGTH or (bool(ids) and ids[-1] == END)


def greedy(table: Table, ids: Ids = ()) -> Ids:
    """Return the greedy text behind some tokens."""
    while not is_over(ids):
        ids = (*ids, int(np.argmax(table[ids])))
    return ids


def sampled(table: Table, seed: int, ids: Ids = ()) -> Ids:
    """Return the text that a seed writes behind some tokens."""
    while not is_over(ids):
        seen = (*PROMPT, *ids)
        ids = (*ids, draw(table[ids], PARAMS, seen, Noise(seed), len(seen)))
    return ids


def plain_cautious(table: Table, seed: int, caution: Caution) -> Ids:
    """Write with caution, one trial after another, each from its beginning."""
    ids: Ids = ()
    while not is_over(ids):
        n = caution.n_trials(entropy_of(table[ids], NUMPY_ROW_OPS))
        trials = list[Ids]()
        for k in range(n):
            trial, n_most = ids, caution.most_tokens if n > 1 else 1
            while not is_over(trial) and len(trial) - len(ids) < n_most:
                seen = (*PROMPT, *trial)
                trial = (*trial, draw(table[trial], PARAMS, seen, Noise(seed + k), len(seen)))
            trials.append(trial)
        ids = max(trials, key=lambda trial: (log_law(table, trial) - log_law(table, ids)) / (len(trial) - len(ids)))
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_cautious_texts_are_those_of_trials_one_by_one(seed: int) -> None:
    """Forked trials in common forwards choose what trials one after another choose."""
    table, caution = table_of(seed), Caution(4, 0.5, 1.8, most_tokens=3)
    texts, branches = table_texts(table, max_tokens=LENGTH)
    with texts:
        assert said(cautious(texts, PARAMS, seed, caution)) == plain_cautious(table, seed, caution)
        assert len(branches.held) == 1
    assert not branches.held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("caution", [Caution(1), Caution(5, low=50.0, high=60.0)])
def test_without_trials_it_is_plain_sampling(seed: int, caution: Caution) -> None:
    """One trial at most, or no position that is unsure: the text of the seed."""
    texts, _ = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        assert said(cautious(texts, PARAMS, seed, caution)) == sampled(table_of(seed), seed)


def test_a_trial_ends_at_punctuation() -> None:
    """A trial stops after the first token that has a punctuation mark, and that token stays."""
    table = table_of(1)
    texts, _ = table_texts(table, max_tokens=LENGTH)
    texts.decode = lambda ids: letters(ids).replace("a", ".")
    with texts:
        written = said(cautious(texts, PARAMS, 0, Caution(8, 0.0, 0.1, most_tokens=LENGTH)))
    assert all(token in range(N_VOCAB) for token in written)
    assert is_over(written)


def plain_reranked(table: Table, ahead: LookAhead) -> Ids:
    """Decode with a look-ahead at every unsure position, each from its beginning, one token a time."""
    ids: Ids = ()
    while not is_over(ids):
        order = np.argsort(-table[ids], kind="stable")
        token = int(order[0])
        if entropy_of(table[ids], NUMPY_ROW_OPS) >= ahead.entropy:
            found = dict[int, float]()
            for candidate in map(int, order[: ahead.n_candidates]):
                look = (*ids, candidate)
                while not is_over(look) and len(look) - len(ids) < ahead.n_tokens:
                    look = (*look, int(np.argmax(table[look])))
                found[candidate] = (log_law(table, look) - log_law(table, ids)) / (len(look) - len(ids))
            token = max(found, key=found.__getitem__)
        ids = (*ids, token)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead", [LookAhead(1.2, 3, 3), LookAhead(0.0, 2, 5), LookAhead(1.9, 4, 2)])
def test_reranked_texts_are_those_of_look_aheads_one_by_one(seed: int, ahead: LookAhead) -> None:
    """What is kept of a winner's look-ahead is what decoding on would have written."""
    texts, branches = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        found = reranked(texts, ahead)
        assert said(found) == plain_reranked(table_of(seed), ahead)
        assert found.logprob == pytest.approx(log_law(table_of(seed), said(found)), abs=1e-5)
        assert len(branches.held) == 1
    assert not branches.held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ahead", [LookAhead(math.inf), LookAhead(0.0, n_candidates=1)])
def test_without_look_aheads_it_is_greedy(seed: int, ahead: LookAhead) -> None:
    """An infinite threshold, or one candidate."""
    texts, _ = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        assert said(reranked(texts, ahead)) == greedy(table_of(seed))


@pytest.mark.parametrize("seed", range(10))
def test_pruned_texts_are_those_of_their_seeds(seed: int) -> None:
    """The kept ones have the best judgements after so many tokens, and go on as if nothing had been judged."""
    table, question = table_of(seed), Question((2,), (1, 2), (3, 4))
    texts, branches = table_texts(table, max_tokens=4)
    with texts:
        root = texts.begin()
        live = [root, *(texts.fork(root) for _ in range(5))]
        seeds = seeds_from(seed, 6)
        begun = [sampled(table, each)[:2] for each in seeds]
        chances = [chance_yes(table[(*[t for t in ids if t != END], 2)], question) for ids in begun]
        order = sorted(range(6), key=lambda i: -chances[i])[:3]
        found, kept = pruned(texts, live, PARAMS, seeds, question, at=2, keep=3)
        assert [said(text) for text in found] == [sampled(table, seeds[i])[:4] for i in sorted(order)]
        assert kept == [chances[i] for i in sorted(order)]
        assert len(branches.held) == 3
        with pytest.raises(OptionError):
            pruned(texts, found, PARAMS, seeds, question, at=2, keep=4)
    assert not branches.held


def test_auroc_counts_pairs() -> None:
    """Against all pairs of random scores, with ties."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 5, 12).tolist()
        right = (rng.random(12) < 0.5).tolist()
        pairs = [
            (a, b) for a, x in zip(scores, right, strict=True) if x for b, y in zip(scores, right, strict=True) if not y
        ]
        found = auroc(scores, right)
        if pairs:
            assert found == pytest.approx(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))
        else:
            assert found is None


def reward_by(goal: Ids) -> "object":
    """Return a reward: the share of a goal's tokens that a text has at their places."""

    def reward(texts: PartialTexts, live: "list[PartialText]", /) -> list[float]:
        return [sum(a == b for a, b in zip(text.token_ids, goal, strict=False)) / len(goal) for text in live]

    return reward


@pytest.mark.parametrize("seed", range(10))
def test_one_rollout_is_greedy(seed: int) -> None:
    """The first text that is judged is greedy decoding's."""
    table = table_of(seed)
    texts, branches = table_texts(table, max_tokens=LENGTH)
    with texts:
        found = planned(texts, reward_by((1, 2, 3)), Planning(n_rollouts=1))  # type: ignore[arg-type]
        assert found.text.token_ids == tuple(token for token in greedy(table) if token != END)
        assert found.n_rollouts == 1
    assert not branches.held


@pytest.mark.parametrize("seed", range(6))
def test_planning_finds_what_only_a_search_finds(seed: int) -> None:
    """With all tokens as children and enough rollouts, it finds a text that greedy decoding would not write."""
    table = random_table(seed, n_vocab=3, length=3)
    goal = (2, 1, 2)
    texts, branches = table_texts(table, max_tokens=3)
    with texts:
        found = planned(texts, reward_by(goal), Planning(n_rollouts=64, n_children=3, least=0.0))  # type: ignore[arg-type]
        assert found.text.token_ids == goal
        assert found.reward == 1
        assert found.n_rollouts <= 1 + 2 + 4 + 8 + 15
    assert not branches.held


def test_planning_ends_when_everything_was_tried() -> None:
    """A reward that is never 1: every text is judged once or more, and the search stops by itself."""
    table = random_table(0, n_vocab=3, length=2)
    texts, branches = table_texts(table, max_tokens=2)
    with texts:
        judged: list[Ids] = []

        def reward(texts: PartialTexts, live: "list[PartialText]", /) -> list[float]:
            judged.extend(said(text) for text in live)
            return [0.5] * len(live)

        found = planned(texts, reward, Planning(n_rollouts=256, least=0.0))  # type: ignore[arg-type]
        assert set(judged) == {(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}
        assert found.n_rollouts == len(judged) < 20
    assert not branches.held


def test_options_out_of_range_are_refused() -> None:
    """Each with a message that says what is accepted."""
    for make in (
        lambda: Caution(0),
        lambda: Caution(10**6),
        lambda: Caution(2, low=3.0, high=1.0),
        lambda: Caution(2, most_tokens=0),
        lambda: LookAhead(math.nan),
        lambda: LookAhead(n_candidates=0),
        lambda: LookAhead(n_tokens=10**6),
        lambda: Planning(n_rollouts=0),
        lambda: Planning(n_rollouts=10**6),
        lambda: Planning(n_children=0),
        lambda: Planning(least=2.0),
        lambda: Planning(exploration=-1.0),
    ):
        with pytest.raises(OptionError):
            make()
