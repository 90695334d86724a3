"""Reads tokens of a text into a session's KV cache, and keeps account of them whatever ends a forward."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgedec.decoding.prompt_miss import miss_of
from edgedec.decoding.session_pool import SessionPool, SessionSlot, session_for
from edgedec.decoding.step import evaluate
from edgedec.errors import CancelledError, RequestError
from edgedec.model import Forward, ForwardItem, RecallingSession, RowGroup, Session
from edgedec.pictures import placed
from edgedec.progress import CancelToken, OnProgress
from edgedec.sequence import Request, TextState, n_common

_NO_ROWS = np.empty(0, np.int32)

logger = logging.getLogger("edgedec.decoding.reading")


def read(text: TextState, session: Session, n_end: int, on_progress: OnProgress | None = None) -> Forward:
    """Evaluate the tokens of a text that its KV cache lacks up to the first `n_end`; return the last one's logits.

    Raises:
        What Session.evaluate raises; see evaluate().
    """
    for item in _items(text, session, n_end):
        end = item.n_past + item.n_rows
        forward = evaluate(text, item, end, on_progress)
        text.n_cached = end
    return forward


def _items(text: TextState, session: Session, n_end: int) -> Iterator[ForwardItem]:
    """Yield what brings a text's ids up to the first `n_end` into its KV cache, each block of a picture by itself.

    Behind a picture, tokens are cut where those of a cold start are, whatever prefix is there already.
    """
    n_past, chunk, ids, none = text.n_cached, session.model.capabilities.prefill_chunk, text.token_ids, _NO_ROWS
    pictures = text.request.pictures
    for start, end, picture in placed(text.request.prompt_ids[:n_end], pictures) if pictures else ():
        if n_past < start:
            yield ForwardItem(session, n_past, (RowGroup(np.array(ids[n_past:start], np.int32)),), none)
        if n_past < end:
            first = max(n_past - start, 0)
            block = replace(picture.block, first=first)
            yield ForwardItem(session, start + first, (RowGroup(vectors=picture.rows[first:], sees=block),), none)
            n_past = end
    if pictures and n_past < (cut := -(-n_past // chunk) * chunk) < n_end:
        yield ForwardItem(session, n_past, (RowGroup(np.array(ids[n_past:cut], np.int32)),), none)
        n_past = cut
    if n_past < n_end:
        yield ForwardItem(session, n_past, (RowGroup(np.array(ids[n_past:n_end], np.int32)),))


def read_pictures(text: TextState, session: Session, on_progress: OnProgress | None) -> None:
    """Evaluate a prompt up to behind its last picture, unless the KV cache holds that; raises as evaluate() does."""
    prompt, chunk, begun = text.request.prompt_ids, session.model.capabilities.prefill_chunk, perf_counter()
    if min(prompt[text.n_cached :], default=0) < 0:
        last = max(place.end for place in placed(prompt, text.request.pictures))
        read(text, session, min(-(-last // chunk) * chunk, len(prompt) - 1), on_progress)
        text.stats.prefill_s += perf_counter() - begun


def require_pictures(request: Request, session: Session) -> None:
    """Raise RequestError or CapabilityError for a prompt whose pictures the session can't take."""
    if request.pictures:
        session.model.capabilities.require("vector_rows", session.model.card.runtime)
        if any(place.end == len(request.prompt_ids) for place in placed(request.prompt_ids, request.pictures)):
            raise RequestError("the prompt ends with a picture; at least one token must follow it")


def reread(text: TextState, session: Session, on_progress: OnProgress | None) -> None:
    """Evaluate a prompt and the tokens behind it that the KV cache lacks, all but the last of them.

    So the KV cache is as an earlier request left it, or as it was before what runs the model was lost. Nothing is
    evaluated where only the last token is missing, or where nothing is written yet: the step does that.

    The prompt is evaluated at once, as it was then. The tokens behind it were written in single steps, so they are
    evaluated in pieces whose rows have the bits of single steps.

    Raises:
        What Session.evaluate raises.
    """
    n_prompt, n_all = len(text.request.prompt_ids), len(text.token_ids) - 1
    while n_prompt <= n_all and (n_past := text.n_cached) < n_all:
        if n_past < n_prompt:
            read(text, session, n_prompt, on_progress)
        else:
            n = min(session.exact_rows(n_past).possible or 1, n_all - n_past)
            read(text, session, n_past + (n if n > 1 and session.exact_rows(n_past, measure=n).sure >= n else 1))


