"""The rules of denoising against their sentences and formulas: which masked positions a pass commits."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, log2
from pathlib import Path

import numpy as np
import pytest

from edgedec.errors import OptionError
from edgedec_methods.diffusion.by_row import prophet
from edgedec_methods.diffusion.credit import credit
from edgedec_methods.diffusion.learned import N_FEATURES
from edgedec_methods.diffusion.lines import line_end
from edgedec_methods.diffusion.rules import Pass, Rule, denoising_named
from edgedec_methods.diffusion.threshold import threshold

SIZE, N_VOCAB, END, BREAK = 12, 6, 4, 5
Chosen = Mapping[int, int]


def one_pass(rng: np.random.Generator, places: Sequence[int]) -> Pass:
    """Return a pass over some masked positions: greedy, each row sure to a degree of its own."""
    logits = rng.standard_normal((len(places), N_VOCAB)) * rng.choice([1.0, 4.0, 8.0], (len(places), 1))
    laws = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    tokens = logits.argmax(1)
    confidences = laws[range(len(places)), tokens]
    ends, pieces = tokens == END, tuple(b"\n" if token == BREAK else b"x" for token in tokens.tolist())
    return Pass(SIZE, np.array(places), tokens, confidences, logits.astype(np.float32), ends, pieces)


def histories(n: int, seed: int = 0) -> Iterator[list[Pass]]:
    """Yield the passes of `n` blocks so far, one to four of each block."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        places, passes = np.arange(SIZE), list[Pass]()
        for _ in range(rng.integers(1, 5)):
            passes.append(one_pass(rng, places.tolist()))
            places = np.sort(rng.choice(places, rng.integers(1, len(places) + 1), replace=False))
        yield passes


def law(its: Pass, i: int) -> list[float]:
    """Return the probabilities of masked position `i`."""
    weights = [float(np.exp(np.float64(x))) for x in its.logits[i]]
    return [weight / sum(weights) for weight in weights]


def entropy_of(its: Pass, i: int) -> float:
    """Return the entropy in nats of masked position `i`."""
    return -sum(p * float(np.log(p)) for p in law(its, i))


def by_confidence(its: Pass) -> list[int]:
    """Return the masked positions, the most confident first, of equal ones the first."""
    return sorted(range(len(its.places)), key=lambda i: -its.confidences[i])


def check(rule: Rule, expected: Callable[[list[Pass]], Sequence[int]], n: int = 200) -> None:
    """Check a rule against which masked positions it should commit; an empty one stands for the most confident."""
    n_several = 0
    for passes in histories(n):
        its = passes[-1]
        which = [*expected(passes)] or by_confidence(its)[:1]
        assert dict(rule(passes)) == {int(its.places[i]): int(its.tokens[i]) for i in which}
        n_several += 1 < len(which) < len(its.places)
    assert n_several > n // 20, "some passes commit several positions, but not all"


RNG = np.random.default_rng(3)
FILTER = {
    "first": RNG.standard_normal((N_FEATURES, 3)).tolist(),
    "bias": RNG.standard_normal(3).tolist(),
    "second": [4.0, 3.0, 5.0],
    "last": -1.0,
}


def with_at_least(p: float) -> Callable[[list[Pass]], list[int]]:
    """Return what commits the positions with that probability."""
    return lambda passes: [i for i, each in enumerate(passes[-1].confidences) if each >= p]


def bounded(passes: list[Pass]) -> list[int]:
    """BACD: those with the mean of what was committed, or with the greatest in the first pass, between two bounds."""
    its, committed = passes[-1], []
    for one, then in itertools.pairwise(passes):
        left = {*then.places.tolist()}
        committed += [p for place, p in zip(one.places, one.confidences, strict=True) if place not in left]
    committed = committed or [max(its.confidences)]
    bound = min(max(sum(committed) / len(committed), 0.6), 0.9)
    return [i for i, p in enumerate(its.confidences) if p >= bound]


def coherent(passes: list[Pass]) -> list[int]:
    """CCD: what two passes are sure of, if the surest of the later one is among it, and the token is the same."""
    its, sure = passes[-1], by_confidence(passes[-1])
    if len(passes) == 1:
        return []
    places, before = its.places.tolist(), passes[-2]
    left = [i for i in by_confidence(before) if before.places[i] in places][:8]
    token_of = {int(before.places[i]): before.tokens[i] for i in left}
    if places[sure[0]] not in token_of:
        return []
    return [i for i in sure[:8] if token_of.get(places[i]) == its.tokens[i]]


def entropy(passes: list[Pass]) -> list[int]:
    """dParallel: the positions below 0.5 nats, or the one with the lowest entropy."""
    nats = [entropy_of(passes[-1], i) for i in range(len(passes[-1].places))]
    return [i for i, h in enumerate(nats) if h < 0.5] or [nats.index(min(nats))]


