"""Whether a memory plan has room for several texts of one prompt, each of them to its end.

Texts that are begun are never ended for the plan's sake: they would be the shorter the more was drafted for them. So
their greatest length is looked at beforehand.
"""

from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import MemoryCapError, argument, counted
from edgedec.sessions.forks import are_together
from edgedec.sessions.text_pages import PAGE_TOKENS, n_pages


def tokens_behind(slot: SessionSlot, n_held: int) -> int | None:
    """Return how many tokens the texts of a prompt may hold beside the first `n_held`, which the session holds.

    They are counted in whole pages of the KV cache. None where no memory is planned.
    """
    if slot.fork_tokens is None:
        return None
    return max(0, slot.fork_tokens // PAGE_TOKENS - n_pages(0, n_held)) * PAGE_TOKENS


def text_end(slot: SessionSlot, n_prompt: int, max_tokens: int | None) -> int:
    """Return the most tokens that the KV cache holds of a text, its prompt and what is drafted for it included.

    The last token of a text is never evaluated, but a draft may take its place.
    """
    n_ctx = slot.session.room(0)
    return n_ctx if max_tokens is None else min(n_ctx, n_prompt + max_tokens - 1)


def require_room(slot: SessionSlot, n: int, n_prompt: int, max_tokens: int | None, *, rows_each: int = 0) -> None:
    """Raise MemoryCapError where the memory plan has no room for `n` texts of a prompt, each of them to its end.

    Texts that are written one after another always have room; those of a search never are.

    Args:
        slot: The slot whose session reads the prompt.
        n: How many texts.
        n_prompt: Tokens of the prompt.
        max_tokens: Most tokens of a text behind the prompt; None for as many as the context has room for.
        rows_each: Rows of logits that are kept for each text, as a search does.
    """
    n_held = n_prompt - 1  # each text evaluates the prompt's last token
    room = tokens_behind(slot, n_held)
    end = text_end(slot, n_prompt, max_tokens)
    n_each = n_pages(n_held, end) * PAGE_TOKENS
    if room is None or not (rows_each or are_together(slot.session)):
        return

    def fits(n_texts: int, n_tokens: int) -> bool:
        n_rows = max(0, rows_each * n_texts - slot.kept_rows)
        return n_texts * n_tokens + n_rows * slot.row_tokens <= room

    if fits(n, n_each):
        return
    n_fitting = max((few for few in range(1, n) if fits(few, n_each)), default=0)
    n_most = min(slot.session.room(n_prompt), end - n_held)
    pages = max((few for few in range(n_each // PAGE_TOKENS) if fits(n, few * PAGE_TOKENS)), default=0)
    n_longest = (n_held // PAGE_TOKENS + pages) * PAGE_TOKENS - n_held
    shorter = f", {n} of at most {counted(n_longest, 'token')} ({argument('max_tokens')})" if n_longest > 0 else ""
    raise MemoryCapError(
        f"{n} texts of up to {counted(n_most, 'token')} each were asked for behind a prompt of "
        f"{counted(n_prompt, 'token')}, and the memory plan has room for {n_fitting}: ask for {n_fitting}{shorter}, or "
        f"load the model for more texts ({argument('n_texts')})"
    )
