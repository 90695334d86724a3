"""What searches need: embeddings, rankings, and quotations.

Embeddings are OpenAI's /v1/embeddings, ollama's /api/embed and the older /api/embeddings. A model that was not trained
to embed is only used when its name says how its hidden states are to be pooled: "smollm2-135m#mean". Rankings are
/v1/rerank in the form of Jina and Cohere, or, with the field texts, of Text Embeddings Inference. Our own /extract
returns the stretches of a passage that most probably answer a question.
"""

import base64
from collections.abc import Sequence
from secrets import token_hex
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from edgedec.api.engine import Engine
from edgedec.decoding.prompt_length import require_may_fit
from edgedec.errors import OptionError, PromptTooLongError, RequestError
from edgedec.gguf.model_kinds import POOLINGS
from edgedec_apps import embedding, extraction, ranking
from edgedec_apps.embedding import require_dimensions, require_pooling
from edgedec_apps.extraction import MOST_SPAN_TOKENS, MOST_SPANS, Extraction
from edgedec_apps.rank_prompts import QueryTooLongError
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError, too_long_field
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.prompts import encode, tokenizer_bytes
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import read_options
from edgedec_apps.server.openai.requests import are_ids
from edgedec_apps.server.registry.models import asked_seconds
from edgedec_apps.server.registry.names import Named

_MOST_TEXTS = 2048
_NUMBER_BYTES = 40  # of a number in an answer, with its text
_MARK = "#"  # before the pooling in a model's name

Text = str | tuple[int, ...]


async def embeddings(request: Request, service: Service) -> Answer:
    """Answer in OpenAI's form."""
    fields = await read_fields(request, service.settings)
    model = fields.text("model")
    embedder, pooling = await _named(service, model)
    texts, dimensions = _read_texts(fields, "input"), fields.whole("dimensions", low=1)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise fields.refusal("encoding_format", f"is {form!r:.40}; it must be float or base64")
    fields.skip("user")
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        vectors, n_tokens = await _embed(job, fields, texts, pooling, dimensions, truncate=False)
        shown = vectors.tolist()
        if form == "base64":  # of little-endian float32
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": model or embedder.name, "usage": usage}

    return Answer(service, embedder, fields, compute)


async def embed(request: Request, service: Service) -> Answer:
    """Answer in ollama's form."""
    fields = await read_fields(request, service.settings)
    model = str(fields.required("model"))
    embedder, pooling = await _named_of_ollama(service, fields, model)
    texts, dimensions = _read_texts(fields, "input"), fields.whole("dimensions", low=1)
    truncate = fields.optional_flag("truncate") is not False
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        load_s, began = job.reference.load_s, perf_counter()
        vectors, n_tokens = await _embed(job, fields, texts, pooling, dimensions, truncate=truncate)
        times = {"total_duration": load_s + perf_counter() - began, "load_duration": load_s}
        counts = {name: round(1e9 * seconds) for name, seconds in times.items()} | {"prompt_eval_count": n_tokens}
        return {"model": model, "embeddings": vectors.tolist()} | counts

    return Answer(service, embedder, fields, compute)


async def embed_one(request: Request, service: Service) -> Answer:
    """Answer in the form of ollama's older address, which takes one text."""
    fields = await read_fields(request, service.settings)
    embedder, pooling = await _named_of_ollama(service, fields, str(fields.required("model")))
    text = fields.required_text("prompt")
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        vectors, _ = await _embed(job, fields, [text], pooling, None, truncate=True)
        return {"embedding": vectors[0].tolist()}

    return Answer(service, embedder, fields, compute)


async def _named(service: Service, model: str | None) -> tuple[Named, str | None]:
    """Return the model of a name, and the pooling that the name asks for, or None."""
    name, mark, pooling = (model or "").rpartition(_MARK)
    if not mark or pooling not in POOLINGS:
        return await service.find(model or None), None
    return await service.find(name or None), pooling


async def _named_of_ollama(service: Service, fields: Fields, model: str) -> tuple[Named, str | None]:
    """Return the model of a name with ollama's fields about it, and the pooling that the name asks for, or None."""
    embedder, pooling = await _named(service, model)
    _, n_ctx = read_options(fields.object("options"))
    return embedder.asked(asked_seconds(fields.take("keep_alive")), n_ctx), pooling


