"""ollama's interface to models: which there are, which are loaded, and what they are."""

import asyncio
from dataclasses import replace
from hashlib import sha256
from math import isinf
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgedec
from edgedec.chat import may_think
from edgedec.errors import ModelNotFoundError
from edgedec.gguf.model_info import ModelInfo
from edgedec.gguf.places import standing
from edgedec.sampling import SamplingParams
from edgedec_apps.infill import can_infill
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import timestamp
from edgedec_apps.server.registry.models import Loaded, ModelFile
from edgedec_apps.server.registry.names import Named, with_files
from edgedec_apps.server.registry.registry import ModelEntry
from edgedec_models.cache import entry_of
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
    found = await asyncio.to_thread(lambda: with_files(service.names.all()))
    return JSONResponse({"models": [_listed(named, file) for named, file in found if file is not None]})


async def ps(request: Request, service: Service) -> Response:
    """List the models that are loaded, the most recently used first, with the most memory that each may hold."""
    entries = {entry.recipe: entry for entry in reversed(service.registry.loaded)}
    found = await asyncio.to_thread(lambda: with_files(service.names.all()))
    names = {named.recipe: named for named, _ in found if named.base}
    names |= {named.recipe: named for named, _ in found if not named.base}  # a model's own name counts more
    rows = []
    for recipe, entry in entries.items():
        if entry.loaded is not None:
            named = names.get(recipe) or Named(entry.loaded.file.path.stem, recipe, 0.0)
            rows.append(_listed(named, entry.loaded.file) | _running(entry, entry.loaded))
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
    ((named, file),) = await asyncio.to_thread(lambda: with_files([service.names.find(name)]))
    loaded = service.registry.entry(named.recipe).loaded
    file = file if loaded is None else loaded.file
    if file is None:
        raise ModelNotFoundError(f"the file of the model {name!r:.200} is not on this machine")
    template = file.template or ""
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": _parameters(named, file, loaded),
            "template": template,
            "system": named.system,
            "license": _licence(file),
            "details": _details(named, file),
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
    found = {"completion": True, "tools": "tools" in template, "thinking": may_think(template)}
    found["insert"] = loaded is not None and can_infill(loaded.engine.tokenizer)
    found["vision"] = find_projector(file.path) is not None if loaded is None else loaded.engine.reads_pictures
    return [name for name, is_there in found.items() if is_there]


def _listed(named: Named, file: ModelFile) -> dict[str, Any]:
    record = read_record(file.path)
    return {
        "name": named.name,
        "model": named.name,
        "modified_at": timestamp(file.modified_s),
        "size": standing(file.path).stat().st_size if file.info is None else file.info.n_bytes,
        "digest": sha256(str(file.path).encode()).hexdigest() if record is None else record.sha256,
        "details": _details(named, file),
    }


def _licence(file: ModelFile) -> str:
    """Return the licence that the catalogue has for a model, else the one that its file names; "" without any."""
    entry = entry_of(file.path)
    return (file.info and file.info.license) or "" if entry is None else entry.licence


def _details(named: Named, file: ModelFile) -> dict[str, Any]:
    info, entry = file.info, entry_of(file.path)
    details: dict[str, Any] = {"parent_model": named.base, "format": "", "family": "", "families": []}
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


def _parameters(named: Named, file: ModelFile, loaded: Loaded | None) -> str:
    """Return the sampling defaults as in a Modelfile: a name and a value on each line."""
    own = {} if file.info is None else file.info.sampling_defaults
    sampling = replace(SamplingParams(), **own) if loaded is None else loaded.engine.sampling()
    given = {name: getattr(sampling, name) for name in _SHOWN} | dict(named.options)
    if named.n_ctx is not None:
        given["num_ctx"] = named.n_ctx
    return "\n".join(
        f"{_OLLAMAS.get(name, name):30} {each}"
        for name, value in given.items()
        for each in (value if isinstance(value, tuple) else (value,))
    )


def _count(n: int) -> str:
    """Return a number of parameters in a short form.

    >>> _count(134_515_008), _count(1_543_714_304)
    ('134.52M', '1.5B')
    """
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"
