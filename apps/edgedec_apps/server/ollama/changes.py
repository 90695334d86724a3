"""ollama's requests that change which models there are: pull, create, copy and delete.

They take names, never paths or addresses. A model is deleted after its requests have ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgedec.errors import EdgedecError
from edgedec.head_kinds import OFF, require_fit
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.progress import CancelToken, Progress
from edgedec_apps.new_preset import new_preset
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import run_in_thread
from edgedec_apps.server.core.sender import STREAM_HEADERS, json_line
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import read_options
from edgedec_apps.server.registry.names import Named, installed_file
from edgedec_apps.server.registry.registry import ModelEntry
from edgedec_models.cache import remove
from edgedec_models.folders import is_plain
from edgedec_models.presets import has_preset, save_preset
from edgedec_models.resolve import pull

_EVERY_BYTES = 1 << 20
_REPEAT_S = 1.0  # without news, after which the last line is sent again: a client that is gone is noticed by a send
_OF_FILES = ("files", "adapters", "quantize", "quantization", "modelfile", "path", "messages")


async def create(request: Request, service: Service) -> Response:
    """Make a preset of a model: a name with its own system message, template, options or draft head."""
    fields = await read_fields(request, service.settings)
    name, base = _name(fields, "model", "name"), _name(fields, "from")
    texts = {key: fields.text(key) for key in ("system", "template", "draft_head")}
    options, n_ctx = read_options(fields.object("parameters"))
    options.pop("draft", None)  # a preset doesn't hold whether its requests draft
    stream = fields.optional_flag("stream")
    for field in _OF_FILES:
        fields.unsupported(field, "a preset has a model, a system message, a template, options and a draft head")
    fields.skip("license")
    fields.end()

    def write() -> None:
        named = service.names.find(base)
        _require_free(service, name)
        if texts["draft_head"]:
            require_head(texts["draft_head"], named)
        save_preset(new_preset(name, base, texts, options | ({} if n_ctx is None else {"n_ctx": n_ctx})))

    await asyncio.to_thread(write)
    done = {"status": "success"}
    if stream is False:
        return JSONResponse(done, headers=fields.headers)
    lines = json_line({"status": "writing the preset"}) + json_line(done)
    return Response(lines, media_type="application/x-ndjson", headers=fields.headers)


async def copy(request: Request, service: Service) -> Response:
    """Give a model, or a preset, another name."""
    fields = await read_fields(request, service.settings)
    source, name = _name(fields, "source"), _name(fields, "destination")
    fields.end()

    def write() -> None:
        service.names.find(source)
        _require_free(service, name)
        save_preset(new_preset(name, source, {}, {}))

    await asyncio.to_thread(write)
    return Response(status_code=200)


async def delete(request: Request, service: Service) -> Response:
    """Delete a preset, or a model of the cache after its requests have ended."""
    fields = await read_fields(request, service.settings)
    name = _name(fields, "model", "name")
    fields.end()
    if any(name == named.name for named in service.names.served):
        raise ApiError(f"{name!r:.200} is served by this server's command line; end the server first", param="model")
    path = None if has_preset(name) else (await asyncio.to_thread(service.names.find, name)).recipe.model

    def is_of_it(entry: ModelEntry) -> bool:
        return entry.loaded is not None and str(entry.loaded.file.path) == path

    await service.registry.unload(is_of_it, lambda: remove(name))
    return Response(status_code=200)


def _name(fields: Fields, *names: str) -> str:
    """Return the name in one of these fields, without ":latest" (ApiError where there is none, or no text)."""
    given = [value for name in names if (value := fields.text(name)) is not None]
    if not given or not given[0]:
        raise fields.refusal(names[0], "is missing; give it")
    return given[0].removesuffix(":latest")


def _require_free(service: Service, name: str) -> None:
    if service.names.is_taken(name):
        raise ApiError(f"{name!r:.200} is the name of a model here; give the preset another name", param="model")


async def pull_model(request: Request, service: Service) -> Response:
    """Download a model into the cache, with the progress as lines of JSON; requests can name it from then on."""
    fields = await read_fields(request, service.settings)
    name = _name(fields, "model", "name")
    stream = fields.optional_flag("stream")
    fields.unsupported("insecure", "models are downloaded over TLS and checked; leave it out")
    fields.end()
    is_short = is_plain(name) and not name.lower().endswith(".gguf")
    if not (is_short or name.startswith(("hf:", "ollama:"))):
        raise ApiError(f"{name!r:.200} can't be pulled: give a name of the catalogue, or hf:OWNER/REPO", param="model")
    pulling = _Pulling(name, service)
    if stream is not False:
        return StreamingResponse(pulling.lines(), media_type="application/x-ndjson", headers=STREAM_HEADERS)
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
        news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        cancel = CancelToken()
        reported = {"": -_EVERY_BYTES}

        def work(tell: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
            def report(progress: Progress) -> None:
                key = f"{progress.phase} {progress.detail}".strip()
                ended = progress.done == progress.total
                if ended or progress.done - reported.get(key, -_EVERY_BYTES) >= _EVERY_BYTES:
                    reported[key] = progress.done
                    tell({"status": key, "digest": "", "total": progress.total, "completed": progress.done})

            offline = self.service.settings.offline
            pull(self.name, ResolveOptions(offline=offline, on_progress=report, cancel=cancel), takes_paths=False)
            yield {"status": "success"}

        with self.service.running(cancel):
            pulling = asyncio.create_task(run_in_thread(work, news.put_nowait, cancel))
            pulling.add_done_callback(lambda _: news.put_nowait(None))
            document: dict[str, Any] | None = {"status": "pulling manifest"}
            try:
                while document is not None:
                    yield document
                    with suppress(TimeoutError):
                        document = await asyncio.wait_for(news.get(), _REPEAT_S)
                await pulling
            except Exception as error:  # sent to the client
                self.error = error
                yield {"error": str(error) if isinstance(error, EdgedecError) else str(problem_of(error))}
            finally:
                cancel.cancel()


def require_head(name: str, named: Named) -> None:
    """Check that a name is "off", or that of a draft head on this machine which fits a model.

    Raises:
        ApiError: It is not (400). The answer to a path is the same whether the path exists or not.
    """
    if name == OFF:
        return
    head = installed_file(name, draft_head=True)
    if head is None:
        raise ApiError(
            f'there is no draft head {name!r:.200} here; draft_head is "off", or the name of a head that edgedec pull '
            "or POST /api/pull has fetched",
            param="draft_head",
        )
    try:
        require_fit(head, resolve(named.recipe.model, ResolveOptions(offline=True)))
    except EdgedecError as error:
        raise ApiError(
            f"draft_head is {name!r:.200}, which {named.name} can't use: {error}", param="draft_head"
        ) from error