def _read_texts(fields: Fields, name: str) -> list[Text]:
    """Return the texts of a field: a text or token ids, or a list of these."""
    value = fields.required(name)
    several = value if isinstance(value, list) and not are_ids(value) else [value]
    if not 1 <= len(several) <= _MOST_TEXTS:
        raise fields.refusal(name, f"holds {len(several)} texts; it must be 1 to {_MOST_TEXTS}")
    for i, each in enumerate(several):
        if not (isinstance(each, str) and each) and not are_ids(each):
            place = name if several == [value] else f"{name}[{i}]"
            what = f"is {each!r:.40}; it must be a text that is not empty, or a list of token ids"
            raise fields.refusal(place, what)
    return [each if isinstance(each, str) else tuple(each) for each in several]


async def _embed(
    job: Job, fields: Fields, texts: Sequence[Text], pooling: str | None, dimensions: int | None, *, truncate: bool
) -> tuple[NDArray[np.float32], int]:
    """Return f32[n_texts, n_dimensions], the vectors of texts, and the number of all tokens, in a place of the queue.

    Raises:
        ApiError: The model does not embed, a text does not fit or is empty, or `dimensions` is too large.
    """
    engine = job.engine
    chosen = _checked(engine, fields, pooling, dimensions)
    await job.memory.grow(_NUMBER_BYTES * len(texts) * (dimensions or engine.card.n_embd))
    with job.queue.preparing():
        all_ids = [await _ids(job, text, engine, truncate=truncate) for text in texts]
    async with job.queue.turn():
        try:
            vectors = await job.in_thread(
                embedding.embed, engine, all_ids, pooling=chosen, dimensions=dimensions, cancel=job.cancel
            )
        except PromptTooLongError as error:  # of token ids
            raise too_long_field(error, "input") from error
    return vectors, sum(map(len, all_ids))


def _checked(engine: Engine, fields: Fields, pooling: str | None, dimensions: int | None) -> Any:
    """Return the pooling to use (ApiError where the model does not embed, or its vectors are too short)."""
    try:
        require_dimensions(engine.card, dimensions)
    except RequestError as error:
        raise fields.refused(error, "dimensions", "dimensions") from error
    try:
        return require_pooling(engine.card, pooling)
    except RequestError as error:
        names = " or ".join(f"'NAME{_MARK}{each}'" for each in POOLINGS)
        what = f"{error}: here, call it {names} in the field model"
        raise ApiError(what, param="model", code="not_an_embedding_model") from error


async def _ids(job: Job, text: Text, engine: Engine, *, truncate: bool) -> tuple[int, ...]:
    """Return the tokens of a text; where it may be cut, those of its beginning, and its last one, which may end it."""
    if isinstance(text, tuple):
        return text
    if not truncate:
        try:
            return await encode(job, [text], lambda: engine.prompt_ids(text, as_said=True, continued=False))
        except PromptTooLongError as error:
            raise too_long_field(error, "input") from error
    return await encode(job, [text], lambda: engine.requests.cut_ids(text))


_MOST_DOCUMENTS = 2048
_TOKEN_BYTES = 40  # of a token of a prompt, which is held in a list and then in a tuple
_RESULT_BYTES = 300  # of a document's place in the answer, without its text


