"""llama-server's /tokenize and /detokenize: texts to token ids and back."""

import asyncio
from typing import Any

from starlette.requests import Request

from edgedec.tokenizer import Tokenizer
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.prompts import encode
from edgedec_apps.server.core.service import Service

_TOKEN_BYTES = 64  # of a token in an answer, as an object and as text
_PIECE_BYTES = 400  # of a token with its piece


async def tokenize(request: Request, service: Service) -> Answer:
    """Answer with the token ids of a text, and with their pieces where the request wants them."""
    fields, named = await read_named(request, service)
    text = fields.required_text("content")
    add_special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")
    parse_special = fields.optional_flag("parse_special") is not False
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        tokenizer = job.engine.tokenizer
        await job.memory.grow((_PIECE_BYTES if with_pieces else _TOKEN_BYTES) * len(text.encode()))
        with job.queue.preparing():
            ids = await encode(
                [text],
                job.memory,
                lambda: tokenizer.encode(text, add_special=add_special, parse_special=parse_special),
            )
        if not with_pieces:
            return {"tokens": list(ids)}
        return await asyncio.to_thread(lambda: {"tokens": [_with_piece(tokenizer, token_id) for token_id in ids]})

    return Answer(service, named, fields, compute)


def _with_piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes where they are no text."""
    data = tokenizer.piece(token_id)
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}


async def detokenize(request: Request, service: Service) -> Answer:
    """Answer with the text of token ids."""
    fields, named = await read_named(request, service)
    tokens = fields.required("tokens")
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        tokenizer = job.engine.tokenizer
        if not isinstance(tokens, list) or not all(
            type(token_id) is int and 0 <= token_id < tokenizer.n_vocab for token_id in tokens
        ):
            raise fields.refusal("tokens", f"must be a list of token ids, 0 to {tokenizer.n_vocab - 1}")
        return {"content": await asyncio.to_thread(tokenizer.decode, tokens)}

    return Answer(service, named, fields, compute)
