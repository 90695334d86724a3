"""Embeddings: OpenAI's /v1/embeddings, ollama's /api/embed and the older /api/embeddings.

A model that was not trained to embed is only used when its name says how its hidden states are to be pooled:
"smollm2-135m#mean".
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgedec.api.engine import Engine
from edgedec.errors import PromptTooLongError, RequestError
from edgedec.gguf.model_kinds import POOLINGS
from edgedec_apps import embedding
from edgedec_apps.embedding import require_dimensions, require_pooling
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError, too_long_field
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.lent import Computed, Lending, WantedModel, until_done
from edgedec_apps.server.core.prompts import encode
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.ollama.requests import read_options
from edgedec_apps.server.openai.requests import are_ids
from edgedec_apps.server.shelf.keep_alive import asked_seconds

_MOST_TEXTS = 2048
_NUMBER_BYTES = 40  # of a number in an answer, with its text
_MARK = "#"  # before the pooling in a model's name

Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Embedded:
    """What the model made of the texts.

    Attributes:
        vectors: f32[n_texts, n_dimensions].
        n_tokens: Number of tokens of all texts.
        load_s: Seconds that the request waited for the model.
        total_s: Seconds from then to the end.
    """

    vectors: NDArray[np.float32]
    n_tokens: int
    load_s: float
    total_s: float


def routes() -> list[BaseRoute]:
    """Return the routes of all three addresses."""
    return [
        Route("/v1/embeddings", endpoint(embeddings), methods=["POST"]),
        Route("/api/embed", endpoint(embed), methods=["POST"]),
        Route("/api/embeddings", endpoint(embed_one), methods=["POST"]),
    ]


async def embeddings(request: Request, service: Service) -> Response:
    """Answer in OpenAI's form."""
    fields = await read_fields(request, service.settings)
    model = fields.text("model")
    wanted, pooling = await _wanted(service, model)
    texts, dimensions = _read_texts(fields, "input"), fields.whole("dimensions", low=1)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise fields.refusal("encoding_format", f"is {form!r:.40}; it must be float or base64")
    fields.skip("user")
    fields.end()

    async def compute(lending: Lending) -> dict[str, Any]:
        found = await _embed(lending, fields, texts, pooling, dimensions, truncate=False)
        shown = [_encoded(vector, form) for vector in found.vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
        usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        return {"object": "list", "data": data, "model": model or wanted.named.name, "usage": usage}

    return cast(Response, Computed(service, wanted, fields, compute))


async def embed(request: Request, service: Service) -> Response:
    """Answer in ollama's form."""
    fields = await read_fields(request, service.settings)
    model = str(fields.required("model"))
    wanted, pooling = await _wanted_of_ollama(service, fields, model)
    texts, dimensions = _read_texts(fields, "input"), fields.whole("dimensions", low=1)
    truncate = fields.optional_flag("truncate") is not False
    fields.end()

    async def compute(lending: Lending) -> dict[str, Any]:
        found = await _embed(lending, fields, texts, pooling, dimensions, truncate=truncate)
        times = {"total_duration": found.load_s + found.total_s, "load_duration": found.load_s}
        counts = {name: round(1e9 * seconds) for name, seconds in times.items()} | {"prompt_eval_count": found.n_tokens}
        return {"model": model, "embeddings": found.vectors.tolist()} | counts

    return cast(Response, Computed(service, wanted, fields, compute))


async def embed_one(request: Request, service: Service) -> Response:
    """Answer in the form of ollama's older address, which takes one text."""
    fields = await read_fields(request, service.settings)
    wanted, pooling = await _wanted_of_ollama(service, fields, str(fields.required("model")))
    text = fields.required_text("prompt")
    fields.end()

    async def compute(lending: Lending) -> dict[str, Any]:
        found = await _embed(lending, fields, [text], pooling, None, truncate=True)
        return {"embedding": found.vectors[0].tolist()}

    return cast(Response, Computed(service, wanted, fields, compute))


async def _wanted(service: Service, model: str | None) -> tuple[WantedModel, str | None]:
    """Return the model of a name, and the pooling that the name asks for, or None."""
    name, mark, pooling = (model or "").rpartition(_MARK)
    if not mark or pooling not in POOLINGS:
        return WantedModel(await service.find(model or None)), None
    return WantedModel(await service.find(name or None)), pooling


async def _wanted_of_ollama(service: Service, fields: Fields, model: str) -> tuple[WantedModel, str | None]:
    """Return the model of a name with ollama's fields about it, and the pooling that the name asks for, or None."""
    wanted, pooling = await _wanted(service, model)
    _, n_ctx = read_options(fields.object("options"))
    return WantedModel(wanted.named, n_ctx, asked_seconds(fields.take("keep_alive"))), pooling


def _read_texts(fields: Fields, name: str) -> list[Text]:
    """Return the texts of a field: a text or token ids, or a list of these."""
    given = fields.required(name)
    several = given if isinstance(given, list) and not are_ids(given) else [given]
    if not 1 <= len(several) <= _MOST_TEXTS:
        raise fields.refusal(name, f"holds {len(several)} texts; it must be 1 to {_MOST_TEXTS}")
    for i, each in enumerate(several):
        if not (isinstance(each, str) and each) and not are_ids(each):
            place = name if several == [given] else f"{name}[{i}]"
            what = f"is {each!r:.40}; it must be a text that is not empty, or a list of token ids"
            raise fields.refusal(place, what)
    return [each if isinstance(each, str) else tuple(each) for each in several]


async def _embed(
    lending: Lending,
    fields: Fields,
    texts: Sequence[Text],
    pooling: str | None,
    dimensions: int | None,
    *,
    truncate: bool,
) -> _Embedded:
    """Return the vectors of texts, in a place of the queue.

    Raises:
        ApiError: The model does not embed, a text does not fit or is empty, or `dimensions` is too large.
    """
    engine, began = lending.lease.loaded.engine, perf_counter()
    chosen = _checked(engine, fields, pooling, dimensions)
    await lending.share.grow(_NUMBER_BYTES * len(texts) * (dimensions or engine.card.n_embd))
    with lending.queue.preparing():
        all_ids = [await _ids(lending, text, engine, truncate=truncate) for text in texts]
    async with lending.queue.turn():
        work = asyncio.to_thread(
            embedding.embed, engine, all_ids, pooling=chosen, dimensions=dimensions, cancel=lending.cancel
        )
        try:
            vectors = await until_done(work, lending)
        except PromptTooLongError as error:  # of token ids
            raise too_long_field(error, "input") from error
    load_s = lending.lease.load_s
    return _Embedded(vectors, sum(map(len, all_ids)), load_s, perf_counter() - began)


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


async def _ids(lending: Lending, text: Text, engine: Engine, *, truncate: bool) -> tuple[int, ...]:
    """Return the tokens of a text; where it may be cut, those of its beginning, and its last one, which may end it."""
    if isinstance(text, tuple):
        return text
    if not truncate:
        try:
            return await encode([text], lending.share, lambda: engine.prompt_ids(text, as_said=True, continued=False))
        except PromptTooLongError as error:
            raise too_long_field(error, "input") from error
    return await encode([text], lending.share, lambda: engine.requests.cut_ids(text))


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of little-endian float32."""
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
