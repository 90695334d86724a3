"""A session that has read a prompt, for whoever makes forwards of their own behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgedec.decoding.generate import SessionSlot, remember_cached, reuse_prefix, session_for
from edgedec.decoding.reading import read
from edgedec.decoding.session_pool import SessionPool
from edgedec.errors import CancelledError
from edgedec.model import Forward, Session
from edgedec.progress import CancelToken, OnProgress
from edgedec.sequence import Request, TextState


@dataclass(frozen=True, slots=True)
class PromptRead:
    """A prompt that was read.

    Attributes:
        session: Its KV cache holds the prompt. Forwards may follow, at any n_past from the prompt's length on.
        forward: The forward with the prompt's last token, whose logits are those after the prompt.
        n_reused: How many tokens of the prompt the KV cache held before.
        most_rows: Most rows of logits of a forward, where memory is planned; else None.
    """

    session: Session
    forward: Forward
    n_reused: int
    most_rows: int | None


@contextmanager
def prompt_read(
    pool: SessionPool[SessionSlot], request: Request, cancel: CancelToken, on_progress: OnProgress | None
) -> Iterator[PromptRead]:
    """Wait for a session of a pool, read a request's prompt on it, and hold it inside the block.

    Raises:
        CancelledError: `cancel` was cancelled before the prompt was read.
        SessionError, BusyError: As session_for.
        What Session.evaluate raises.
    """
    text, n_prompt = TextState(request, list(request.prompt_ids)), len(request.prompt_ids)
    with session_for(pool, request.prompt_ids, cancel, None) as slot:
        if slot is None:
            raise CancelledError("the reading of a prompt was cancelled before it began")
        reuse_prefix(slot, text)
        with slot.session.generating(n_prompt):
            try:
                forward = read(text, slot.session, n_prompt, on_progress)
            finally:
                remember_cached(slot, text)
            yield PromptRead(slot.session, forward, text.stats.n_reused_tokens, slot.text_rows)
