"""Checks whether a prompt fits, as early as possible: at worst, tokenizing a text takes a hundred times its memory.

Three bounds follow each other: the number of messages of a chat, before it is rendered; the bytes of the text, before
it is tokenized; the number of tokens, during tokenization.
"""

import math
from functools import partial

from edgedec.control_tokens import MARK, encode_with_controls
from edgedec.errors import PromptTooLongError, argument, counted
from edgedec.tokenizer import Tokenizer

_SHORT = 4  # characters for each token of room: a text up to there is tokenized without another check
_ANSWER, _CONTEXT_STEP = 512, 256  # tokens of an answer, which a context that is named has room for, and its multiple
_PIECES, _PIECE, _MARGIN = 64, 1024, 1.1  # pieces of a text, their characters, and what their tokens are multiplied by
CUT_TEXT, CUT_DOCUMENT = "engine.requests.cut_ids", "max_document_tokens=engine.n_ctx"
"""What cuts a text to embed, and a document to rank, to what fits: their names in a message, as of an argument."""
_LEAST_MESSAGES = 4096  # a template may leave out messages, so more messages than the context has tokens can fit


def require_messages(n_messages: int, n_most: int) -> None:
    """Raise PromptTooLongError for a chat of so many messages that rendering it is not worth the time.

    `n_most` is the most tokens of a prompt.
    """
    most = max(n_most, _LEAST_MESSAGES)
    if n_messages > most:
        raise PromptTooLongError(
            f"the chat has {n_messages} messages; with a context of {n_most + 1} tokens it may have {most}. "
            f"Leave out the oldest ones"
        )


def require_may_fit(tokenizer: Tokenizer, text: str, n_most: int, n_trained: int = 0, *, cut: str = "") -> None:
    """Raise PromptTooLongError for a text that certainly takes more than `n_most` tokens, without tokenizing it."""
    least = _least_tokens(tokenizer, text, n_most)
    if least > n_most:
        raise too_long(about_tokens(tokenizer, text, least), n_most, n_trained, exact=False, cut=cut)


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    n_most: int,
    n_trained: int = 0,
    *,
    add_special: bool = True,
    parse_special: bool = False,
    cut: str = "",
) -> list[int]:
    """Return the tokens of a prompt, at most `n_most` (raises too_long() where it has more).

    With `parse_special` they are those of encode_with_controls, else those of Tokenizer.encode.
    """
    ids = _encode(tokenizer, text, n_most, add_special=add_special, parse_special=parse_special)
    if isinstance(ids, int) or len(ids) > n_most:
        if isinstance(ids, int):
            raise too_long(about_tokens(tokenizer, text, ids), n_most, n_trained, exact=False, cut=cut)
        raise too_long(len(ids), n_most, n_trained, cut=cut)
    return ids


def count_tokens(tokenizer: Tokenizer, text: str, n_most: int) -> int:
    """Return the number of tokens of a prompt; where that is above `n_most`, any number between `n_most` and it."""
    ids = _encode(tokenizer, text, n_most, add_special=True, parse_special=True)
    return ids if isinstance(ids, int) else len(ids)


def too_long(
    n_tokens: int, n_most: int, n_trained: int = 0, *, exact: bool = True, cut: str = ""
) -> PromptTooLongError:
    """Return the error for a prompt of `n_tokens` tokens, or of about so many where that is not exact.

    It names the context that would do, unless that is beyond the `n_trained` tokens of the model (0: not known). For a
    text that the model does not go on with, `cut` is what cuts it; such a text may fill the context.
    """
    about = "" if exact else "about "
    if cut:
        longer = f", or load the model with a longer context ({argument('n_ctx')} {n_tokens})"
        longer = longer if n_tokens <= n_trained else ""
        return PromptTooLongError(
            f"the text takes {about}{counted(n_tokens, 'token')}; there is room for {n_most}. Shorten it, or cut it to "
            f"what fits ({argument(cut)}){longer}"
        )
    n_ctx = -(-(n_tokens + _ANSWER) // _CONTEXT_STEP) * _CONTEXT_STEP
    n_ctx = n_trained if n_tokens < n_trained < n_ctx else n_ctx
    longer = f"load the model with a longer context ({argument('n_ctx')} {n_ctx})"
    if 0 < n_trained < n_ctx:
        longer = f"load a model that was trained for {about}{n_ctx} (this one: {n_trained})"
    error = PromptTooLongError(
        f"the prompt takes {about}{counted(n_tokens, 'token')}; the context of {n_most + 1} leaves room for {n_most}. "
        f"Shorten it, or {longer}, or one that slides ({argument('slide')})"
    )
    error.n_tokens, error.n_most = n_tokens, n_most
    return error


def _encode(tokenizer: Tokenizer, text: str, n_most: int, *, add_special: bool, parse_special: bool) -> list[int] | int:
    """Return the tokens of a text; of a text with more than `2 * n_most` tokens, a lower bound of their number."""
    least = _least_tokens(tokenizer, text, n_most)
    if least > n_most:
        return least
    encode = partial(encode_with_controls, tokenizer) if parse_special else tokenizer.encode
    ids = encode(text, add_special=add_special, most=2 * n_most)
    return len(ids) if len(ids) > 2 * n_most else ids


def about_tokens(tokenizer: Tokenizer, text: str, least: int) -> int:
    """Return about how many tokens a text takes, rather more than fewer: by pieces from all over it."""
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), max(_PIECE, len(text) // _PIECES))]
    n = sum(len(tokenizer.encode(piece, add_special=False, parse_special=False)) for piece in pieces)
    return max(least, math.ceil(_MARGIN * n * len(text) / sum(map(len, pieces))))


def _least_tokens(tokenizer: Tokenizer, text: str, n_most: int) -> int:
    """Return a lower bound of the number of tokens of a text; 0 for a text that is short enough to be tokenized."""
    return tokenizer.least_tokens(text.replace(MARK, "")) if len(text) > _SHORT * n_most else 0
