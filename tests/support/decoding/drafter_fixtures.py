"""Fixtures: contexts without a model, candidates from lists, and random generations that any drafter must survive."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, Store
from edgedec.sampling import Noise, SamplingParams

N_VOCAB = 262_144
# Few enough that contexts come back, and the ends of the largest vocabulary.
TOKENS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, N_VOCAB - 2, N_VOCAB - 1)

MakeContext = Callable[..., DraftContext]
Rows = Sequence[tuple[int, dict[int, float]]]


@pytest.fixture(scope="session")
def make_context() -> MakeContext:
    """Make a context; these drafters never touch the target or its tokenizer."""

    def make(temperature: float = 0, budget_bytes: int | None = None, store: Store | None = None) -> DraftContext:
        nothing: Any = None
        params = SamplingParams(temperature=temperature, seed=7)
        return DraftContext(nothing, params, Noise(7), Store(budget_bytes) if store is None else store)

    return make


@pytest.fixture(scope="session")
def candidates() -> Callable[[Rows], Candidates]:
    """Make candidates from rows of a token and what is probable after it, most probable first; siblings all."""

    def make(rows: Rows) -> Candidates:
        return Candidates(
            np.array([token for token, _ in rows], np.int32),
            np.array([-1, *[0] * (len(rows) - 1)], np.int32),
            np.array([list(row) for _, row in rows], np.int32),
            np.array([list(row.values()) for _, row in rows], np.float32),
        )

    return make


@pytest.fixture(scope="session")
def generate() -> Callable[[Drafter, int, int], list[Draft]]:
    """Run a random generation: every draft is checked, and verified whole, in part, or with other nodes among it."""

    def run(drafter: Drafter, seed: int, n_steps: int) -> list[Draft]:
        rng = np.random.default_rng(seed)
        text = rng.choice(TOKENS, rng.integers(0, 30)).tolist()
        drafter.begin(text)
        drafts = []
        for _ in range(n_steps):
            n_max = int(rng.integers(1, 33))
            draft = drafter.propose(n_max, 1e18)
            _check(draft, n_max)
            drafts.append(draft)
            verification = _outcome(rng, _verified(rng, draft), text[-1] if text else 0)
            text.extend(verification.token_ids)
            drafter.learn(verification, {})
            assert drafter.memory_bytes() >= 0
        return drafts

    return run


@pytest.fixture(scope="session")
def budget_holds(make_context: MakeContext) -> Callable[[DrafterFactory, str], None]:
    """Check that a drafter's store stays below half of a small budget on a long text, and is never emptied for it."""

    def check(factory: DrafterFactory, name: str) -> None:
        context = make_context(budget_bytes=100_000)
        drafter = factory(context)
        drafter.begin(range(1000))
        for token in range(1000, 2000):
            drafter.learn(Verification((), (token,)), {})
        table = context.store[name]
        assert 0 < table.memory_bytes() <= 50_000
        assert len(table) == 50_000 // 230
        assert drafter.memory_bytes() <= 100_000
        drafter.begin([1990])
        assert list(drafter.propose(1, 1e18).tokens) == [1991]
        drafter.begin([5])
        assert len(drafter.propose(1, 1e18)) == 0
        small = Store(100)
        small.update(context.store)
        assert factory(make_context(store=small)).memory_bytes() < 10_000

    return check


def _check(draft: Draft, n_max: int) -> None:
    draft.check(N_VOCAB)
    assert len(draft) <= n_max
    nodes = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(nodes)) == len(nodes)
    for parent in set(draft.parents):
        assert sum(p for p, above in zip(draft.p_accept, draft.parents, strict=True) if above == parent) <= 1 + 1e-6
        assert np.all(np.isin(draft.tokens, TOKENS))


def _verified(rng: np.random.Generator, draft: Draft) -> Draft:
    """Return the draft, its first nodes, all but some of its leaves, or a chain that is not the drafter's."""
    kind = rng.integers(4)
    if kind == 1:
        return draft.truncated(int(rng.integers(0, 8)))
    if kind == 2:
        keep = [i for i in range(len(draft)) if i in draft.parents or rng.random() < 0.5]
        places = {-1: -1, **{node: i for i, node in enumerate(keep)}}
        parents = [places[int(draft.parents[i])] for i in keep]
        return Draft.tree([draft.tokens[node] for node in keep], parents, [0.5] * len(keep))
    if kind == 3:
        return Draft.chain(rng.choice(TOKENS, rng.integers(0, 5)).tolist())
    return draft


def _outcome(rng: np.random.Generator, draft: Draft, last: int) -> Verification:
    path: list[int] = []
    while True:
        below = [node for node, parent in enumerate(draft.parents) if parent == (path[-1] if path else -1)]
        if not len(below) or rng.random() < 0.4:
            break
        path.append(int(rng.choice(below)))
    token_ids = (*(draft.tokens[node] for node in path), int(rng.choice(TOKENS)))
    if rng.random() < 0.4:
        return Verification(tuple(path), token_ids)
    k = int(rng.choice([1, 3, 8, 12]))
    n = len(draft) + 1
    ids = np.stack([rng.permutation(TOKENS)[:k] for _ in range(n)]).astype(np.int32)
    probs = -np.sort(-rng.dirichlet([0.3] * 13, n)[:, :k], axis=1)
    tokens = np.array([last, *draft.tokens], np.int32)
    parents = np.array([-1, *(parent + 1 for parent in draft.parents)], np.int32)
    return Verification(tuple(path), token_ids, Candidates(tokens, parents, ids, probs.astype(np.float32)))
