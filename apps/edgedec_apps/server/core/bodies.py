"""Reads the body of a request: JSON or other bytes, within limits of size, time and memory."""

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from edgedec.exact_json import exact_float
from edgedec_apps.server.core.budget import MEMORY, RequestMemory
from edgedec_apps.server.core.errors import ApiError, closing_error
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.known_fields import interface_of
from edgedec_apps.server.core.settings import Settings

_DISCARD_TIMES = 8  # times the limit: so much is read and dropped, so that the client gets the refusal
_COPIES = 3  # of the texts in a body: decoded, parsed, and rendered by a chat template
# Bytes of memory of a JSON value besides its text, by the mark that begins or separates it: as measured, with a margin.
_VALUE_BYTES = {b",": 64, b":": 200, b"{": 300, b"[": 300}
_STRING = re.compile(rb'"[^"]*(?:"|\Z)')  # where no quote is escaped
_UP_TO_FOUR_BYTES = re.compile(rb"[\xf0-\xf7]|\\u[dD]")  # bytes of a character in a Python string
_UP_TO_TWO_BYTES = re.compile(rb"[\xc4-\xef]|\\u")


async def read_fields(request: Request, settings: Settings) -> Fields:
    """Return the fields of the JSON object in a request's body; the request's memory grows by that for it.

    Raises:
        ApiError: The body is not a JSON object in UTF-8 (400); or as read_body.
    """
    data = await read_body(request, settings)
    memory: RequestMemory = request.scope[MEMORY]
    await memory.grow(_more_bytes(data))
    return Fields(parse_object(data), interface=interface_of(request.url.path))


async def read_body(request: Request, settings: Settings) -> bytearray:
    """Return the bytes of a request's body; the request's memory grows by that for them and three copies.

    Raises:
        ApiError: The body is too large (413) or too slow (408), or there is no memory for it, or no server (503).
    """
    memory: RequestMemory = request.scope[MEMORY]
    header = request.headers.get("content-length", "")
    length = int(header) if header.isdecimal() else None
    if length is not None and length <= settings.max_body_bytes:
        await memory.grow((1 + _COPIES) * length)
    try:
        async with asyncio.timeout(settings.body_timeout_s) as clock:
            with memory.budget.reading(clock):
                return await _read(request, settings.max_body_bytes, memory if length is None else None)
    except TimeoutError:
        if memory.budget.is_closing:
            raise closing_error() from None
        raise ApiError(
            f"the request's body was not complete within {settings.body_timeout_s:g} s, or within 2 s while other "
            "requests waited for its memory",
            status=408,
            code="timeout",
        ) from None


async def _read(request: Request, limit: int, memory: RequestMemory | None) -> bytearray:
    data = bytearray()
    n_bytes = 0
    async for chunk in request.stream():
        n_bytes += len(chunk)
        if n_bytes > _DISCARD_TIMES * limit:
            break
        if n_bytes <= limit:
            if memory is not None:
                await memory.grow((1 + _COPIES) * len(chunk))
            data += chunk
    if n_bytes > limit:
        raise ApiError(f"the request's body has more than the {limit} bytes allowed", status=413, code="too_large")
    return data


def _more_bytes(data: bytes | bytearray) -> int:
    """Return the bytes of memory that parsing a body takes, beyond copies of the body at one byte a character."""
    width = 4 if _UP_TO_FOUR_BYTES.search(data) else 2 if _UP_TO_TWO_BYTES.search(data) else 1
    without_strings = _STRING.sub(b"", data.replace(rb"\\", b"").replace(rb"\"", b""))
    n_values = sum(without_strings.count(mark) * n_bytes for mark, n_bytes in _VALUE_BYTES.items())
    return _COPIES * (width - 1) * len(data) + n_values


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    >>> parse_object(b'{"n": 1}')
    {'n': 1}

    Raises:
        ApiError: The text is not a JSON object, or holds NaN, an infinity or half a surrogate pair.
    """
    try:
        value = json.loads(data, parse_constant=_refuse, parse_float=exact_float)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request's body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the request's body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
