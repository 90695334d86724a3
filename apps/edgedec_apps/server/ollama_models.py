"""ollama's interface to models: the model that is served, and downloads of others into the cache."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

import edgedec
from edgedec.api.engine import Engine
from edgedec.errors import EdgedecError
from edgedec.gguf.model_info import ModelInfo
from edgedec.model import ModelCard
from edgedec.progress import CancelToken, Progress
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec_apps.server.bodies import read_fields
from edgedec_apps.server.errors import ApiError, problem_of
from edgedec_apps.server.ollama_forms import timestamp
from edgedec_apps.server.reply import json_line
from edgedec_apps.server.service import Loaded, Service
from edgedec_apps.server.web import endpoint
from edgedec_models.folders import is_plain
from edgedec_models.record import read_record
from edgedec_models.resolve import pull

_FOREVER = "9999-12-31T23:59:59Z"
_EVERY_BYTES = 1 << 20


def routes() -> list[BaseRoute]:
    """Return the routes that describe models or download one."""
    return [
        Route("/api/version", endpoint(version)),
        Route("/api/tags", endpoint(tags)),
        Route("/api/ps", endpoint(ps)),
        Route("/api/show", endpoint(show), methods=["POST"]),
        Route("/api/pull", endpoint(pull_model), methods=["POST"]),
    ]


async def version(request: Request, service: Service) -> Response:
    """Answer with edgedec's version."""
    return JSONResponse({"version": edgedec.__version__})


async def tags(request: Request, service: Service) -> Response:
    """List the model that is served; no model while it loads."""
    return JSONResponse({"models": [] if service.loaded is None else [_listed(service.name, service.ready())]})


async def ps(request: Request, service: Service) -> Response:
    """List the model that is served, with the most memory that it may hold."""
    if service.loaded is None:
        return JSONResponse({"models": []})
    loaded = service.ready()
    plan = loaded.engine.plan
    size = {"size": plan.total_bytes} if plan.terms else {}
    running = {"size_vram": 0, "expires_at": _FOREVER, "context_length": loaded.engine.n_ctx}
    return JSONResponse({"models": [_listed(service.name, loaded) | size | running]})


async def show(request: Request, service: Service) -> Response:
    """Describe the model that is served."""
    fields = await read_fields(request, service.settings)
    loaded = service.ready()
    service.require_name(str(fields.take("model") or fields.required("name")))
    fields.skip("verbose", "system", "template", "options", "name")
    fields.end()
    file, template = loaded.file, loaded.file.template or ""
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": _parameters(loaded.engine.sampling()),
            "template": template,
            "license": (file.info and file.info.license) or "",
            "details": _details(file.info, loaded.engine.card),
            "model_info": _facts(file.info, loaded.engine),
            "capabilities": ["completion", *(["tools"] if "tools" in template else [])],
            "modified_at": timestamp(file.modified_s),
        }
    )


async def pull_model(request: Request, service: Service) -> Response:
    """Download a model into the cache, with the progress as lines of JSON; it is not served."""
    fields = await read_fields(request, service.settings)
    name = str(fields.take("model") or fields.required("name"))
    stream = fields.take("stream")
    fields.skip("name")
    fields.unsupported("insecure", "models are downloaded over TLS and checked; leave it out")
    fields.end()
    if not (is_plain(name) or name.startswith(("hf:", "ollama:"))):
        raise ApiError(f"{name!r:.200} can't be pulled: give a name of the catalogue, or hf:OWNER/REPO", param="model")
    pulling = _Pulling(name.removesuffix(":latest"), service)
    if stream is not False:
        return StreamingResponse(pulling.lines(), media_type="application/x-ndjson")
    last = [document async for document in pulling.documents()][-1]
    if "error" in last:
        problem = problem_of(pulling.error or RuntimeError())
        return JSONResponse(last, problem.status)
    return JSONResponse(last)


@dataclass(slots=True)
class _Pulling:
    """A download in a thread of its own; it stops when the client disconnects, and can be resumed."""

    name: str
    service: Service
    error: Exception | None = None

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the progress as lines of JSON."""
        async for document in self.documents():
            yield json_line(document)

    async def documents(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the progress as JSON objects; the last one says success, or the error."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        cancel = CancelToken()
        reported = {"": -_EVERY_BYTES}

        def put(document: dict[str, Any] | None) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, document)
            except RuntimeError:  # the loop is closed
                cancel.cancel()

        def report(progress: Progress) -> None:
            key = f"{progress.phase} {progress.detail}".strip()
            ended = progress.done == progress.total
            if ended or progress.done - reported.get(key, -_EVERY_BYTES) >= _EVERY_BYTES:
                reported[key] = progress.done
                put({"status": key, "digest": "", "total": progress.total, "completed": progress.done})

        def work() -> None:
            try:
                options = ResolveOptions(offline=self.service.settings.offline, on_progress=report, cancel=cancel)
                pull(self.name, options)
                put({"status": "success"})
            except Exception as error:  # sent to the client
                self.error = error
                put({"error": str(error) if isinstance(error, EdgedecError) else problem_of(error).message})
            put(None)

        with self.service.running(cancel):
            threading.Thread(target=work, name="edgedec-pull", daemon=True).start()
            try:
                yield {"status": "pulling manifest"}
                while (document := await queue.get()) is not None:
                    yield document
            finally:
                cancel.cancel()


def _listed(name: str, loaded: Loaded) -> dict[str, Any]:
    card, file = loaded.engine.card, loaded.file
    record = read_record(file.path)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(file.modified_s),
        "size": file.path.stat().st_size if file.info is None else file.info.n_bytes,
        "digest": sha256(card.fingerprint.encode()).hexdigest() if record is None else record.sha256,
        "details": _details(file.info, card),
    }


def _details(info: ModelInfo | None, card: ModelCard) -> dict[str, Any]:
    details = {"parent_model": "", "format": "", "family": card.architecture, "families": [card.architecture]}
    if info is None:
        return details | {"parameter_size": "", "quantization_level": ""}
    counts = {"parameter_size": _count(info.n_params), "quantization_level": info.quantization_label}
    return details | {"format": "gguf"} | counts


def _facts(info: ModelInfo | None, engine: Engine) -> dict[str, Any]:
    """Return facts on the model by the keys of a GGUF, as ollama does, and further ones of edgedec."""
    card = engine.card
    facts = {
        "general.architecture": card.architecture,
        "general.name": card.name,
        f"{card.architecture}.context_length": card.n_ctx_train,
        f"{card.architecture}.embedding_length": card.n_embd,
        f"{card.architecture}.block_count": card.n_layer,
        "edgedec.context_length": engine.n_ctx,
        "edgedec.runtime": card.runtime,
    }
    return facts if info is None else facts | {"general.parameter_count": info.n_params}


def _parameters(sampling: SamplingParams) -> str:
    """Return the sampling defaults as in a Modelfile: a name and a value on each line."""
    shown = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "penalty_last_n")
    ollamas = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n"}
    return "\n".join(f"{ollamas.get(name, name):30} {getattr(sampling, name)}" for name in shown)


def _count(n: int) -> str:
    """Return a number of parameters in a short form.

    >>> _count(134_515_008), _count(1_543_714_304)
    ('134.52M', '1.5B')
    """
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"
