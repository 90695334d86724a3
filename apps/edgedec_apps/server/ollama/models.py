"""ollama's interface to models: which there are, which are loaded, what they are; pull, create, copy and delete.

Requests take names, never paths or addresses. A model is deleted after its requests have ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from math import isinf
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import edgedec
from edgedec.chat import may_think
from edgedec.errors import EdgedecError, ModelNotFoundError
from edgedec.gguf.model_info import ModelInfo
from edgedec.gguf.places import standing
from edgedec.head_kinds import OFF, require_fit
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.progress import CancelToken, Progress
from edgedec.sampling import SamplingParams
from edgedec_apps.infill import can_infill
from edgedec_apps.new_preset import new_preset
from edgedec_apps.server.core.answer import STREAM_HEADERS, json_line
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import run_in_thread
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import read_options, timestamp
from edgedec_apps.server.registry.models import Loaded, ModelFile
from edgedec_apps.server.registry.names import Named, installed_file, with_files
from edgedec_apps.server.registry.registry import ModelEntry
from edgedec_models.cache import entry_of, remove
from edgedec_models.folders import is_plain
from edgedec_models.presets import has_preset, save_preset
from edgedec_models.resolve import pull
from edgedec_runtimes.pictures.finding import find_projector
from edgedec_runtimes.tile_files.record import read_record

_OLLAMAS_VERSION = "0.14.0"  # its first with all interfaces of ours; Codex asks for 0.13.4, Copilot for 0.6.4
_FOREVER = "9999-12-31T23:59:59Z"
_OLLAMAS = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n", "max_tokens": "num_predict"}
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "penalty_last_n")


async def version(request: Request, service: Service) -> Response:
    """Answer with the version of ollama whose interface this is, which its clients compare, and with edgedec's."""
    return JSONResponse({"version": _OLLAMAS_VERSION, "edgedec": edgedec.__version__})


async def tags(request: Request, service: Service) -> Response:
    """List the models on this machine and the presets, loaded or not."""
    listed = await asyncio.to_thread(lambda: with_files(service.names.all()))
    return JSONResponse({"models": [_listed(served, file) for served, file in listed if file is not None]})


async def ps(request: Request, service: Service) -> Response:
    """List the models that are loaded, the most recently used first, with the most memory that each may hold."""
    entries = {entry.recipe: entry for entry in reversed(service.registry.loaded)}
    listed = await asyncio.to_thread(lambda: with_files(service.names.all()))
    names = {served.recipe: served for served, _ in listed if served.base}
    names |= {served.recipe: served for served, _ in listed if not served.base}  # a model's own name counts more
    rows = []
    for recipe, entry in entries.items():
        if entry.loaded is not None:
            name = names.get(recipe) or Named(entry.loaded.file.path.stem, recipe, 0.0)
            rows.append(_listed(name, entry.loaded.file) | _running(entry, entry.loaded))
    return JSONResponse({"models": rows})


def _running(entry: ModelEntry, loaded: Loaded) -> dict[str, Any]:
    engine, expires = loaded.engine, entry.expires_at
    return {
        "size": loaded.n_bytes,
        "size_vram": 0,
        "expires_at": _FOREVER if isinf(expires) else timestamp(expires),
        "context_length": engine.n_ctx,
        "edgedec": {"runtime": engine.card.runtime, "requests": entry.n_references, "leaving": entry.leaving},
    }


async def show(request: Request, service: Service) -> Response:
    """Describe a model."""
    fields = await read_fields(request, service.settings)
    name = str(fields.take("model") or fields.required("name"))
    fields.skip("verbose", "system", "template", "options", "name")
    fields.end()
    ((served, file),) = await asyncio.to_thread(lambda: with_files([service.names.find(name)]))
    loaded = service.registry.entry(served.recipe).loaded
    file = file if loaded is None else loaded.file
    if file is None:
        raise ModelNotFoundError(f"the file of the model {name!r:.200} is not on this machine")
    template = file.template or ""
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": _parameters(served, file, loaded),
            "template": template,
            "system": served.system,
            "license": _licence(file),
            "details": _details(served, file),
            "model_info": _facts(file.info, loaded),
            "capabilities": capabilities(file, loaded),
            "modified_at": timestamp(file.modified_s),
        }
    )


def capabilities(file: ModelFile, loaded: Loaded | None) -> list[str]:
    """Return what a model can do by its chat template, by its projector and, where it is loaded, by its tokens."""
    if file.embeds:
        return ["embedding"]
    template = file.template or ""
    abilities = {"completion": True, "tools": "tools" in template, "thinking": may_think(template)}
    abilities["insert"] = loaded is not None and can_infill(loaded.engine.tokenizer)
    abilities["vision"] = bool(find_projector(file.path) if loaded is None else loaded.engine.requests.pictures)
    return [name for name, is_there in abilities.items() if is_there]


def _listed(served: Named, file: ModelFile) -> dict[str, Any]:
    record = read_record(file.path)
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": timestamp(file.modified_s),
        "size": standing(file.path).stat().st_size if file.info is None else file.info.n_bytes,
        "digest": sha256(str(file.path).encode()).hexdigest() if record is None else record.sha256,
        "details": _details(served, file),
    }