async def rerank(request: Request, service: Service) -> Answer:
    """Answer with the documents' scores, the best first; with the list alone to Text Embeddings Inference's form."""
    fields, model = await read_named(request, service)
    query, is_plain = _text(fields, "query"), fields.has("texts")
    name = "texts" if is_plain else "documents"
    if is_plain and fields.has("documents"):
        raise fields.refusal("documents", "and texts exclude each other; leave one out")
    documents = _texts(fields, name)
    n_top, most = fields.whole("top_n", low=1), fields.whole("max_tokens_per_doc", low=1)
    truncates, with_texts = fields.flag("truncate"), fields.flag("return_text" if is_plain else "return_documents")
    raw, normalize = fields.optional_flag("raw_scores"), fields.optional_flag("normalize")
    fields.only("truncation_direction", "right", "Right")
    fields.skip("user", "priority")
    fields.end()
    if raw is not None and raw == normalize:
        raise ApiError(f"raw_scores and normalize are both {str(raw).lower()}; give one of them", param="normalize")
    normalizes = is_plain and not raw if normalize is None else normalize  # the plain form does by itself

    async def compute(job: Job) -> Any:
        engine, texts = job.engine, (query, *documents)
        n_most = max(1, engine.requests.n_prompt_max) * len(documents)
        n_bytes = sum(map(len, texts)) + len(query) * len(documents)
        await job.memory.grow(
            _TOKEN_BYTES * min(n_most, n_bytes) + _RESULT_BYTES * len(texts) + await tokenizer_bytes(texts)
        )
        cut = engine.n_ctx if truncates and most is None else most  # as many tokens as fit
        async with job.queue.turn():
            try:
                ranked = await job.in_thread(
                    ranking.rank, engine, query, documents, max_document_tokens=cut, cancel=job.cancel
                )
            except PromptTooLongError as error:
                raise too_long_field(error, "query" if isinstance(error, QueryTooLongError) else name) from error
        best, kind = ranked.best(n_top, normalize=normalizes)
        if is_plain:
            return [{"index": i, "score": p} | ({"text": documents[i]} if with_texts else {}) for i, p in best]
        shown = [{"document": {"text": text}} if with_texts else {} for text in documents]
        return {
            "id": f"rerank-{token_hex(12)}",
            "object": "list",
            "model": model.name,
            "results": [{"index": i, "relevance_score": p} | shown[i] for i, p in best],
            "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), sum(ranked.n_tokens)),
            "score_kind": kind,
            "notes": list(ranked.notes),
        }

    return Answer(service, model, fields, compute)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the texts of a list of texts, or of objects that have one."""
    value = fields.required(name)
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_DOCUMENTS:
        raise fields.refusal(name, f"must be a list of 1 to {_MOST_DOCUMENTS} texts")
    texts: list[str] = []
    for i, each in enumerate(value):
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise fields.refusal(f"{name}[{i}]", 'is no text; give a string, or an object with "text"')
        texts.append(text)
    return tuple(texts)


_START_BYTES = 400  # of a place where spans begin, beside its tokens
_SPAN_TOKEN_BYTES = 8  # of each token of its longest span


async def extract(request: Request, service: Service) -> Answer:
    """Answer with the quotations and with what finding them took."""
    fields, model = await read_named(request, service)
    question, passage = _text(fields, "question"), _text(fields, "passage")
    n = fields.whole("n", low=1, high=MOST_SPANS) or 3
    max_tokens = fields.whole("max_tokens", low=1, high=MOST_SPAN_TOKENS) or 64
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        engine = job.engine
        await job.in_thread(require_may_fit, engine.tokenizer, passage, engine.requests.n_prompt_max)
        await job.memory.grow(engine.n_ctx * (_START_BYTES + _SPAN_TOKEN_BYTES * max_tokens))
        async with job.queue.turn():
            try:
                spans = await job.in_thread(
                    extraction.extract, engine, question, passage, n=n, max_tokens=max_tokens, cancel=job.cancel
                )
            except OptionError as error:  # the passage leaves less room
                raise fields.refused(error, "max_tokens", "max_tokens") from error
        return _document(spans)

    return Answer(service, model, fields, compute)


def _text(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None or not text.strip():
        raise fields.refusal(name, "is missing or empty; give it")
    return text


def _document(extraction: Extraction) -> dict[str, Any]:
    """Return the JSON object of what was found."""
    spans = [
        {"text": span.text, "start": span.start, "end": span.end, "probability": span.probability}
        | {"logprob": span.logprob}
        for span in extraction.spans
    ]
    timings = {"prompt_ms": 1000 * extraction.prompt_s, "total_ms": 1000 * extraction.total_s}
    usage = {"prompt_tokens": extraction.n_prompt_tokens, "cached_tokens": extraction.n_reused_tokens}
    searched = {"starts": extraction.n_starts, "span_tokens": extraction.n_span_tokens}
    searched |= {"forwards": extraction.n_forwards, "rows": extraction.n_rows}
    return {"object": "extraction", "spans": spans, "usage": usage, "searched": searched, "timings": timings}
