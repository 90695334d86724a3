"""Log-probabilities of tokens in the forms of OpenAI's two interfaces and of ollama's interface."""

from collections.abc import Iterable, Iterator
from typing import Any

from edgedec.sequence import TokenOutput
from edgedec.tokenizer import Tokenizer


def chat_entries(outputs: Iterable[TokenOutput], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return an entry for each token of the text, as in the `logprobs.content` of a chat."""
    return [
        _entry(output.token_id, output.logprob, tokenizer)
        | {"top_logprobs": [_entry(token_id, p, tokenizer) for token_id, p in output.top_logprobs.items()]}
        for output in _of_text(outputs, tokenizer)
    ]


def completion_logprobs(outputs: Iterable[TokenOutput], tokenizer: Tokenizer, offset: int) -> dict[str, Any] | None:
    """Return the four lists of /v1/completions for a text after `offset` characters; None where there is no token."""
    lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for output in _of_text(outputs, tokenizer):
        text = _token_text(output.token_id, tokenizer)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(output.logprob)
        lists["top_logprobs"].append(
            {_token_text(token_id, tokenizer): logprob for token_id, logprob in output.top_logprobs.items()}
        )
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists if lists["tokens"] else None


def _of_text(outputs: Iterable[TokenOutput], tokenizer: Tokenizer) -> Iterator[TokenOutput]:
    """Return the outputs that are tokens of the text, not end tokens or text that was held back."""
    return (output for output in outputs if output.logprob is not None and not tokenizer.is_end(output.token_id))


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text; U+FFFD stands for bytes of a character that spans tokens."""
    return tokenizer.piece(token_id).decode("utf-8", "replace")


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
