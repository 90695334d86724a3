"""Checks of every runtime: the card, logits, going back, errors, and the claim of batch invariance."""

from collections.abc import Callable
from functools import partial

import numpy as np

from edgedec.errors import CapabilityError, ContextFullError, EdgedecError, RequestError, SessionError
from edgedec.model import Rows
from edgedec.testing.results import NotApplicableError, require
from support.conformance.requirements import require_equal, require_raises
from support.conformance.subject import MOST_ROWS, N_PREFIX, Subject, Tokens, chain, extend

_TEXTS = ("Hello, world!", "def f(x):\n    return x + 1\n", "naïve 東京 🙂")


def card_is_sane(subject: Subject) -> None:
    """The card holds positive sizes, a runtime, an architecture and a fingerprint."""
    card = subject.model.card
    for name in ("n_vocab", "n_embd", "n_layer"):
        require(getattr(card, name) >= 1, f"card.{name} is {getattr(card, name)}, expected at least 1")
    for name in ("runtime", "architecture", "fingerprint"):
        require(bool(getattr(card, name)), f"card.{name} is empty")
    require(card.n_ctx_train >= 0, f"card.n_ctx_train is {card.n_ctx_train}, expected 0 (unknown) or more")
    claim = subject.model.batch_invariant
    require(claim is True or claim >= 1, f"batch_invariant is {claim}; a single step always equals itself")
    capabilities = subject.model.capabilities
    require(capabilities.max_rows >= 1 and capabilities.prefill_chunk >= 1, f"{capabilities} holds a size below 1")


def tokenizer_is_sane(subject: Subject) -> None:
    """The tokenizer's ids lie in the vocabulary and give the text back."""
    tokenizer, n_vocab = subject.model.tokenizer, subject.model.card.n_vocab
    require(1 <= tokenizer.n_vocab <= n_vocab, f"tokenizer.n_vocab is {tokenizer.n_vocab}, logits have {n_vocab}")
    for text in _TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        require(bool(ids) and all(0 <= i < tokenizer.n_vocab for i in ids), f"encode({text!r}) gives {ids}")
        require(ids == tokenizer.encode(text, add_special=False), f"encode({text!r}) differs from call to call")
        least = tokenizer.least_tokens(text)
        require(least <= len(ids), f"least_tokens({text!r}) is {least}, but encode gives {len(ids)}")
        begun = tokenizer.encode(text, add_special=False, most=1)
        require(len(begun) > 1 or begun == ids, f"encode({text!r}, most=1) gives {begun}, expected more than one token")
        pieces = b"".join(tokenizer.piece(i) for i in ids)
        require(text.encode() in pieces, f"the pieces of {text!r} are {pieces!r}")
        require(text in tokenizer.decode(ids), f"decode(encode({text!r})) is {tokenizer.decode(ids)!r}")
        require(not any(tokenizer.is_end(i) for i in ids), f"an ordinary token of {text!r} is said to be an end token")


def logits_are_finite(subject: Subject) -> None:
    """Logits are f32[requested rows, n_vocab] and finite."""
    n_vocab = subject.model.card.n_vocab
    n = min(5, subject.model.capabilities.max_rows)
    some = chain(*range(0, n, 2))
    wanted: tuple[tuple[Rows, int], ...] = (("last", 1), ("all", n), (some, len(some)))
    session = subject.session()
    for rows, n_rows in wanted:
        logits = session.forward(subject.tokens(n), n_past=session.n_cached, rows=rows).logits.copy()
        found = f"rows={rows}: {logits.dtype}{list(logits.shape)}, expected float32[{n_rows}, {n_vocab}]"
        require(logits.dtype == np.float32 and logits.shape == (n_rows, n_vocab), found)
        require(bool(np.isfinite(logits).all()), f"rows={rows}: {np.count_nonzero(~np.isfinite(logits))} not finite")


