"""Checks of trees, forks, forwards of several sessions, layer subsets and hidden states, where declared."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from edgedec.errors import CapabilityError, EdgedecError, RequestError, SessionError
from edgedec.model import ForwardItem, LayerSet, RowGroup, Session, Span
from edgedec.testing.results import NotApplicableError, require
from support.conformance.requirements import require_equal, require_raises
from support.conformance.subject import N_PREFIX, Floats, Subject, Tokens, chain, extend
from support.forwards import evaluated

# Two roots; below the first, branches of several depths whose rows are not neighbours.
_PARENTS = (-1, 0, 0, 1, 2, 2, 5, -1)
_WITHOUT_BLOCKS = frozenset({"mamba2"})  # architectures that have no feed-forward blocks to leave out


def _tree(subject: Subject) -> Tokens:
    """Return the tokens of the tree, all distinct, so that no two branches are equal."""
    subject.require("trees")
    subject.require_rows(len(_PARENTS))
    distinct = list(dict.fromkeys(subject.tokens(100, seed=6).tolist()))
    return chain(*distinct[: len(_PARENTS)])


def _grow(session: Session, tokens: Tokens) -> Floats:
    """Evaluate the tree after what the session holds."""
    parents = np.array(_PARENTS, np.int32)
    return session.forward(tokens, n_past=session.n_cached, parents=parents, rows="all").logits.copy()


def _path_to(row: int) -> list[int]:
    path = [row]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path


def trees_equal_their_chains(subject: Subject) -> None:
    """Each row of a tree has the logits of its path evaluated as a chain (its bits, where that is claimed)."""
    tokens = _tree(subject)
    found = _grow(subject.prefixed(), tokens)
    subject.close_sessions()
    for row in range(len(tokens)):
        path = _path_to(row)
        expected = subject.replay(subject.prefix, tokens[path])[-1:]
        exact = subject.is_invariant_tree(len(tokens))
        subject.require_same(found[row : row + 1], expected, f"row {row}, path {path}", exact=exact)


def kept_paths_go_on_as_chains(subject: Subject) -> None:
    """After keep(rows) the session goes on as if it had evaluated that path as a chain."""
    tokens, after = _tree(subject), (subject.tokens(1, seed=3), subject.tokens(2, seed=4))
    exact = subject.is_invariant_tree(len(tokens))
    for path in ([0], [0, 1, 3], [0, 2, 5, 6], [7]):
        session = subject.prefixed()
        _grow(session, tokens)
        require(session.n_cached == N_PREFIX, f"after a tree n_cached is {session.n_cached}, expected {N_PREFIX}")
        session.keep(chain(*path))
        n_kept = N_PREFIX + len(path)
        require(session.n_cached == n_kept, f"after keep({path}) n_cached is {session.n_cached}, expected {n_kept}")
        found = extend(session, *after)
        session.close()
        expected = subject.replay(subject.prefix, tokens[path], *after)
        subject.require_same(found, expected, f"after keep({path})", exact=exact)


def branches_must_be_settled(subject: Subject) -> None:
    """A branched session goes on after keep() or from the tree's n_past or below; anything else raises."""
    tokens, one = _tree(subject), subject.tokens(1, seed=3)
    session = subject.prefixed()
    require_raises(SessionError, "keep() without a tree", lambda: session.keep(chain(0)))
    _grow(session, tokens)
    require_raises(SessionError, "going on inside the tree", lambda: session.forward(one, n_past=N_PREFIX + 1))
    for path in ([0, 3], [1], [1, 0], [0, len(tokens)]):
        require_raises(RequestError, f"keep({path})", partial(session.keep, chain(*path)))
    session.keep(chain(0, 1))
    require_raises(SessionError, "keep() a second time", lambda: session.keep(chain(0)))
    expected = subject.replay(subject.prefix, one)
    for n_past in (N_PREFIX, N_PREFIX - 4):
        session = subject.prefixed()
        _grow(session, tokens)
        if n_past == N_PREFIX:
            found = session.forward(one, n_past=n_past, rows="all").logits.copy()
            subject.require_same(found, expected, "the tree dropped", exact=subject.is_exact())
        elif subject.model.capabilities.rollback:
            session.forward(one, n_past=n_past)
            require(session.n_cached == n_past + 1, f"n_cached is {session.n_cached}, expected {n_past + 1}")
        session.close()


