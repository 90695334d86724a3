"""Parallel requests whose prompts begin alike: one of them reads that prefix, and the others take it over.

A prefix is taken over as a fork: both sessions share its pages of the KV cache until one of them writes there. So the
prefix takes memory and time once (a prefix tree of requests that run: RadixAttention, Zheng et al. 2024,
arXiv:2312.07104, without the tree). A request that comes while another one reads a longer prefix that both have waits
until that part is read: two that read the same tokens side by side would be done no earlier.
"""

from collections.abc import Sequence
from threading import Lock
from time import monotonic, sleep
from typing import Protocol

from edgedec.errors import EdgedecError, SessionError
from edgedec.model import Session
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec.sequence import n_common
from edgedec.sessions.batching import BatchedSession
from edgedec.sessions.text_pages import PAGE_TOKENS

_LEAST = PAGE_TOKENS  # a shorter prefix fills no page that could be shared
_MOST_WAIT_S = 10.0  # without a token read
_POLL_S = 0.005
_TRIES = 4  # a text notes what is cached after its prompt and at its end
_MOST_TAKE_S = 1.0  # less than reading a shared prefix takes, and many steps of the other text


class PrefixHolder(Protocol):
    """A session and what is known of its KV cache (edgedec.decoding.session_pool.SessionSlot).

    Attributes:
        cached_ids: Tokens that its KV cache begins with. A forward that drops some of them is begun only after they
            were taken out, by another list in place of this one; so a list that is still here is still true.
        n_exact: How many of these, from the start, a cold start would compute to the same bits.
        reading: The prompt that is being read; empty where none is.
    """

    session: Session
    cached_ids: list[int]
    n_exact: int
    reading: tuple[int, ...]


class SharedPrefixes:
    """Lets the sessions of parallel requests take prefixes of prompts from each other. Any thread may use it."""

    def __init__(self, holders: Sequence[PrefixHolder] = ()) -> None:
        self._holders = [*holders]
        self._lock = Lock()

    def join(self, holder: PrefixHolder) -> None:
        """Let one more session take prefixes from the others, and give its own."""
        self._holders.append(holder)

    def begin(self, holder: PrefixHolder, prompt: tuple[int, ...], cancel: CancelToken) -> None:
        """Wait while another session reads a prefix that this one will need, then say that this one reads its prompt.

        Who waits reads nothing yet, so no two wait for each other. A reader that gets no further is not waited for.
        The caller empties `own.reading` when the prompt is read, or given up.
        """
        latest, since = 0, monotonic()
        while not cancel.cancelled:
            with self._lock:
                missing = self._unread(holder, prompt)
                if missing == 0 or monotonic() - since > _MOST_WAIT_S:
                    holder.reading = prompt
                    return
            if missing != latest:
                latest, since = missing, monotonic()
            sleep(_POLL_S)

    def _unread(self, asking: PrefixHolder, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt others are about to read; 0 where that is not worth waiting for."""
        limit = len(prompt) - 1
        held = max(n_common(holder.cached_ids, prompt, limit) for holder in (asking, *self._others(asking)))
        coming = max((n_common(holder.reading, prompt, limit) for holder in self._others(asking)), default=0)
        return coming - held if coming - held >= _LEAST else 0

    def noting(self, holder: PrefixHolder, prompt: tuple[int, ...], on_progress: OnProgress | None) -> OnProgress:
        """Return what takes the progress of a prompt, passes it on, and notes what is read, as others may take it over.

        How the prompt is cut does not matter there (Capabilities.prefill_chunk is 1).
        """

        def note(progress: Progress) -> None:
            is_exact = holder.n_exact == len(holder.cached_ids)
            holder.cached_ids = list(prompt[: progress.done])
            if is_exact:
                holder.n_exact = progress.done
            if on_progress is not None:
                on_progress(progress)

        return note

    def take(self, holder: PrefixHolder, prompt: Sequence[int], *, exact: bool) -> None:
        """Let a session begin with the prefix of a prompt that another one holds, where it holds a page more of it.

        Where that can't be done, nothing changes.

        Args:
            holder: The session, which no other thread uses.
            prompt: The prompt; its last token is not taken over.
            exact: Whether only tokens with the bits of a cold start are taken.
        """

        def n_held(ids: Sequence[int], n_exact: int) -> int:
            limit = len(prompt) - 1
            return n_common(ids, prompt, min(limit, n_exact) if exact else limit)

        for _ in range(_TRIES):
            candidates = [
                (n_held(ids := other.cached_ids, other.n_exact), other, ids) for other in self._others(holder)
            ]
            n, other, ids = max(candidates, key=lambda entry: entry[0], default=(0, holder, holder.cached_ids))
            if n - n_held(holder.cached_ids, holder.n_exact) < _LEAST:
                return
            n_exact = min(other.n_exact, n)
            before, holder.cached_ids = holder.cached_ids, []  # first: others may look at this session, too
            if not _taken(holder.session, other.session, n):
                holder.cached_ids = before
                return
            if other.cached_ids is ids:  # it held them all the time; else its text went on, or began anew
                holder.cached_ids, holder.n_exact = ids[:n], n_exact
                return

    def _others(self, asking: PrefixHolder) -> list[PrefixHolder]:
        """Return the other holders whose sessions have the same adapters: only their keys and values are the same."""
        scales = asking.session.scales
        return [holder for holder in self._holders if holder is not asking and holder.session.scales == scales]


def _taken(session: Session, other: Session, n_tokens: int) -> bool:
    """Let a session take over tokens of another one; return whether it did.

    While a tree of that session is verified, it is branched for a moment, and can't be forked.
    """
    end = monotonic() + _MOST_TAKE_S
    while monotonic() < end:
        try:
            return isinstance(session, BatchedSession) and session.take_prefix(other, n_tokens)
        except SessionError:
            sleep(_POLL_S / 10)
        except EdgedecError:
            return False
    return False
