"""The beginning of a request for a model: its fields, and the model that they name."""

import asyncio

from starlette.requests import Request

from edgedec_apps.server.bodies import read_fields
from edgedec_apps.server.fields import Fields
from edgedec_apps.server.names import Named
from edgedec_apps.server.service import Service


async def read_named(request: Request, service: Service) -> tuple[Fields, Named]:
    """Return a request's fields, and the model of its field `model`; without that field the server's first one.

    Raises:
        ApiError: The body is not one that read_fields takes, the server is not ready, or it has no model of that name.
        EdgedecError: A preset's file is damaged, or a folder can't be read.
    """
    fields = await read_fields(request, service.settings)
    service.require_ready()
    return fields, await asyncio.to_thread(service.names.find, fields.text("model") or None)
