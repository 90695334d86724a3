"""Log-probabilities of tokens in the forms of OpenAI's two interfaces and of ollama's."""

from collections.abc import Iterable
from typing import Any

from edgedec.sequence import TokenOutput
from edgedec.tokenizer import Tokenizer


def has_logprob(output: TokenOutput, tokenizer: Tokenizer) -> bool:
    """Return whether an output stands for a token of the text, not for an end token or text that was held back."""
    return output.logprob is not None and not tokenizer.is_end(output.token_id)


def chat_entry(output: TokenOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entry of one token, with its bytes, as a chat's `logprobs.content` holds it."""
    top = [_entry(token_id, logprob, tokenizer) for token_id, logprob in output.top_logprobs.items()]
    return _entry(output.token_id, output.logprob, tokenizer) | {"top_logprobs": top}


def completion_logprobs(outputs: Iterable[TokenOutput], tokenizer: Tokenizer, offset: int = 0) -> dict[str, Any]:
    """Return the four lists of /v1/completions; `offset` is where in the text the first token begins."""
    lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for output in outputs:
        text = token_text(output.token_id, tokenizer)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(output.logprob)
        lists["top_logprobs"].append(
            {token_text(token_id, tokenizer): logprob for token_id, logprob in output.top_logprobs.items()}
        )
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text: what it is part of may span tokens, then U+FFFD stands for its bytes."""
    return tokenizer.piece(token_id).decode("utf-8", "replace")


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
