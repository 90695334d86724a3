"""The beginning of a request for a model: its fields, and the model that they name."""

from starlette.requests import Request

from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.lent import Wanted
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.shelf.keep_alive import keep_seconds


async def read_wanted(request: Request, service: Service) -> tuple[Fields, Wanted]:
    """Return a request's fields, and the model that its fields `model` and `keep_alive` ask for.

    Without `model` it is the server's first one. ollama's `keep_alive` says how long it stays.

    Raises:
        ApiError: The body is not one that read_fields takes, or the server ends or has no model of that name.
        RequestError: keep_alive is no duration.
        EdgedecError: A preset's file is damaged, or a folder can't be read.
    """
    fields = await read_fields(request, service.settings)
    named = await service.find(fields.text("model") or None)
    keep = fields.take("keep_alive")
    return fields, Wanted(named, keep_s=None if keep is None else keep_seconds(keep))
