"""Forks of one session that go on from its text, with their rows in common forwards; all are let go together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import cast

from edgedec.cost_curve import SharedForward
from edgedec.errors import CapabilityError, MemoryCapError, RequestError, SessionError
from edgedec.head_state import DraftCall
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.progress import OnProgress
from edgedec.sessions.joined_work import JointCalls, groups
from edgedec.sessions.outer_session import OuterSession, UnsavedSession
from edgedec.sessions.text_pages import MOST_FORKS, PAGE_TOKENS, n_pages
from edgedec.stats import DecodeStats


def require_forks(model: Model) -> None:
    """Raise CapabilityError unless forks of a session, with their rows in one forward, have the bits of one alone."""
    name = model.card.runtime
    model.capabilities.require("fork", name)
    if model.batch_invariant is not True:
        raise CapabilityError(
            f"on the {name} runtime a row depends on what else is in its forward, so texts of one prompt can't share "
            "forwards; choose another runtime (edgedec doctor lists them), or generate the texts one after another"
        )


def are_together(session: Session) -> bool:
    """Return whether texts of one prompt are written on forks of a session, and not one after another."""
    model = session.model
    return not isinstance(session, UnsavedSession) and model.capabilities.fork and model.batch_invariant is True


class SessionForks:
    """The forks of a session. One thread at a time uses them; any thread may call cancel().

    Attributes:
        most: Most forks at a time.
        most_tokens: Most tokens that all forks may hold beside what they share with the session; None for any number.
            They are counted in pages of PAGE_TOKENS, and a page that several forks share is counted once.
        most_rows: Most rows of logits that one forward returns, but for a single fork; None for what the runtime can.
        joint: Joins the calls of the texts' drafters, while a thread of its own drafts for each text; else None.
    """

    def __init__(self, most: int = MOST_FORKS, most_tokens: int | None = None, most_rows: int | None = None) -> None:
        self.most = most
        self.most_tokens = most_tokens
        self.most_rows = most_rows
        self.joint: JointCalls | None = None
        self._held: dict[ForkedSession, ExitStack] = {}

    def fork(self, session: Session, stats: DecodeStats | None = None) -> "ForkedSession":
        """Open a session that shares the pages of another one's cached prefix, until one of the two writes there.

        Once it is closed, `stats` has what the session knows of its text.

        Raises:
            RequestError: There are `most` forks already.
            CapabilityError, SessionError: As Session.fork.
        """
        if len(self._held) >= self.most:
            raise RequestError(f"there are {self.most} texts of this prompt, which is the most; drop one first")
        with ExitStack() as undo:
            inner = session.inner.fork() if isinstance(session, ForkedSession) else session.fork()
            undo.callback(inner.close)
            undo.enter_context(inner.generating(inner.n_cached, stats=stats))
            pages = session.pages if isinstance(session, ForkedSession) else {}
            fork = ForkedSession(self, inner, pages)
            self._held[fork] = undo.pop_all()
        return fork

    def drop(self, fork: "ForkedSession") -> None:
        """Close a fork; nothing happens where it is closed already."""
        held = self._held.pop(fork, None)
        if held is not None:
            held.close()

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate an item of each of several forks in one native forward, and return their results in the same order.

        Where they ask for more rows of logits than `most_rows`, it takes several forwards: those of groups().

        Raises:
            SessionError: One of the forks was dropped.
            MemoryCapError: The forks would hold more than `most_tokens`; nothing was evaluated.
            What Session.forward raises.
        """
        for item in items:
            if item.session not in self._held:
                raise SessionError("a forward was given a text that was dropped; it takes those that are left")
        self._take_pages(items)
        forwards: list[Forward] = []
        for group in self.groups(items):
            begun = perf_counter()
            inner = [replace(item, session=cast(ForkedSession, item.session).inner) for item in group]
            results = inner[0].session.model.forward(inner)
            shared = SharedForward(perf_counter() - begun, sum(item.n_rows for item in group), len(group))
            for result in results:
                result.shared = result.shared or shared
            forwards += results
        return forwards

    def groups(self, items: Sequence[ForwardItem]) -> list[list[ForwardItem]]:
        """Cut items into those of one forward each, in their order.

        Who takes the results of a group before the next one is evaluated holds `most_rows` rows of logits at a time.
        """
        most = items[0].session.model.capabilities.max_rows if items else 0
        return groups(items, most if self.most_rows is None else min(most, self.most_rows))

    def n_tokens_after(self, spans: Sequence[tuple[Session, int, int]]) -> int:
        """Return the tokens in all pages beside those of the session once each of some forks has written a span.

        Args:
            spans: A fork, which may come twice where another is about to be opened from it, and the span's begin and
                end. What a fork holds behind the begin is no longer wanted.
        """
        begins = [(fork.pages, begin) for fork, begin, _ in spans if isinstance(fork, ForkedSession)]
        earlier = {page for pages, begin in begins for i, page in pages.items() if i < begin // PAGE_TOKENS}
        return PAGE_TOKENS * (len(earlier) + sum(n_pages(begin, end) for _, begin, end in spans))

    def _take_pages(self, items: Sequence[ForwardItem]) -> None:
        """Give each fork pages of its own for its rows, as the KV cache does (MemoryCapError: too many)."""
        users = Counter(page for fork in self._held for page in fork.pages.values())
        taken: list[tuple[ForkedSession, int]] = []
        for item in items:
            fork, begin = item.session, item.n_past
            assert isinstance(fork, ForkedSession), "forward() has looked the session up among the forks"
            for index in range(begin // PAGE_TOKENS, (begin + item.n_rows - 1) // PAGE_TOKENS + 1):
                page = fork.pages.get(index)
                if page is not None and users[page] == 1:
                    continue
                taken.append((fork, index))
                if page is not None:
                    users[page] -= 1  # the last of the forks that share a page writes into it
        n_tokens = PAGE_TOKENS * (len(users) + len(taken))
        if self.most_tokens is not None and n_tokens > self.most_tokens:
            raise MemoryCapError(
                f"the texts of this prompt would hold {n_tokens} tokens behind it, and the memory plan has room for "
                f"{self.most_tokens}; drop some, ask for fewer or shorter ones, or load the model for more of them"
            )
        for fork, index in taken:
            fork.pages[index] = object()

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        for fork in list(self._held):
            fork.inner.cancel()

    def close(self) -> None:
        """Close all forks; calling it again does nothing."""
        while self._held:
            _, held = self._held.popitem()
            held.close()


class ForkedSession(OuterSession):
    """Implements edgedec.model.Session: one of the forks of a session.

    Attributes:
        inner: The session of the runtime, or one whose forwards are joined with other requests'.
        pages: The pages that it holds beside those of the session that was forked first, by their index. Each
            stands for one of the KV cache's, which forks may share.
    """

    def __init__(self, forks: SessionForks, inner: Session, pages: Mapping[int, object]) -> None:
        super().__init__(inner)
        self.pages = dict(pages)
        self._forks = forks

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item of this fork alone; SessionForks.forward evaluates those of several together."""
        return self._forks.forward([item])[0]

    def answer(self, calls: Sequence[tuple[Session, DraftCall]]) -> list[SharedForward]:
        """Answer a call of a drafter for this fork, together with those for other forks while these are joined."""
        joint = self._forks.joint
        if joint is None:
            return super().answer(calls)
        return [joint.answer(self.inner, call) for _, call in calls]

    def fork(self) -> "ForkedSession":
        """Open another fork, with this one's cached prefix."""
        return self._forks.fork(self)

    def close(self) -> None:
        """Let the fork go; calling it again does nothing."""
        self._forks.drop(self)
