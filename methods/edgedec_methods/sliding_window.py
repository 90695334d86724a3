"""A sliding context: a text may be longer than the KV cache, which then holds the text's first and newest tokens.

The first tokens stay because attention leans on them (attention sinks: StreamingLLM, Xiao et al. 2023,
arXiv:2309.17453). StreamingLLM rotates cached keys to new positions; here the tokens that stay are evaluated again. So
the KV cache depends on the text alone, and is the same after a cold start, a rollback or a draft. The window moves by
half its length at once: that costs a prefill of half a window, once for every half window of text.

Lossy: the model forgets what has left the window.

Paper: StreamingLLM, Xiao et al. 2023, arXiv:2309.17453
Option: `--method slide`
For: texts that are longer than the context
Measured: smollm2-135m predicts the second half of 2,048 tokens with a perplexity of 21.36 with a window of 1,024, and
    20.83 from all of the text (`texts/sliding_window`, program at 67b59fb8)
Status: opt-in
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ContextFullError, RequestError, SessionError, argument
from edgedec.head_state import HeadState
from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec.sequence import n_common
from edgedec.sessions.joined_work import owned
from edgedec.sessions.outer_session import OuterSession, UnsavedSession

N_SINKS = 4
"""How many tokens from the beginning of the text stay in the window."""
MOST_TOKENS = 2**24
"""Most tokens of a text."""
_LEAST_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Sliding:
    """Implements edgedec.companion.Companion: a context that slides, for which no further model is needed."""

    role: ClassVar[str] = ""
    what: ClassVar[str] = "a context that slides"
    model: ClassVar[None] = None

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session whose context slides (raises what SlidingSession raises)."""
        return SlidingSession(target)


class SlidingSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts longer than the KV cache.

    n_past and n_cached count the tokens of the text. All rows of one forward see the same window: a chain is cut where
    the window moves, and a tree across that place is refused (`room` says how many rows come before it).

    Args:
        inner: Holds the window. Its rows must not depend on how a prefill is cut (Capabilities.prefill_chunk is 1), as
            the text would depend on what was cached before.

    Raises:
        CapabilityError: The rows depend on how a prefill is cut, or the model can't go back.
        RequestError: The context is below 64 tokens.
    """

    what = "a context that slides"
    option = "slide"

    def __init__(self, inner: Session) -> None:
        inner.model.capabilities.require("rollback", inner.model.card.runtime)
        if inner.model.capabilities.prefill_chunk != 1:
            raise CapabilityError(
                f"on the {inner.model.card.runtime} runtime a text depends on how its prompt is cut, so the context "
                f"can't slide; choose another runtime (cpu), or leave {argument('slide')} out"
            )
        if inner.n_ctx < _LEAST_CONTEXT:
            raise RequestError(f"a context of {inner.n_ctx} tokens can't slide; it must have at least {_LEAST_CONTEXT}")
        super().__init__(inner)
        self._ids: list[int] = []  # all evaluated tokens of the text, those that have left the window too
        self._begin = 0  # where the window begins in the text, behind the first N_SINKS tokens; 0: it holds all
        self._n_valid = 0  # how many tokens of the KV cache are of this text and this window
        self._branched: NDArray[np.int32] | None = None  # tokens of the last tree

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were evaluated."""
        return len(self._ids)

    @property
    def n_ctx(self) -> int:
        """Most tokens of a text: the KV cache holds a window of it."""
        return MOST_TOKENS

    @property
    def draft_head(self) -> HeadState | None:
        """The draft head that follows the window; its n_past counts the text's tokens, as this session's does."""
        head = self.inner.draft_head
        return None if head is None else head.seen_by(place=self._in_window)

    def _in_window(self, n_past: int) -> int:
        """Return the n_past of the session inside, -1 where it holds another window."""
        n_held = _n_held(n_past, self._begin)
        return n_held if _begin(n_past, self.inner.n_ctx) == self._begin and n_held <= self._n_valid else -1

    def _emptied(self) -> None:
        self._ids, self._begin, self._n_valid, self._branched = [], 0, 0, None

    def room(self, n_tokens: int) -> int:
        """Return how many rows after a text of `n_tokens` tokens see the same window as the text's last token."""
        return _next_move(n_tokens - 1, self.inner.n_ctx) - n_tokens

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item, whose n_past counts the text's tokens; see Session.forward.

        Raises:
            CapabilityError: Hidden states, or positions apart from slots, were given.
            ContextFullError: The window moves within a tree, or the text would have over MOST_TOKENS tokens.
        """
        tokens = tokens_of(item, "a context that slides", "slide")
        if not 0 <= item.n_past <= len(self._ids):
            raise SessionError(f"n_past is {item.n_past}; the session has evaluated {len(self._ids)} tokens")
        n_text = item.n_past + len(tokens)
        if n_text > MOST_TOKENS:
            raise ContextFullError(f"{n_text} tokens are more than a text may have, {MOST_TOKENS}")
        begin = _begin(n_text - 1, self.inner.n_ctx)
        if _begin(item.n_past, self.inner.n_ctx) != begin:
            return self._across(item, tokens, begin, on_progress)
        if begin != self._begin or self._n_valid < _n_held(item.n_past, begin):
            self._move(begin, self._ids[: item.n_past], on_progress)
        return self._within(item, tokens, on_progress)

    def _across(
        self, item: ForwardItem, tokens: NDArray[np.int32], begin: int, on_progress: OnProgress | None
    ) -> Forward:
        """Evaluate a chain within which the window moves; `begin` is the last row's window."""
        if item.is_tree:
            raise ContextFullError("the context moves within this tree; ask for no more nodes than room() says")
        n_past, rows = item.n_past, item.rows
        if isinstance(rows, str) and rows == "last" and not item.taps:  # no row before the last window is wanted
            text = [*self._ids[:n_past], *tokens.tolist()]
            self._move(begin, text[:-1], on_progress)
            return self._within(replace(item, n_past=len(text) - 1), tokens[-1:], None)
        n_first, logit_rows = _next_move(n_past, self.inner.n_ctx) - n_past, item.logit_rows
        earlier = replace(with_tokens(item, tokens[:n_first]), rows=logit_rows[logit_rows < n_first])
        first = owned(self.evaluate(earlier))
        later = logit_rows[logit_rows >= n_first] - np.int32(n_first)
        second = self.evaluate(replace(with_tokens(item, tokens[n_first:]), n_past=n_past + n_first, rows=later))
        return Forward(
            np.concatenate([first.logits, second.logits]),
            {layer: np.concatenate([first.hidden[layer], states]) for layer, states in second.hidden.items()},
            second.ops,
            shared=second.shared,
        )

    def _move(self, begin: int, text: list[int], on_progress: OnProgress | None) -> None:
        """Bring the window of `text` that begins at `begin` into the KV cache."""
        n_same = n_common(text, self._ids, len(text))
        n_valid = min(self._n_valid, _n_held(n_same, self._begin))
        if begin != self._begin:
            n_valid = min(n_valid, N_SINKS)
        held = text if begin == 0 else [*text[:N_SINKS], *text[begin:]]
        n_before = self.inner.n_cached
        none = np.empty(0, np.int32)
        try:
            if n_valid < len(held):
                new = np.array(held[n_valid:], np.int32)
                self.inner.forward(new, n_past=n_valid, rows=none, on_progress=on_progress)
        except BaseException:
            if self.inner.n_cached != n_before:
                self._now(text, begin, min(self.inner.n_cached, len(held)))
            raise
        self._now(text, begin, len(held))

    def _within(self, item: ForwardItem, tokens: NDArray[np.int32], on_progress: OnProgress | None) -> Forward:
        """Evaluate the last tokens of an item, whose rows all see the window that the KV cache holds."""
        n_past, n_before = item.n_past, self.inner.n_cached
        n_held = _n_held(n_past, self._begin)
        try:
            forward = super().evaluate(replace(with_tokens(item, tokens), n_past=n_held), on_progress)
        except BaseException:
            if self.inner.n_cached != n_before:
                n_new = max(self.inner.n_cached - n_held, 0)
                self._now([*self._ids[:n_past], *tokens[:n_new].tolist()], self._begin, n_held + n_new)
            raise
        del self._ids[n_past:]
        if not item.is_tree:
            self._ids.extend(tokens.tolist())
            self._n_valid, self._branched = n_held + len(tokens), None
        else:
            self._n_valid, self._branched = n_held, tokens
        return forward

    def _now(self, text: list[int], begin: int, n_valid: int) -> None:
        self._ids, self._begin, self._n_valid, self._branched = text, begin, n_valid, None

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        tokens = self._branched
        self.inner.keep(rows)
        if tokens is not None:
            self._ids.extend(tokens[rows].tolist())
            self._n_valid += len(rows)
        self._branched = None


