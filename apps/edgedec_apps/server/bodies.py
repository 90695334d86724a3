"""A request's body: JSON of bounded size that comes within bounded time."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.fields import Fields
from edgedec_apps.server.settings import Settings

_DISCARD_TIMES = 8  # that many times the limit is read and dropped, so that the refusal arrives


async def read_fields(request: Request, settings: Settings) -> Fields:
    """Return the fields of a request's JSON object.

    Raises:
        ApiError: It is too large (413), too slow (408), or no JSON object in UTF-8 (400).
    """
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            data = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            f"the request's body did not come within {settings.body_timeout_s:g} s", status=408, code="timeout"
        ) from None
    return Fields(parse_object(data))


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    n_bytes = 0
    async for chunk in request.stream():
        n_bytes += len(chunk)
        if n_bytes > _DISCARD_TIMES * limit:
            break
        if n_bytes <= limit:
            chunks.append(chunk)
    if n_bytes > limit:
        raise ApiError(f"the request's body has more than the {limit} bytes allowed", status=413, code="too_large")
    return b"".join(chunks)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the object that some JSON holds.

    >>> parse_object(b'{"n": 1}')
    {'n': 1}

    Raises:
        ApiError: It is none, or holds what is no JSON (NaN) or no text (half a surrogate pair).
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request's body is no valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the request's body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
