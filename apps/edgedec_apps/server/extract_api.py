"""Our own /extract: the stretches of a passage that most probably answer a question, with their probabilities."""

import asyncio
from typing import Any

from starlette.requests import Request

from edgedec.decoding.prompt_length import require_may_fit
from edgedec.errors import OptionError
from edgedec_apps import extraction
from edgedec_apps.extraction import MOST_SPAN_TOKENS, MOST_SPANS, Extraction
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.service import Service

_START_BYTES = 400  # of a place where spans begin, beside its tokens
_TOKEN_BYTES = 8  # of each token of its longest span


async def extract(request: Request, service: Service) -> Answer:
    """Answer with the quotations and with what finding them took."""
    fields, named = await read_named(request, service)
    question, passage = _text(fields, "question"), _text(fields, "passage")
    n = fields.whole("n", low=1, high=MOST_SPANS) or 3
    max_tokens = fields.whole("max_tokens", low=1, high=MOST_SPAN_TOKENS) or 64
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        engine = job.engine
        await asyncio.to_thread(require_may_fit, engine.tokenizer, passage, engine.n_prompt_max)
        await job.memory.grow(engine.n_ctx * (_START_BYTES + _TOKEN_BYTES * max_tokens))
        async with job.queue.turn():
            try:
                found = await job.in_thread(extraction.extract, engine, question, passage, n=n, max_tokens=max_tokens)
            except OptionError as error:  # the passage leaves less room
                raise fields.refused(error, "max_tokens", "max_tokens") from error
        return _document(found)

    return Answer(service, named, fields, compute)


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