def tokens_of(item: ForwardItem, what: str, option: str) -> NDArray[np.int32]:
    """Return the tokens of an item of one group (CapabilityError: it has more than `what` takes, by `option`)."""
    group = item.group
    if len(item.groups) > 1 or group.tokens is None or group.vectors is not None or group.positions is not None:
        raise CapabilityError(
            f"{what} takes tokens one behind the other, no hidden states and no pictures; leave {argument(option)} out"
        )
    return group.tokens


def with_tokens(item: ForwardItem, tokens: NDArray[np.int32]) -> ForwardItem:
    """Return an item of one group with other tokens."""
    return replace(item, groups=(replace(item.groups[0], tokens=tokens),))


def _begin(position: int, n_ctx: int) -> int:
    """Return where the window that a row at `position` sees begins, behind the sinks; 0 where the row sees all tokens.

    >>> [_begin(position, 64) for position in (0, 63, 64, 93, 94)]
    [0, 0, 34, 34, 64]
    """
    return 0 if position < n_ctx else N_SINKS + _stride(n_ctx) * ((position - n_ctx) // _stride(n_ctx) + 1)


def _next_move(position: int, n_ctx: int) -> int:
    """Return the first position after `position` whose row sees another window.

    >>> [_next_move(position, 64) for position in (0, 63, 64, 93, 94)]
    [64, 64, 94, 94, 124]
    """
    return n_ctx if position < n_ctx else _begin(position, n_ctx) - N_SINKS + n_ctx


def _stride(n_ctx: int) -> int:
    return (n_ctx - N_SINKS) // 2


def _n_held(n_text: int, begin: int) -> int:
    """Return how many of the text's first `n_text` tokens the window that begins at `begin` holds."""
    return n_text if begin == 0 else min(n_text, N_SINKS) + max(n_text - begin, 0)