def _licence(file: ModelFile) -> str:
    """Return the licence that the catalogue has for a model, else the one that its file names; "" without any."""
    entry = entry_of(file.path)
    return (file.info and file.info.license) or "" if entry is None else entry.licence


def _details(served: Named, file: ModelFile) -> dict[str, Any]:
    info, entry = file.info, entry_of(file.path)
    details: dict[str, Any] = {"parent_model": served.base, "format": "", "family": "", "families": []}
    if info is None:
        return details | {"parameter_size": "", "quantization_level": ""}
    family = {"format": "gguf", "family": info.architecture, "families": [info.architecture]}
    n_params = (entry and entry.n_params) or info.n_params  # a file may hold a matrix twice
    return details | family | {"parameter_size": _count(n_params), "quantization_level": info.quantization_label}


def _facts(info: ModelInfo | None, loaded: Loaded | None) -> dict[str, Any]:
    """Return facts on the model by the keys of a GGUF, as ollama does, and further ones of edgedec."""
    facts: dict[str, Any] = {}
    if info is not None:
        facts |= {
            "general.architecture": info.architecture,
            "general.name": info.name,
            f"{info.architecture}.context_length": info.n_ctx_train,
            f"{info.architecture}.embedding_length": info.n_embd,
            f"{info.architecture}.block_count": info.n_layer,
            "general.parameter_count": info.n_params,
        }
    if loaded is not None:
        engine = loaded.engine
        facts |= {"edgedec.context_length": engine.n_ctx, "edgedec.runtime": engine.card.runtime}
    return facts


def _parameters(served: Named, file: ModelFile, loaded: Loaded | None) -> str:
    """Return the sampling defaults as in a Modelfile: a name and a value on each line."""
    defaults = {} if file.info is None else file.info.sampling_defaults
    sampling = replace(SamplingParams(), **defaults) if loaded is None else loaded.engine.requests.sampling()
    values = {name: getattr(sampling, name) for name in _SHOWN} | dict(served.options)
    if served.n_ctx is not None:
        values["num_ctx"] = served.n_ctx
    return "\n".join(
        f"{_OLLAMAS.get(name, name):30} {each}"
        for name, value in values.items()
        for each in (value if isinstance(value, tuple) else (value,))
    )


def _count(n: int) -> str:
    """Return a number of parameters in a short form.

    >>> _count(134_515_008), _count(1_543_714_304)
    ('134.52M', '1.5B')
    """
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


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
        served = service.names.find(base)
        _require_free(service, name)
        if texts["draft_head"]:
            require_head(texts["draft_head"], served)
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
    if any(name == served.name for served in service.names.served):
        raise ApiError(f"{name!r:.200} is served by this server's command line; end the server first", param="model")
    path = None if has_preset(name) else (await asyncio.to_thread(service.names.find, name)).recipe.model

    def is_of_it(entry: ModelEntry) -> bool:
        return entry.loaded is not None and str(entry.loaded.file.path) == path

    await service.registry.unload(is_of_it, lambda: remove(name))
    return Response(status_code=200)


def _name(fields: Fields, *names: str) -> str:
    """Return the name in one of these fields, without ":latest" (ApiError where there is none, or no text)."""
    values = [value for name in names if (value := fields.text(name)) is not None]
    if not values or not values[0]:
        raise fields.refusal(names[0], "is missing; give it")
    return values[0].removesuffix(":latest")


def _require_free(service: Service, name: str) -> None:
    if service.names.model(name) is not None:
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
    progress = _pulled(name, service)
    if stream is not False:
        return StreamingResponse(_lines(progress), media_type="application/x-ndjson", headers=STREAM_HEADERS)
    return JSONResponse([document async for document in progress][-1])


async def _lines(documents: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield objects as lines of JSON; an error is the last one."""
    try:
        async for document in documents:
            yield json_line(document)
    except Exception as error:
        yield json_line(problem_of(error).ollama())


async def _pulled(name: str, service: Service) -> AsyncIterator[dict[str, Any]]:
    """Download a model in a thread of its own, and yield the progress as JSON objects; the last one says success.

    It stops when the client disconnects, and can be resumed.

    Raises:
        EdgedecError: As pull().
    """
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

        offline = service.settings.offline
        pull(name, ResolveOptions(offline=offline, on_progress=report, cancel=cancel), takes_paths=False)
        yield {"status": "success"}

    with service.running(cancel):
        # An error is a result, as nobody reads it where the client has disconnected.
        pulling = asyncio.gather(run_in_thread(work, news.put_nowait, cancel), return_exceptions=True)
        pulling.add_done_callback(lambda _: news.put_nowait(None))
        document: dict[str, Any] | None = {"status": "pulling manifest"}
        try:
            while document is not None:
                yield document
                with suppress(TimeoutError):
                    document = await asyncio.wait_for(news.get(), _REPEAT_S)
        finally:
            cancel.cancel()
        (error,) = await pulling
        if isinstance(error, Exception):
            raise error


def require_head(name: str, served: Named) -> None:
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
        require_fit(head, resolve(served.recipe.model, ResolveOptions(offline=True)))
    except EdgedecError as error:
        raise ApiError(
            f"draft_head is {name!r:.200}, which {served.name} can't use: {error}", param="draft_head"
        ) from error