def forks_share_and_diverge(subject: Subject) -> None:
    """A fork starts with the cached prefix; from there fork and parent do not touch each other, closing included."""
    subject.require("fork")
    mine, theirs, more = subject.tokens(3, seed=1), subject.tokens(3, seed=2), subject.tokens(1, seed=3)
    subject.require_rows(3)
    parent = subject.prefixed()
    twin = subject.adopt(parent.fork())
    require(twin.n_cached == N_PREFIX, f"the fork's n_cached is {twin.n_cached}, expected {N_PREFIX}")
    require(twin.n_ctx == parent.n_ctx, f"the fork's n_ctx is {twin.n_ctx}, its parent's {parent.n_ctx}")
    exact = subject.is_exact()
    for name, session, tokens in (("parent", parent, mine), ("fork", twin, theirs)):
        expected = subject.replay(subject.prefix, tokens)
        subject.require_same(extend(session, tokens), expected, f"the {name} after the fork", exact=exact)
    subject.require_same(
        extend(parent, more), subject.replay(subject.prefix, mine, more), "the parent, later", exact=exact
    )
    parent.close()
    found = extend(twin, more)
    subject.require_same(found, subject.replay(subject.prefix, theirs, more), "the fork, alone", exact=exact)


def sessions_share_a_forward(subject: Subject) -> None:
    """Items of one forward do not touch each other: each has the logits that it would have alone."""
    subject.require_rows(5)
    first, second = subject.prefixed(), subject.session()
    other = subject.tokens(9, seed=5)
    second.forward(other, n_past=0)
    a, b = subject.tokens(2, seed=1), subject.tokens(3, seed=2)
    items = [
        ForwardItem(first, N_PREFIX, (RowGroup(a),), rows="all"),
        ForwardItem(second, len(other), (RowGroup(b),), rows="all"),
    ]
    results = subject.model.forward(items)
    require(len(results) == 2, f"{len(results)} results for 2 items")
    found = [result.logits.copy() for result in results]
    for session, n in ((first, N_PREFIX + 2), (second, len(other) + 3)):
        require(session.n_cached == n, f"n_cached is {session.n_cached}, expected {n}")
    exact = subject.is_exact()
    subject.require_same(found[0], subject.replay(subject.prefix, a), "the first item", exact=exact)
    subject.require_same(found[1], subject.replay(other, b), "the second item", exact=exact)
    twice = [ForwardItem(first, first.n_cached, (RowGroup(a),)), ForwardItem(first, first.n_cached, (RowGroup(b),))]
    require_raises(EdgedecError, "a session twice in one forward", lambda: subject.model.forward(twice))


def layer_subsets_skip(subject: Subject) -> None:
    """A full LayerSet changes nothing, a subset does, and reading KV that a subset did not write raises an error."""
    subject.require("layers")
    n_layer = subject.model.card.n_layer
    n = min(3, subject.model.capabilities.max_rows)
    tokens, one = subject.tokens(n, seed=1), subject.tokens(1, seed=2)
    expected = subject.replay(subject.prefix, tokens)
    full = LayerSet.of(n_layer, range(n_layer))
    session = subject.prefixed()
    found = session.forward(tokens, n_past=N_PREFIX, layers=full, rows="all").logits.copy()
    require_equal(found, expected, "a full LayerSet against None")
    none = np.zeros(n_layer, np.bool_)  # of some models, single layers lack one half or the other
    for name, layers in (
        ("feed-forward blocks", LayerSet(full.attn, none)),
        ("attention", LayerSet(none, full.mlp)),
        ("layers", LayerSet(none, none)),
    ):
        if name == "feed-forward blocks" and subject.model.card.architecture in _WITHOUT_BLOCKS:
            continue
        session = subject.prefixed()
        found = session.forward(tokens, n_past=N_PREFIX, layers=layers, rows="all").logits.copy()
        require(not np.array_equal(found, expected), f"leaving out {name} changed no logit")
        n_cached = session.n_cached
        require(n_cached == N_PREFIX + n, f"without {name} n_cached is {n_cached}, expected {N_PREFIX + n}")
        if not layers.attn.all():
            require_raises(SessionError, "reading a hole", partial(session.forward, one, n_past=n_cached))
            session.forward(one, n_past=n_cached, layers=layers)
        found = session.forward(tokens, n_past=N_PREFIX, rows="all").logits.copy()
        require_equal(found, expected, f"going back after leaving out {name}")
        session.close()


