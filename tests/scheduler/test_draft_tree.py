"""Merging drafts, and the part of a tree that pays: never beaten by any other part."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.scheduler.draft_tree import DraftTree, best_part

Nodes = list[tuple[int, int, float]]


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> Nodes:
    """Return nodes (token, parent, p) of a small tree; siblings may share a token."""
    n = draw(st.integers(1, most))
    chances = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
    return [(draw(st.integers(0, 3)), draw(st.integers(-1, i - 1)), draw(chances)) for i in range(n)]


def add(tree: DraftTree, nodes: Nodes) -> list[int]:
    """Merge nodes in."""
    return tree.add([t for t, _, _ in nodes], [p for _, p, _ in nodes], [c for _, _, c in nodes])


def by_text(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Return the path probability of every path, by its tokens."""
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        texts.append(((*texts[parent], token)) if parent >= 0 else (token,))
    assert len(set(texts)) == len(texts)
    return dict(zip(texts, tree.paths(), strict=True))


@pytest.mark.slow
@given(trees(), trees(), trees())
def test_drafts_merge_to_the_same_tree_in_any_order(a: Nodes, b: Nodes, c: Nodes) -> None:
    """Paths and their probabilities do not depend on which drafter came first."""
    found = []
    for order in itertools.permutations((a, b, c)):
        tree = DraftTree()
        for nodes in order:
            add(tree, nodes)
        found.append(by_text(tree))
    for other in found[1:]:
        assert other == pytest.approx(found[0])


@pytest.mark.slow
@given(trees())
def test_a_draft_merged_twice_changes_nothing(nodes: Nodes) -> None:
    """Its nodes are found again, at their places."""
    tree = DraftTree()
    places = add(tree, nodes)
    before = by_text(tree)
    assert add(tree, nodes) == places
    assert by_text(tree) == before


def test_siblings_that_promise_more_than_one_are_scaled() -> None:
    """0.9 and 0.6 become 0.6 and 0.4; the larger of two estimates for one node counts."""
    tree = DraftTree()
    assert tree.add([1, 2], [-1, 0], [0.5, 0.5]) == [0, 1]
    assert tree.add([3, 1], [-1, -1], [0.6, 0.9]) == [2, 0]
    assert tree.paths() == pytest.approx([0.6, 0.3, 0.4])


@pytest.mark.slow
@given(trees(), trees())
def test_paths_fall_from_parent_to_child_and_siblings_share_one(a: Nodes, b: Nodes) -> None:
    """A child is never more probable than its parent, nor are all children together."""
    tree = DraftTree()
    add(tree, a)
    add(tree, b)
    paths = tree.paths()
    sums: dict[int, float] = {}
    for path, parent in zip(paths, tree.parents, strict=True):
        above = paths[parent] if parent >= 0 else 1.0
        assert path <= above
        sums[parent] = sums.get(parent, 0.0) + path
    assert all(total <= (paths[parent] if parent >= 0 else 1.0) * (1 + 1e-9) for parent, total in sums.items())


@pytest.mark.slow
@given(
    trees(), st.lists(st.floats(0.5, 3), min_size=10, max_size=10), st.integers(0, 9), st.sampled_from([0.0, 0.1, 1.0])
)
def test_no_part_of_a_tree_beats_the_chosen_one(nodes: Nodes, jagged: list[float], n_max: int, spent_s: float) -> None:
    """Of all parts closed under parents, on any curve with any dips, none promises more tokens per second."""
    tree = DraftTree()
    add(tree, nodes)
    paths = tree.paths()
    chosen, rate = best_part(paths, range(len(paths)), jagged.__getitem__, n_max, spent_s)
    rates = [
        (1 + sum(paths[node] for node in part)) / (jagged[len(part)] + spent_s)
        for n in range(min(n_max, len(paths)) + 1)
        for part in itertools.combinations(range(len(paths)), n)
        if all(tree.parents[node] == -1 or tree.parents[node] in part for node in part)
    ]
    assert rate == pytest.approx(max(rates))
    assert len(chosen) <= n_max
    assert chosen == sorted(chosen)
    assert all(tree.parents[node] == -1 or tree.parents[node] in chosen for node in chosen)
    assert rate == pytest.approx((1 + sum(paths[node] for node in chosen)) / (jagged[len(chosen)] + spent_s))


def test_a_dip_of_the_curve_is_looked_past() -> None:
    """Two and three rows cost more than they bring, four are cheap: three nodes are taken."""
    cost = [1.0, 1.9, 2.5, 1.1, 2.0].__getitem__
    nodes, rate = best_part([0.5, 0.4, 0.3, 0.2], range(4), cost, 4, 0.0)
    assert nodes == [0, 1, 2]
    assert rate == pytest.approx(2.2 / 1.1)


def test_the_plain_step_wins_where_nothing_pays() -> None:
    """Of two that promise the same, the plain step; drafting's own time is spent either way."""
    assert best_part([0.5], range(1), [1.0, 1.5].__getitem__, 1, 0.0) == ([], 1.0)
    assert best_part([0.5], range(1), [1.0, 1.5].__getitem__, 1, 1.0) == ([0], 1.5 / 2.5)
    assert best_part([], range(0), [2.0].__getitem__, 5, 0.0) == ([], 0.5)


@pytest.mark.slow
@given(trees())
def test_a_chain_is_one_and_takes_the_best_child_each_time(nodes: Nodes) -> None:
    """For a runtime without trees: from the root on, no sibling of a chain's node is more probable."""
    tree = DraftTree()
    add(tree, nodes)
    paths = tree.paths()
    chain = tree.chain(paths)
    assert tree.draft(chain).is_chain
    for node in chain:
        siblings = [other for other in range(len(paths)) if tree.parents[other] == tree.parents[node]]
        assert paths[node] == max(paths[other] for other in siblings)
    assert chain[-1] not in tree.parents


@pytest.mark.slow
@given(trees(), st.data())
def test_a_part_becomes_a_draft_that_passes_every_check(nodes: Nodes, data: st.DataObject) -> None:
    """The paths of the nodes chosen; first those of the chain that goes on with the most probable child each time."""
    tree = DraftTree()
    add(tree, nodes)
    n = data.draw(st.integers(0, len(tree.tokens)))
    draft = tree.draft(range(n))
    draft.check(n_vocab=4)
    again = DraftTree()
    places = again.add(draft.tokens, draft.parents, draft.p_accept)
    assert places == list(range(n))
    chosen = DraftTree()
    chosen.add(tree.tokens[:n], tree.parents[:n], tree.p[:n])
    assert by_text(again) == pytest.approx(by_text(chosen))
    chain = again.chain(again.p)
    assert chain == list(range(len(chain)))
