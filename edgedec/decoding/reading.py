"""Reads tokens of a text into a session's KV cache, and keeps account of them whatever ends a forward."""

from collections.abc import Sequence

import numpy as np

from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec.sequence import TextState


def evaluate(text: TextState, item: ForwardItem, n_most: int, on_progress: OnProgress | None) -> Forward:
    """Evaluate an item of a text by itself; where that fails, n_cached of the text counts what was evaluated.

    Args:
        text: The text.
        item: Its rows.
        n_most: Most tokens of the text that count as cached after a failure; drafted rows never do.
        on_progress: Called with the tokens of a long prefill.

    Raises:
        What Session.evaluate raises.
    """
    session = item.session
    n_held = session.n_cached
    try:
        return session.evaluate(item, on_progress)
    except BaseException:  # KeyboardInterrupt too
        if session.n_cached != n_held:  # else the session still holds what it held before
            text.n_cached = min(session.n_cached, n_most)
        raise


def read(text: TextState, session: Session, n_end: int, on_progress: OnProgress | None = None) -> Forward:
    """Evaluate the tokens of a text that its KV cache lacks up to the first `n_end`; return the last one's logits.

    Raises:
        What Session.evaluate raises; see evaluate().
    """
    tokens = np.array(text.token_ids[text.n_cached : n_end], np.int32)
    forward = evaluate(text, ForwardItem(session, text.n_cached, tokens), n_end, on_progress)
    text.n_cached = n_end
    return forward


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
            n = min(session.exact_rows(n_past) or 1, n_all - n_past)
            read(text, session, n_past + (n if n > 1 and session.has_exact_rows(n_past, n) else 1))


def n_common(held: Sequence[int], prompt: Sequence[int], limit: int) -> int:
    """Return how many tokens two texts have in common from their start on, at most `limit`."""
    n = 0
    while n < min(len(held), len(prompt), limit) and held[n] == prompt[n]:
        n += 1
    return n