def entropy_bound(passes: list[Pass]) -> list[int]:
    """The most positions, from the surest on, whose entropies but the greatest sum to at most 0.5 nats."""
    nats = sorted((entropy_of(passes[-1], i), i) for i in range(len(passes[-1].places)))
    n = max(n for n in range(1, len(nats) + 1) if sum(h for h, _ in nats[: n - 1]) <= 0.5)
    return [i for _, i in nats[:n]]


def eoser(passes: list[Pass]) -> list[int]:
    """The 1, 2, 4 or 8 best positions; ends count less in early passes, by a factor that grows with what is done."""
    its, i = passes[-1], len(passes)
    done = (2**i - 1) / 2 ** int(log2(len(passes[0].places)))
    factor = 0.1 + 0.9 * min(1, done)
    counted = [p * factor if is_end else p for p, is_end in zip(its.confidences, its.ends, strict=True)]
    return sorted(range(len(counted)), key=lambda j: -counted[j])[: 2 ** (i - 1)]


def explore(passes: list[Pass]) -> list[int]:
    """After ETE: the positions with 0.95, or those with the lowest and the highest entropy."""
    its = passes[-1]
    nats = [entropy_of(its, i) for i in range(len(its.places))]
    return with_at_least(0.95)(passes) or sorted({nats.index(min(nats)), nats.index(max(nats))})


def learned(passes: list[Pass]) -> list[int]:
    """Learn2PD: those that a filter takes as final, a hidden layer over the probabilities around them."""
    its, chosen = passes[-1], []
    seen = dict.fromkeys(range(SIZE), 1.0) | dict(zip(its.places.tolist(), its.confidences.tolist(), strict=True))
    for i, place in enumerate(its.places.tolist()):
        x = [seen.get(place + d, 0.0) for d in range(-4, 5)] + [1 - len(its.places) / SIZE]
        hidden = [
            max(0.0, sum(a * FILTER["first"][j][k] for j, a in enumerate(x)) + FILTER["bias"][k]) for k in range(3)
        ]
        score = sum(h * w for h, w in zip(hidden, FILTER["second"], strict=True)) + FILTER["last"]
        chosen += [i] if 1 / (1 + exp(-score)) > 0.96 else []
    return chosen


def local_leap(passes: list[Pass]) -> list[int]:
    """Anchors with 0.9, and their neighbours up to four places away with 0.6."""
    its = passes[-1]
    anchors = [place for place, p in zip(its.places, its.confidences, strict=True) if p >= 0.9]
    near = [any(abs(place - anchor) <= 4 for anchor in anchors) for place in its.places]
    return [i for i, p in enumerate(its.confidences) if p >= 0.9 or (near[i] and p >= 0.6)]


def near_first(passes: list[Pass]) -> list[int]:
    """WeDLM: the positions below 0.4, or the lowest one; each place further behind adds 0.02 nats."""
    its = passes[-1]
    nats = [entropy_of(its, i) + 0.02 * (place - its.places[0]) for i, place in enumerate(its.places.tolist())]
    return [i for i, h in enumerate(nats) if h < 0.4] or [nats.index(min(nats))]


