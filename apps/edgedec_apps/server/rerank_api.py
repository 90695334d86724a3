"""Ranking: /v1/rerank in the form of Jina and Cohere, or, with the field texts, of Text Embeddings Inference."""

from secrets import token_hex
from typing import Any

from starlette.requests import Request

from edgedec.errors import PromptTooLongError
from edgedec_apps import ranking
from edgedec_apps.rank_prompts import QueryTooLongError
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.errors import ApiError, too_long_field
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.prompts import tokenizer_bytes
from edgedec_apps.server.core.service import Service

_MOST_DOCUMENTS = 2048
_TOKEN_BYTES = 40  # of a token of a prompt, which is held in a list and then in a tuple
_RESULT_BYTES = 300  # of a document's place in the answer, without its text


async def rerank(request: Request, service: Service) -> Answer:
    """Answer with the documents' scores, the best first; with the list alone to Text Embeddings Inference's form."""
    fields, named = await read_named(request, service)
    query = fields.text("query")
    if query is None or not query.strip():
        raise fields.refusal("query", "is missing or empty; give it")
    is_plain = fields.has("texts")
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
        n_most = max(1, engine.n_prompt_max) * len(documents)
        n_bytes = sum(map(len, texts)) + len(query) * len(documents)
        await job.memory.grow(
            _TOKEN_BYTES * min(n_most, n_bytes) + _RESULT_BYTES * len(texts) + await tokenizer_bytes(texts)
        )
        cut = engine.n_ctx if truncates and most is None else most  # as many tokens as fit
        async with job.queue.turn():
            try:
                found = await job.in_thread(ranking.rank, engine, query, documents, max_document_tokens=cut)
            except PromptTooLongError as error:
                raise too_long_field(error, "query" if isinstance(error, QueryTooLongError) else name) from error
        best, kind = found.best(n_top, normalize=normalizes)
        if is_plain:
            return [{"index": i, "score": p} | ({"text": documents[i]} if with_texts else {}) for i, p in best]
        shown = [{"document": {"text": text}} if with_texts else {} for text in documents]
        return {
            "id": f"rerank-{token_hex(12)}",
            "object": "list",
            "model": named.name,
            "results": [{"index": i, "relevance_score": p} | shown[i] for i, p in best],
            "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), sum(found.n_tokens)),
            "score_kind": kind,
            "notes": list(found.notes),
        }

    return Answer(service, named, fields, compute)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the texts of a list of texts, or of objects that have one."""
    given = fields.required(name)
    if not isinstance(given, list) or not 1 <= len(given) <= _MOST_DOCUMENTS:
        raise fields.refusal(name, f"must be a list of 1 to {_MOST_DOCUMENTS} texts")
    texts: list[str] = []
    for i, each in enumerate(given):
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise fields.refusal(f"{name}[{i}]", 'is no text; give a string, or an object with "text"')
        texts.append(text)
    return tuple(texts)
