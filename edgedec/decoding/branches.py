"""Several texts that go on from one prompt, token by token as a caller chooses: the prompt is read once.

A branch is a fork of the session that read the prompt: it shares the pages of the KV cache that hold the same tokens
(vLLM, Kwon et al. 2023, arXiv:2309.06180), and its rows are in one forward with those of the other branches. Each
branch has the bits that it would have alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.closeable import Closeable
from edgedec.decoding.reading import PromptRead, prompt_read
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.decoding.text_room import tokens_behind
from edgedec.errors import ContextFullError, RequestError, counted
from edgedec.model import ForwardItem, RowGroup, Session
from edgedec.progress import CancelToken, OnProgress
from edgedec.sequence import Request
from edgedec.sessions.forks import ForkedSession, SessionForks, require_forks
from edgedec.sessions.text_pages import MOST_FORKS, require_count


@dataclass(slots=True)
class _Branch:
    """A branch: its session, and its tokens behind the prompt."""

    session: ForkedSession
    token_ids: list[int]


class Branches(Closeable):
    """Branches of one prompt. One thread at a time uses them; any thread may call cancel().

    A branch is named by a number, which is not used again when the branch is dropped. Leaving the `with` block lets all
    branches go.

    Attributes:
        root: The first branch, which has no token behind the prompt.
        logits: f32[n_vocab], the logits after the prompt.
    """

    def __init__(self, prompt: PromptRead, *, most: int = MOST_FORKS) -> None:
        """Open the root behind a prompt that was read, for at most `most` branches at a time."""
        n_prompt, slot = len(prompt.token_ids), prompt.slot
        self._forks = SessionForks(most, tokens_behind(slot, n_prompt), slot.text_rows)
        self._n_prompt = n_prompt
        self.logits = prompt.forward.logits[0].copy()
        self._branches: dict[int, _Branch] = {}
        self._n_opened = 0
        self.root = self._open(slot.session, [])

    @property
    def names(self) -> tuple[int, ...]:
        """The branches that are left, the oldest first."""
        return tuple(self._branches)

    @property
    def n_ctx(self) -> int:
        """Most tokens of a branch, the prompt included."""
        return next(iter(self._branches.values())).session.n_ctx if self._branches else 0

    def token_ids(self, branch: int) -> tuple[int, ...]:
        """Return the tokens of a branch behind the prompt (RequestError where there is no such branch)."""
        return tuple(self._branch(branch).token_ids)

    def fork(self, branch: int, n: int = 1) -> list[int]:
        """Open `n` branches that go on from where a branch is now, and return their names; the branch stays.

        Raises:
            RequestError: There is no such branch, or there would be more than `most`; nothing was opened.
        """
        source = self._branch(branch)
        if n < 1 or len(self._branches) + n > self._forks.most:
            raise RequestError(
                f"{n} more branches were asked for beside {len(self._branches)}; from 1 to "
                f"{self._forks.most - len(self._branches)} are possible: drop some first, or allow more"
            )
        opened: list[int] = []
        try:
            for _ in range(n):
                opened.append(self._open(source.session, source.token_ids))
        except BaseException:
            for name in opened:
                self.drop(name)
            raise
        return opened

    def drop(self, branch: int) -> None:
        """Let a branch go, with the memory that it alone holds (RequestError where there is no such branch)."""
        self._branch(branch).session.close()
        del self._branches[branch]

    def choose(self, branch: int) -> None:
        """Drop every branch but one (RequestError where there is no such branch)."""
        self._branch(branch)
        for name in self.names:
            if name != branch:
                self.drop(name)

    def forward(
        self, tokens: Mapping[int, Sequence[int]], *, rows: Literal["last", "all"] = "last"
    ) -> dict[int, NDArray[np.float32]]:
        """Add tokens to some branches, at least one to each, and return the logits that follow, by branch.

        All rows are evaluated in one native forward, unless that would return more rows of logits than `most_rows`.

        Args:
            tokens: By branch, its new tokens.
            rows: "last" for the logits after the last token of a branch, f32[1, n_vocab]; "all" for those after each of
                its new tokens, f32[n_tokens, n_vocab].

        Raises:
            RequestError: There is no such branch, or a branch gets no token or one outside the vocabulary.
            ContextFullError: A branch would be longer than its context.
            MemoryCapError: The branches would hold more tokens than the memory plan has room for.
            CancelledError: cancel() was called.
            EdgedecError: The runtime failed. Whatever is raised, all branches hold the tokens that they held before.
        """
        if rows not in ("last", "all"):
            raise RequestError(f"rows is {rows!r:.40}; it must be 'last' or 'all'")
        items = [self._item(name, token_ids, rows) for name, token_ids in tokens.items()]
        forwards: list[NDArray[np.float32]] = []
        for group in self._forks.groups(items):
            forwards += [forward.logits.copy() for forward in self._forks.forward(group)]
        for name, token_ids in tokens.items():
            self._branches[name].token_ids += [int(token_id) for token_id in token_ids]
        return dict(zip(tokens, forwards, strict=True))

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        self._forks.cancel()

    def close(self) -> None:
        """Let all branches go; calling it again does nothing."""
        self._branches.clear()
        self._forks.close()

    def _open(self, session: Session, token_ids: Sequence[int]) -> int:
        name = self._n_opened
        self._branches[name] = _Branch(self._forks.fork(session), list(token_ids))
        self._n_opened += 1
        return name

    def _branch(self, name: int) -> _Branch:
        branch = self._branches.get(name)
        if branch is None:
            raise RequestError(f"there is no branch {name!r:.40}; there are {list(self._branches)!s:.80}")
        return branch

    def _item(self, name: int, token_ids: Sequence[int], rows: Literal["last", "all"]) -> ForwardItem:
        """Return the rows that a branch gets, checked."""
        branch = self._branch(name)
        session, n_past, n = branch.session, self._n_prompt + len(branch.token_ids), len(token_ids)
        n_vocab, most = session.model.card.n_vocab, session.model.capabilities.max_rows
        if not n or not all(0 <= token_id < n_vocab for token_id in token_ids):
            raise RequestError(f"branch {name} gets {list(token_ids)!s:.40}; it takes ids from 0 to {n_vocab - 1}")
        if rows == "all" and n > most:
            raise RequestError(f"the logits after {n} tokens were asked for; at most {most} come at once")
        if n_past + n > session.n_ctx:
            raise ContextFullError(
                f"branch {name} would have {counted(n_past + n, 'token')}, its context {session.n_ctx}; drop it, or "
                "load the model with a longer context"
            )
        return ForwardItem(session, n_past, (RowGroup(np.array(token_ids, np.int32)),), rows)


@contextmanager
def branches_on(
    pool: SessionPool[SessionSlot],
    request: Request,
    cancel: CancelToken,
    *,
    most: int = MOST_FORKS,
    on_progress: OnProgress | None = None,
) -> Iterator[Branches]:
    """Wait for a session of a pool, and open branches of a request's prompt on it inside the block.

    Raises:
        CapabilityError: The runtime has no forks, or a row depends there on what else is in its forward.
        RequestError: `most` is not from 1 to MOST_FORKS.
        What prompt_read raises.
    """
    require_count(most, "most")
    require_forks(pool.slots[0].session.model)
    with (
        prompt_read(pool, request, cancel, on_progress) as prompt,
        Branches(prompt, most=most) as branches,
        cancel.calling(branches.cancel),
    ):
        yield branches