def parallel(passes: list[Pass]) -> list[int]:
    """NAP: the best masked position of each third of the block."""
    its, best = passes[-1], dict[int, int]()
    for i in by_confidence(its):
        best.setdefault(int(its.places[i]) // 4, i)
    return sorted(best.values())


def redundancy(passes: list[Pass]) -> list[int]:
    """R2-dLLM: sure positions, clusters of confidence, one of each cluster of a token, and what lasted."""
    its = passes[-1]
    at = {int(place): i for i, place in enumerate(its.places)}
    confidence = dict(zip(at, its.confidences.tolist(), strict=True))
    token = dict(zip(at, its.tokens.tolist(), strict=True))
    chosen = {place for place in at if confidence[place] >= 0.9}
    for start in range(SIZE - 2):
        inside = [place for place in (start, start + 1, start + 2) if place in at]
        if len(inside) >= 2 and sum(confidence[place] for place in inside) / len(inside) >= 0.7:
            chosen |= {*inside}
    place = 0
    while place < SIZE:
        run = [place]
        while place in at and run[-1] + 1 in at and token[run[-1] + 1] == token[place]:
            run.append(run[-1] + 1)
        best = max(run, key=lambda at_place: confidence.get(at_place, 0.0))
        if len(run) > 1 and confidence[best] > 0.7:
            chosen = (chosen - {*run}) | {best}
        place = run[-1] + 1
    for place in at:
        before = [dict(zip(p.places.tolist(), p.tokens.tolist(), strict=True)).get(place) for p in passes[-3:]]
        if before == [token[place]] * 3 and confidence[place] >= 0.7:
            chosen.add(place)
    return [at[place] for place in sorted(chosen)]


FORMULAS: dict[str, Callable[[list[Pass]], Sequence[int]]] = {
    "lines:0.3": with_at_least(0.9),
    "adaptive:3": lambda passes: [i for i in by_confidence(passes[-1])[:3] if passes[-1].confidences[i] >= 0.8],
    "ascending:2": lambda passes: by_confidence(passes[-1])[: [1, 2, 4, 8][len(passes) - 1]],
    "bounded:0.6": bounded,
    "coherent:8": coherent,
    "entropy:0.5": entropy,
    "entropy_bound:0.5": entropy_bound,
    "eoser:0.1": eoser,
    "explore:0.95": explore,
    "learned:FILTER": learned,
    "local_leap:0.6": local_leap,
    "near_first:0.4": near_first,
    "parallel:3": parallel,
    "redundancy:0.7": redundancy,
    "schedule:2": lambda passes: by_confidence(passes[-1])[:2],
    "schedule:5": lambda passes: by_confidence(passes[-1])[:5],
    "threshold:0.9": with_at_least(0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMULAS)
def test_a_pass_commits_what_the_formula_says(tmp_path: Path, text: str) -> None:
    """The best one where that is none."""
    path = tmp_path / "filter.json"
    path.write_text(json.dumps(FILTER))
    n = 600 if text.startswith(("coherent", "redundancy")) else 200
    check(denoising_named(text.replace("FILTER", str(path))).rule, FORMULAS[text], n)


@pytest.mark.slow
@pytest.mark.parametrize("least", [0.3, 0.8])
def test_a_block_ends_with_the_surest_end_of_a_line(least: float) -> None:
    """Of the probability that is asked for; without one it has all positions, and what is behind it is left out."""
    n_moved = 0
    for passes in histories(200):
        its, end = passes[0], SIZE
        breaks = [i for i, piece in enumerate(its.pieces) if piece == b"\n" and its.confidences[i] >= least]
        if breaks:
            end = 1 + int(its.places[max(breaks, key=lambda i: its.confidences[i])])
        assert line_end(its, least) == end
        part = its.first(end)
        assert (part.size, part.places.tolist(), len(part.logits)) == (end, [p for p in its.places if p < end], end)
        n_moved += end < SIZE
    assert 50 < n_moved < 200


def test_a_probability_that_is_the_threshold_is_enough() -> None:
    """Both positions with at least the second probability are committed."""
    its = next(histories(1))[0]
    assert len(threshold([its], float(np.sort(its.confidences)[-2]))) == 2


@pytest.mark.slow
def test_credits_are_added_to_logits() -> None:
    """A matrix of credits, as the paper has it; some of the tokens are not the model's own best ones."""
    n_other = 0
    for passes in histories(300):
        credits = np.zeros((SIZE, N_VOCAB))
        for its in passes:
            credits *= 0.8
            for place, token, p in zip(its.places, its.tokens, its.confidences, strict=True):
                credits[place, token] += p**0.2
        its = passes[-1]
        fused = its.logits.astype(np.float64) + 0.7 * np.log1p(credits[its.places])
        laws = np.exp(fused) / np.exp(fused).sum(1, keepdims=True)
        tokens, confidences = fused.argmax(1), laws.max(1)
        which = np.flatnonzero(confidences >= 0.8)
        which = which if len(which) else np.array([confidences.argmax()])
        assert dict(credit(passes, 0.8)) == {int(its.places[i]): int(tokens[i]) for i in which}
        n_other += int((tokens != its.tokens).sum())
    assert n_other


@pytest.mark.slow
def test_everything_is_committed_once_the_model_is_sure() -> None:
    """Prophet: by the mean distance of the two greatest logits, which may be smaller where more is committed."""
    n_all = 0
    for passes in histories(300):
        its = passes[-1]
        gaps = [sorted(row)[-1] - sorted(row)[-2] for row in its.logits.astype(float)]
        done = (SIZE - len(gaps)) / SIZE
        needed = 6.0 if done < 1 / 3 else 4.0 if done < 2 / 3 else 2.0
        is_sure = sum(gaps) / len(gaps) >= needed
        which = range(len(gaps)) if is_sure else by_confidence(its)[:1]
        assert dict(prophet(passes, 6.0)) == {int(its.places[i]): int(its.tokens[i]) for i in which}
        n_all += is_sure and len(gaps) > 1
    assert n_all > 10


def test_a_former_name_says_the_new_one() -> None:
    """With its number."""
    with pytest.raises(OptionError, match=r"ada_block is called lines now: it must be lines:0\.4"):
        denoising_named("ada_block:0.4")


@pytest.mark.parametrize(
    "change", [{"last": [1.0]}, {"bias": []}, {"first": "x"}, {"second": [1e9, 0, 0]}, {"bias": None}]
)
def test_other_files_than_filters_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """With the name of the script that makes one."""
    path = tmp_path / "filter.json"
    path.write_text(json.dumps(FILTER | change))
    for text in (f"learned:{path}", "learned", f"learned:{tmp_path}"):
        with pytest.raises(OptionError, match=r"fit_filter\.py"):
            denoising_named(text)