def reuse_prefix(slot: SessionSlot, text: TextState) -> None:
    """Count how much of the KV cache the prompt shares; its last token is always evaluated, for the logits.

    First it takes over what another slot holds, where that is more. The rest of the KV cache counts as dropped.
    """
    prompt, capabilities, held = text.request.prompt_ids, slot.session.model.capabilities, slot.cached_ids
    if slot.prefixes is not None:
        slot.prefixes.take(slot, prompt, exact=text.request.reuse == "exact")
    limit = min(len(prompt) - 1, slot.session.n_cached)
    chunk = 1
    if text.request.reuse == "exact":
        limit, chunk = min(limit, slot.n_exact), capabilities.prefill_chunk
    n = n_common(slot.cached_ids, prompt, limit) // chunk * chunk
    for place in placed(prompt, text.request.pictures) if text.request.pictures else ():
        n = place.start if place.start < n < place.end else n  # a block is read again whole, or not at all
    if not capabilities.rollback and n != slot.session.n_cached:
        n = 0
    is_exact = n <= slot.n_exact
    slot.cached_ids, slot.n_exact = list(prompt[:n]), min(slot.n_exact, n)
    if isinstance(slot.session, RecallingSession):
        n = slot.session.recall(prompt, n)
    text.n_cached = text.stats.n_reused_tokens = n
    slot.cached_ids, slot.n_exact = list(prompt[:n]), n if is_exact else min(slot.n_exact, n)
    if (miss := miss_of(held, prompt, n, slot.session.model.tokenizer.piece)) is not None:
        text.stats.miss = f"{miss.counts}; {miss.places}"
        logger.info("%s", miss.counts)
        logger.debug("%s", miss.places)


def remember_cached(slot: SessionSlot, text: TextState) -> None:
    """Note what the KV cache holds now, and how much of that a cold start would compute to the same bits."""
    n_start, n_prompt = text.stats.n_reused_tokens, len(text.request.prompt_ids)
    chunk = slot.session.model.capabilities.prefill_chunk
    slot.cached_ids = text.token_ids[: text.n_cached]
    n_cached = len(slot.cached_ids)
    if n_start <= slot.n_exact and n_start % chunk == 0:
        whole = n_cached if chunk == 1 else min(n_cached, n_prompt)
        slot.n_exact = whole // chunk * chunk
    else:
        slot.n_exact = min(slot.n_exact, n_start)


def read_prompt(slot: SessionSlot, text: TextState, n_end: int, on_progress: OnProgress | None) -> Forward:
    """Read the first `n_end` tokens of a prompt on a slot, which notes what it holds then, whatever ends the reading.

    Returns the forward with the last of them; raises what Session.evaluate raises.
    """
    try:
        return read(text, slot.session, n_end, on_progress)
    finally:
        remember_cached(slot, text)


@dataclass(frozen=True, slots=True)
class PromptRead:
    """A prompt that was read.

    Attributes:
        slot: Its session's KV cache holds the prompt. Forwards may follow, at any n_past from the prompt's length on.
        token_ids: The prompt.
        forward: The forward with the prompt's last token, whose logits are those after the prompt.
        n_reused: How many tokens of the prompt the KV cache held before.
    """

    slot: SessionSlot
    token_ids: tuple[int, ...]
    forward: Forward
    n_reused: int


@contextmanager
def prompt_read(
    pool: SessionPool[SessionSlot], request: Request, cancel: CancelToken, on_progress: OnProgress | None = None
) -> Iterator[PromptRead]:
    """Wait for a session of a pool, read a request's prompt on it, and keep the session until the block ends.

    Raises:
        CancelledError: `cancel` was cancelled before the prompt was read.
        RequestError: The prompt is empty.
        SessionError, BusyError: As session_for.
        What Session.evaluate raises.
    """
    text, prompt_ids = TextState(request, list(request.prompt_ids)), request.prompt_ids
    with session_for(pool, request, cancel, None) as slot:
        if slot is None:
            raise CancelledError("the reading of a prompt was cancelled before it began")
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        require_pictures(request, slot.session)
        reuse_prefix(slot, text)
        with slot.session.generating(len(prompt_ids)):
            forward = read_prompt(slot, text, len(prompt_ids), on_progress)
            yield PromptRead(slot, prompt_ids, forward, text.stats.n_reused_tokens)
