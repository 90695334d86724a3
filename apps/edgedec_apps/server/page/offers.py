"""The models that the web chat offers to fetch: `GET /page/models` lists them, `POST /api/pull` fetches one."""

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.load_options import ResolveOptions
from edgedec_apps.server.core.service import Service
from edgedec_models.cache import list_models
from edgedec_models.catalogue import load_catalogue
from edgedec_models.fetching.offline import offline_reason


async def offered(request: Request, service: Service) -> Response:
    """List the models of the catalogue that were tried with edgedec: "name", "note", "n_bytes" and "n_there".

    "n_there" counts the bytes on this machine, of a download that was cut off, too. Where nothing may be fetched, as
    with --offline, the list has only models that are here.
    """
    is_offline = offline_reason(ResolveOptions(offline=service.settings.offline)) is not None
    return JSONResponse({"models": await asyncio.to_thread(lambda: list(_offers(is_offline)))})


def _offers(is_offline: bool) -> Iterator[dict[str, Any]]:
    stored = {model.name: model for model in list_models()}
    for entry in load_catalogue().values():
        model = stored.get(entry.name)
        if entry.tried and (not is_offline or (model is not None and model.complete)):
            facts = {"name": entry.name, "note": entry.note, "n_bytes": entry.size_bytes}
            yield facts | {"n_there": 0 if model is None else model.size_bytes}
