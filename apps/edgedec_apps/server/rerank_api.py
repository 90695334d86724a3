"""Ranking: /v1/rerank in the form of Jina and Cohere, or, with the field texts, of Text Embeddings Inference."""

import asyncio
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgedec.errors import PromptTooLongError
from edgedec_apps import ranking
from edgedec_apps.rank_prompts import QueryTooLongError
from edgedec_apps.ranking import Ranking
from edgedec_apps.server.core.errors import ApiError, too_long_field
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.lent import Computed, Lending, read_wanted, until_done
from edgedec_apps.server.core.prompts import tokenizer_bytes
from edgedec_apps.server.core.service import Service, endpoint

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
_MOST_DOCUMENTS = 2048
_TOKEN_BYTES = 40  # of a token of a prompt, which is held in a list and then in a tuple
_RESULT_BYTES = 300  # of a document's place in the answer, without its text


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for.

    Attributes:
        query: The query.
        documents: The documents' texts.
        n_top: Most results.
        cut: Most tokens of a document; None for no cut. With `cuts_to_fit` it is as many as fit.
        cuts_to_fit: Whether documents that do not fit are cut.
        normalizes: Whether scores are numbers from 0 to 1.
        with_texts: Whether the answer holds the documents.
        is_plain: Whether the answer is the list alone, as Text Embeddings Inference sends it.
    """

    query: str
    documents: tuple[str, ...]
    n_top: int | None
    cut: int | None
    cuts_to_fit: bool
    normalizes: bool
    with_texts: bool
    is_plain: bool


def routes() -> list[BaseRoute]:
    """Return the routes: one handler under the addresses that clients use."""
    return [Route(path, endpoint(rerank), methods=["POST"]) for path in PATHS]


async def rerank(request: Request, service: Service) -> Response:
    """Answer with the documents' scores, the best first."""
    fields, wanted_model = await read_wanted(request, service)
    wanted = _read(fields)
    name = wanted_model.named.name

    async def compute(lending: Lending) -> Any:
        engine = lending.lease.loaded.engine
        texts = (wanted.query, *wanted.documents)
        n_most = max(1, engine.requests.n_prompt_max) * len(wanted.documents)
        n_bytes = sum(map(len, texts)) + len(wanted.query) * len(wanted.documents)
        await lending.share.grow(
            _TOKEN_BYTES * min(n_most, n_bytes) + _RESULT_BYTES * len(texts) + await tokenizer_bytes(texts)
        )
        cut = engine.n_ctx if wanted.cuts_to_fit and wanted.cut is None else wanted.cut
        async with lending.queue.turn():
            work = asyncio.to_thread(
                ranking.rank, engine, wanted.query, wanted.documents, max_document_tokens=cut, cancel=lending.cancel
            )
            try:
                found = await until_done(work, lending)
            except PromptTooLongError as error:
                documents = "texts" if wanted.is_plain else "documents"
                raise too_long_field(error, "query" if isinstance(error, QueryTooLongError) else documents) from error
        return _plain(wanted, found) if wanted.is_plain else _document(wanted, found, name)

    return cast(Response, Computed(service, wanted_model, fields, compute))


def _read(fields: Fields) -> _Wanted:
    """Return what the fields of either form ask for."""
    query = fields.text("query")
    if query is None or not query.strip():
        raise fields.refusal("query", "is missing or empty; give it")
    is_plain = fields.has("texts")
    name = "texts" if is_plain else "documents"
    if is_plain and fields.has("documents"):
        raise fields.refusal("documents", "and texts exclude each other; leave one out")
    documents = _texts(fields, name)
    n_top = fields.whole("top_n", low=1)
    cut = fields.whole("max_tokens_per_doc", low=1)
    truncates = fields.flag("truncate")
    raw, normalize = fields.optional_flag("raw_scores"), fields.optional_flag("normalize")
    with_texts = fields.flag("return_text") if is_plain else fields.flag("return_documents")
    fields.only("truncation_direction", "right", "Right")
    fields.skip("user", "priority")
    fields.end()
    if raw is not None and raw == normalize:
        raise ApiError(f"raw_scores and normalize are both {str(raw).lower()}; give one of them", param="normalize")
    if normalize is None:  # Text Embeddings Inference normalizes unless it is told not to
        normalize = is_plain and not raw
    return _Wanted(query, documents, n_top, cut, truncates, normalize, with_texts, is_plain)


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


def _plain(wanted: _Wanted, found: Ranking) -> list[dict[str, Any]]:
    """Return the answer of Text Embeddings Inference."""
    texts, (best, _) = wanted.documents, found.best(wanted.n_top, normalize=wanted.normalizes)
    return [{"index": i, "score": score} | ({"text": texts[i]} if wanted.with_texts else {}) for i, score in best]


def _document(wanted: _Wanted, found: Ranking, name: str) -> dict[str, Any]:
    """Return the answer of Jina and Cohere, with what the scores are."""
    texts, n_tokens = wanted.documents, sum(found.n_tokens)
    best, kind = found.best(wanted.n_top, normalize=wanted.normalizes)
    results = [
        {"index": i, "relevance_score": score} | ({"document": {"text": texts[i]}} if wanted.with_texts else {})
        for i, score in best
    ]
    return {
        "id": f"rerank-{token_hex(12)}",
        "object": "list",
        "model": name,
        "results": results,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "score_kind": kind,
        "notes": list(found.notes),
    }
