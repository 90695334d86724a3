"""Whether a prompt fits, told as early as possible: to tokenize a text takes a hundred times its memory at the worst.

Three bounds come one after the other: the number of a chat's messages before they are rendered, the bytes of the text
before it is tokenized, and the tokens while it is.
"""

from edgedec.counted import counted
from edgedec.errors import PromptTooLongError
from edgedec.tokenizer import Tokenizer

_SHORT = 4  # characters for each token that fits: such a text is tokenized without looking at its length first
_LEAST_MESSAGES = 4096  # a template may leave out messages, so that more than the context has tokens can fit


def require_messages(n_messages: int, n_most: int) -> None:
    """Raise PromptTooLongError for a chat of so many messages that it is not even rendered.

    Args:
        n_messages: Messages of the chat.
        n_most: Most tokens of a prompt.
    """
    most = max(n_most, _LEAST_MESSAGES)
    if n_messages > most:
        raise PromptTooLongError(
            f"the chat has {n_messages} messages; with a context of {n_most + 1} tokens it may have {most}. "
            f"Leave out the oldest ones"
        )


def require_may_fit(tokenizer: Tokenizer, text: str, n_most: int) -> None:
    """Raise PromptTooLongError for a text that certainly takes more than `n_most` tokens, without tokenizing it."""
    least = _least_tokens(tokenizer, text, n_most)
    if least > n_most:
        raise too_long(least, n_most, exact=False)


def encode_prompt(
    tokenizer: Tokenizer, text: str, n_most: int, *, add_special: bool = True, parse_special: bool = False
) -> list[int]:
    """Return the tokens of a prompt, `n_most` at the most (PromptTooLongError where there are more)."""
    ids = _encode(tokenizer, text, n_most, add_special=add_special, parse_special=parse_special)
    if isinstance(ids, int):
        raise too_long(ids, n_most, exact=False)
    if len(ids) > n_most:
        raise too_long(len(ids), n_most)
    return ids


def count_tokens(tokenizer: Tokenizer, text: str, n_most: int, *, add_special: bool, parse_special: bool) -> int:
    """Return how many tokens a text has; of one with more than `n_most` perhaps fewer, but more than `n_most`."""
    ids = _encode(tokenizer, text, n_most, add_special=add_special, parse_special=parse_special)
    return ids if isinstance(ids, int) else len(ids)


def too_long(n_tokens: int, n_most: int, *, exact: bool = True) -> PromptTooLongError:
    """Return the error for a prompt of so many tokens, or of at least so many."""
    least = "" if exact else "at least "
    return PromptTooLongError(
        f"the prompt takes {least}{counted(n_tokens, 'token')}; the context of {n_most + 1} leaves room for {n_most}. "
        f"Shorten it, or load the model with a longer context, or one that slides (--slide, slide=True)"
    )


def _encode(tokenizer: Tokenizer, text: str, n_most: int, *, add_special: bool, parse_special: bool) -> list[int] | int:
    """Return the tokens, all of them up to twice as many as fit; of a longer text a number that it has at the least."""
    least = _least_tokens(tokenizer, text, n_most)
    if least > n_most:
        return least
    ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special, most=2 * n_most)
    return len(ids) if len(ids) > 2 * n_most else ids


def _least_tokens(tokenizer: Tokenizer, text: str, n_most: int) -> int:
    return tokenizer.least_tokens(text) if len(text) > _SHORT * n_most else 0
