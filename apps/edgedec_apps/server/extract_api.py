"""Our own /extract: the stretches of a passage that most probably answer a question, with their probabilities."""

import asyncio
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgedec.decoding.prompt_length import require_may_fit
from edgedec.errors import OptionError
from edgedec_apps import extraction
from edgedec_apps.extraction import MOST_SPAN_TOKENS, MOST_SPANS, Extraction
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.lent import Computed, Lending, read_wanted, until_done
from edgedec_apps.server.core.service import Service, endpoint

_START_BYTES = 400  # of a place where spans begin, beside its tokens
_TOKEN_BYTES = 8  # of each token of its longest span


def routes() -> list[BaseRoute]:
    """Return the route."""
    return [Route("/extract", endpoint(extract), methods=["POST"])]


async def extract(request: Request, service: Service) -> Response:
    """Answer with the quotations and with what finding them took."""
    fields, wanted = await read_wanted(request, service)
    question, passage = _text(fields, "question"), _text(fields, "passage")
    n = fields.whole("n", low=1, high=MOST_SPANS) or 3
    max_tokens = fields.whole("max_tokens", low=1, high=MOST_SPAN_TOKENS) or 64
    fields.end()

    async def compute(lending: Lending) -> dict[str, Any]:
        engine = lending.lease.loaded.engine
        await asyncio.to_thread(require_may_fit, engine.tokenizer, passage, engine.requests.n_prompt_max)
        await lending.share.grow(engine.n_ctx * (_START_BYTES + _TOKEN_BYTES * max_tokens))
        async with lending.queue.turn():
            work = asyncio.to_thread(
                extraction.extract, engine, question, passage, n=n, max_tokens=max_tokens, cancel=lending.cancel
            )
            try:
                found = await until_done(work, lending)
            except OptionError as error:  # the passage leaves less room
                raise fields.refused(error, "max_tokens", "max_tokens") from error
        return _document(found)

    return cast(Response, Computed(service, wanted, fields, compute))


def _text(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None or not text.strip():
        raise fields.refusal(name, "is missing or empty; give it")
    return text


def _document(found: Extraction) -> dict[str, Any]:
    """Return the JSON object of what was found."""
    spans = [
        {"text": span.text, "start": span.start, "end": span.end, "probability": span.probability}
        | {"logprob": span.logprob}
        for span in found.spans
    ]
    timings = {"prompt_ms": 1000 * found.prompt_s, "total_ms": 1000 * found.total_s}
    usage = {"prompt_tokens": found.n_prompt_tokens, "cached_tokens": found.n_reused_tokens}
    searched = {"starts": found.n_starts, "span_tokens": found.n_span_tokens}
    searched |= {"forwards": found.n_forwards, "rows": found.n_rows}
    return {"object": "extraction", "spans": spans, "usage": usage, "searched": searched, "timings": timings}