def rows_agree(subject: Subject) -> None:
    """A row's logits do not depend on which rows are requested (its bits, where batch-invariant)."""
    n = 5
    subject.require_rows(n)
    tokens = subject.tokens(n)
    everything = subject.replay(subject.prefix, tokens)
    wanted: tuple[tuple[Rows, Tokens], ...] = (
        ("last", chain(4)),
        (chain(1, 3), chain(1, 3)),
        (chain(0, 2, 4), chain(0, 2, 4)),
    )
    for rows, indices in wanted:
        found = subject.prefixed().forward(tokens, n_past=N_PREFIX, rows=rows).logits.copy()
        exact = subject.is_invariant(n)
        subject.require_same(found, everything[indices], f"rows={rows} against 'all'", exact=exact)
        subject.close_sessions()


def max_rows_are_returned(subject: Subject) -> None:
    """A forward returns max_rows rows of logits, and refuses one more with CapabilityError."""
    max_rows, session = subject.model.capabilities.max_rows, subject.session()
    n = min(max_rows, session.n_ctx)
    found = session.forward(subject.tokens(n), n_past=0, rows="all").logits.copy()
    require(len(found) == n, f"{len(found)} rows came back, expected {n}")
    if max_rows + 1 > session.n_ctx:
        return
    more = subject.tokens(max_rows + 1)
    require_raises(CapabilityError, f"{max_rows + 1} rows", lambda: session.forward(more, n_past=0, rows="all"))


def repeats_are_equal(subject: Subject) -> None:
    """The same forwards in another session give the same bits."""
    n = min(4, subject.model.capabilities.max_rows)
    pieces = (subject.prefix, subject.tokens(n), subject.tokens(1, seed=1))
    require_equal(subject.replay(*pieces), subject.replay(*pieces), "the second time")


def going_back_forgets(subject: Subject) -> None:
    """After going back with n_past, dropped tokens have no influence: the bits are a fresh session's.

    The fresh sessions are closed before: two that are open may share a KV cache, and a library's attention may add up
    in groups of cells, those of other sessions among them.
    """
    a, b = subject.tokens(10), subject.tokens(14)
    n = min(4, subject.model.capabilities.max_rows)
    old, new = subject.tokens(n, seed=1), subject.tokens(n, seed=2)
    expected = ((24, subject.replay(a, b, new)), (10, subject.replay(a, new)))
    session = subject.session()
    for piece in (a, b, old):
        session.forward(piece, n_past=session.n_cached)
    if not subject.model.capabilities.rollback:
        require_raises(CapabilityError, "going back", lambda: session.forward(new, n_past=10))
        again = session.forward(a, n_past=0).logits.copy()
        session.close()
        require_equal(again, subject.session().forward(a, n_past=0).logits.copy(), "n_past=0")
        return
    for n_past, fresh in expected:
        found = session.forward(new, n_past=n_past, rows="all").logits.copy()
        require_equal(found, fresh, f"going back to {n_past}")
        require(session.n_cached == n_past + n, f"n_cached is {session.n_cached}, expected {n_past + n}")
    found = session.forward(b, n_past=3).logits.copy()  # inside what one forward evaluated
    other = subject.session()
    other.forward(a[:3], n_past=0)
    fresh = other.forward(b, n_past=3).logits.copy()
    subject.require_same(found, fresh, "going back to 3", exact=subject.is_exact())