def hidden_states_resume(subject: Subject) -> None:
    """Taps return f32[n, n_embd] for every row, and a forward resumed from one ends in the same logits."""
    subject.require("taps")
    card, n = subject.model.card, min(4, subject.model.capabilities.max_rows)
    taps = tuple(sorted({0, card.n_layer // 2, card.n_layer - 1}))
    tokens = subject.tokens(n, seed=1)
    forward = subject.prefixed().forward(tokens, n_past=N_PREFIX, taps=taps, rows="all")
    logits, hidden = forward.logits.copy(), {tap: state.copy() for tap, state in forward.hidden.items()}
    require_equal(logits, subject.replay(subject.prefix, tokens), "logits with taps against those without")
    require(set(hidden) == set(taps), f"hidden has the layers {sorted(hidden)}, expected {taps}")
    for tap, state in hidden.items():
        found = f"hidden[{tap}] is {state.dtype}{list(state.shape)}, expected float32[{n}, {card.n_embd}]"
        require(state.dtype == np.float32 and state.shape == (n, card.n_embd), found)
    if not subject.model.capabilities.hidden_input:
        return
    for tap, state in hidden.items():
        session = subject.prefixed()
        found_logits = evaluated(
            session, N_PREFIX, RowGroup(vectors=state, span=Span(enter=tap + 1)), rows="all"
        ).logits.copy()
        exact = subject.is_invariant(n)
        subject.require_same(found_logits, logits, f"resumed after layer {tap}", exact=exact)
        session.close()


def undeclared_capabilities_raise(subject: Subject) -> None:
    """Using a capability that the model does not declare raises CapabilityError, and leaves the session usable."""
    card, capabilities, one = subject.model.card, subject.model.capabilities, subject.tokens(2)
    expected = subject.prefixed().forward(one, n_past=N_PREFIX).logits.copy()
    subject.close_sessions()
    session = subject.prefixed()
    state = np.zeros((2, card.n_embd), np.float32)
    subset = LayerSet.of(card.n_layer, range(card.n_layer - 1))
    calls: Sequence[tuple[str, Callable[[], object]]] = (
        ("trees", lambda: session.forward(one, n_past=N_PREFIX, parents=chain(-1, -1))),
        ("fork", lambda: session.fork()),
        ("layers", lambda: session.forward(one, n_past=N_PREFIX, layers=subset)),
        ("taps", lambda: session.forward(one, n_past=N_PREFIX, taps=(0,))),
        (
            "hidden_input",
            lambda: evaluated(session, N_PREFIX, RowGroup(vectors=state, span=Span(enter=1))),
        ),
        ("vector_rows", lambda: evaluated(session, N_PREFIX, RowGroup(vectors=state))),
    )
    undeclared = [(name, call) for name, call in calls if not getattr(capabilities, name)]
    if not undeclared:
        raise NotApplicableError("the model declares every capability")
    for name, call in undeclared:
        require_raises(CapabilityError, f"using {name!r}", call)
        require(session.n_cached == N_PREFIX, f"after {name!r} n_cached is {session.n_cached}, expected {N_PREFIX}")
    found = session.forward(one, n_past=N_PREFIX).logits.copy()
    require_equal(found, expected, "the forward after them")


CHECKS = (
    trees_equal_their_chains,
    kept_paths_go_on_as_chains,
    branches_must_be_settled,
    forks_share_and_diverge,
    sessions_share_a_forward,
    layer_subsets_skip,
    hidden_states_resume,
    undeclared_capabilities_raise,
)
