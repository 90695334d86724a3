"""Random passes over a block, for the rules of denoising: the later ones have fewer masked positions."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from edgedec_methods.diffusion.rules import Pass, Rule

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