def errors_leave_the_session_usable(subject: Subject) -> None:
    """A refused forward evaluates nothing: n_cached and later forwards are as if it had not been requested."""
    one = subject.tokens(1)
    expected = subject.replay(subject.prefix, one)
    session, n_vocab = subject.prefixed(), subject.model.card.n_vocab
    too_many = subject.tokens(session.n_ctx - N_PREFIX + 1)
    refused: list[tuple[str, type[Exception] | tuple[type[Exception], ...], Callable[[], object]]] = [
        ("one token too many", ContextFullError, lambda: session.forward(too_many, n_past=N_PREFIX)),
        ("token -1", RequestError, lambda: session.forward(chain(-1), n_past=N_PREFIX)),
        ("token n_vocab", RequestError, lambda: session.forward(chain(0, n_vocab), n_past=N_PREFIX)),
        ("n_past over n_cached", SessionError, lambda: session.forward(one, n_past=N_PREFIX + 1)),
        ("n_past -1", EdgedecError, lambda: session.forward(one, n_past=-1)),
        ("no tokens", RequestError, lambda: session.forward(chain(), n_past=N_PREFIX)),
        ("row 1 of 1", RequestError, lambda: session.forward(one, n_past=N_PREFIX, rows=chain(1))),
    ]
    if subject.model.capabilities.trees:
        for parents in (chain(0, 0), chain(-1, 1), chain(-1, -2), chain(-1)):
            tree = partial(session.forward, subject.tokens(2), n_past=N_PREFIX, parents=parents)
            refused.append((f"parents {parents.tolist()}", RequestError, tree))
    for what, error, call in refused:
        require_raises(error, what, call)
        require(session.n_cached == N_PREFIX, f"after {what}: n_cached is {session.n_cached}, expected {N_PREFIX}")
    found = session.forward(one, n_past=N_PREFIX, rows="all").logits.copy()
    require_equal(found, expected, "the forward after the refused ones")


def batch_invariance_holds(subject: Subject) -> None:
    """As many rows as batch_invariant claims have the bits of single steps, and so has the step after them."""
    claim = subject.model.batch_invariant
    most = min(MOST_ROWS, subject.model.capabilities.max_rows)
    n_max = most if claim is True else min(most, claim)
    if n_max < 2:
        raise NotApplicableError(f"batch_invariant is {claim} and max_rows {subject.model.capabilities.max_rows}")
    tokens = subject.tokens(n_max + 1)
    session = subject.prefixed()
    steps = np.concatenate([extend(session, tokens[i : i + 1]) for i in range(n_max + 1)])
    session.close()
    for n in range(2, n_max + 1):
        session = subject.prefixed()
        require_equal(extend(session, tokens[:n]), steps[:n], f"{n} rows in one forward")
        require_equal(extend(session, tokens[n : n + 1]), steps[n : n + 1], f"the step after {n} rows")
        session.close()
    if claim is True:
        for pieces in ((subject.prefix[:1], subject.prefix[1:]), (subject.prefix[:17], subject.prefix[17:])):
            found = subject.replay(*pieces, tokens[:1])
            require_equal(found, steps[:1], f"a prefill in pieces of {[len(piece) for piece in pieces]}")


def exact_rows_hold(subject: Subject) -> None:
    """As many rows as a session calls exact have the bits of single steps at the end of its context, too."""
    most = min(MOST_ROWS, subject.model.capabilities.max_rows, subject.n_ctx // 4)
    n_past = subject.n_ctx - most - 1
    session = subject.session()
    session.forward(subject.tokens(n_past), n_past=0)
    limit = session.exact_rows(n_past).possible
    sizes = [n for n in range(2, most + 1) if session.exact_rows(n_past, measure=n).sure >= n]
    if not sizes:
        raise NotApplicableError(f"no rows after {n_past} tokens are exact; the most that may be: {limit}")
    require(limit is not None and limit >= sizes[-1], f"{sizes[-1]} rows are exact, and exact_rows says {limit}")
    tokens = subject.tokens(most + 1, seed=1)
    steps = [session.forward(tokens[i : i + 1], n_past=n_past + i).logits.copy() for i in range(most + 1)]
    for n in sizes:
        rows = session.forward(tokens[:n], n_past=n_past, rows="all").logits
        require_equal(rows, np.concatenate(steps[:n]), f"{n} rows after {n_past} tokens")
        after = session.forward(tokens[n : n + 1], n_past=n_past + n).logits
        require_equal(after, steps[n], f"the step after {n} rows after {n_past} tokens")


CHECKS = (
    card_is_sane,
    tokenizer_is_sane,
    logits_are_finite,
    rows_agree,
    max_rows_are_returned,
    repeats_are_equal,
    going_back_forgets,
    errors_leave_the_session_usable,
    batch_invariance_holds,
    exact_rows_hold,
)
