"""The messages of a chat, and their pictures: from the forms of requests to that of chat templates, within limits."""

import asyncio
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.progress import CancelToken
from edgedec_apps.server.core.bodies import parse_object
from edgedec_apps.server.core.budget import RequestMemory
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fetching import MOST_BYTES, fetch, host_of
from edgedec_apps.server.core.fields import Fields

MOST_PICTURES = 8
"""Most pictures of one request, those of its earlier messages included."""
_MOST_BASE64 = 4 * MOST_BYTES // 3
_MOST_SHOWN = f"{MOST_BYTES // 1_000_000} MB of a file"
_DATA = re.compile(r"data:(?P<kind>[^;,]{0,100})(?P<further>(?:;[^;,]{0,100}){0,8}),", re.ASCII)
Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RemotePicture:
    """The address of a picture that was not fetched yet."""

    url: str


def picture_of_url(fields: Fields, name: str, url: Any) -> Part:
    """Return the picture that a field holds, as a part of a message.

    Args:
        fields: The fields of the object that holds it.
        name: The name of the field.
        url: Its value: a data: URL, the base64 alone, or an address of https.

    Raises:
        ApiError: The value is something else, is no base64, or is too long.
    """
    if not isinstance(url, str) or not url:
        raise fields.refusal(name, f"is {url!r:.60}; it must be a data: URL, or the base64, of a picture")
    if url[:8].lower() == "https://":
        return {"type": "image", "image": RemotePicture(url)}
    if (head := _DATA.match(url)) is not None:
        kind, further = head["kind"].strip().lower(), head["further"].strip().lower()
        if (kind and not kind.startswith("image/")) or not further.endswith(";base64"):
            raise fields.refusal(name, f"begins with {head[0]!r:.80}; it must begin with data:image/...;base64,")
        return picture_of_base64(fields, name, url[head.end() :])
    if ":" in url[:64]:
        raise fields.refusal(
            name, f"is {url[:60]!r}; pictures are taken as data: URLs, and by https from hosts that --image-hosts names"
        )
    return picture_of_base64(fields, name, url)


def picture_of_base64(fields: Fields, name: str, text: Any) -> Part:
    """Return the picture that a field holds in base64, as a part of a message (ApiError as picture_of_url)."""
    if not isinstance(text, str) or not text:
        raise fields.refusal(name, f"is {text!r:.60}; it must be the base64 of a picture")
    if len(text) > _MOST_BASE64:
        raise fields.refusal(
            name, f"has {len(text)} characters of base64; a picture may have {_MOST_BASE64} of them ({_MOST_SHOWN})"
        )
    try:
        data = binascii.a2b_base64(text.encode("ascii"), strict_mode=False)
    except (UnicodeEncodeError, ValueError) as error:
        raise fields.refusal(name, f"is no base64: {error}") from None
    if not data:
        raise fields.refusal(name, "holds no bytes; it must be the base64 of a picture")
    return {"type": "image", "image": data}


def pictures_of(messages: Sequence[dict[str, Any]]) -> list[Part]:
    """Return the parts of all messages that are pictures, in their order."""
    contents = [message.get("content") for message in messages]
    return [part for parts in contents if isinstance(parts, list) for part in parts if part["type"] == "image"]


def read_parts(
    parts: Sequence[Fields], texts: Sequence[str], others: Mapping[str, Callable[[Fields], Part | None]]
) -> list[Part]:
    """Return the parts of a content.

    Args:
        parts: The objects of the request.
        texts: The kinds that are texts.
        others: What reads the other kinds, such as pictures. Kinds that are not here are skipped by name, or refused.
    """
    read: list[Part | None] = []
    for part in parts:
        kind = part.take("type")
        if isinstance(kind, str) and kind in others:
            read.append(others[kind](part))
            part.end()
        elif (text := part.text_of_kind(kind, *texts)) is not None:
            read.append({"type": "text", "text": text})
    return [part for part in read if part is not None]


def content_of(parts: Sequence[Part], separator: str) -> str | list[Part]:
    """Return the content of a message: one text where there is no picture; else parts, neighbouring texts joined."""
    joined: list[Part] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}{separator}{part['text']}"}
        else:
            joined.append(part)
    if all(part["type"] == "text" for part in joined):
        return joined[0]["text"] if joined else ""
    return joined


async def with_fetched(
    messages: list[dict[str, Any]], hosts: Sequence[str], memory: RequestMemory, cancel: CancelToken
) -> list[dict[str, Any]]:
    """Return messages whose pictures are all there; those that are addresses are fetched, one after the other.

    Args:
        messages: The messages of a chat.
        hosts: The hosts from which pictures may be fetched.
        memory: The memory of the request, which grows by what is fetched.
        cancel: Ends the fetching.

    Raises:
        ApiError: There are too many pictures, an address is not allowed, a picture can't be fetched, or there is no
            memory for it.
        CancelledError: `cancel` was cancelled.
    """
    pictures = pictures_of(messages)
    if len(pictures) > MOST_PICTURES:
        raise ApiError(
            f"the request has {len(pictures)} pictures; it may have {MOST_PICTURES}, those of earlier messages "
            "included: leave older ones out",
            param="messages",
        )
    remote = [part["image"].url for part in pictures if isinstance(part["image"], RemotePicture)]
    for url in remote:  # before the first of them is fetched
        host_of(url, hosts)
    fetched: dict[str, bytes] = {}
    for url in dict.fromkeys(remote):
        async with memory.more(MOST_BYTES):
            fetched[url] = await asyncio.to_thread(fetch, url, hosts, cancel)
        await memory.grow(len(fetched[url]))
    return [_completed(message, fetched) for message in messages] if fetched else messages


def _completed(message: dict[str, Any], fetched: dict[str, bytes]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {
        "content": [
            part | {"image": fetched[part["image"].url]} if isinstance(part.get("image"), RemotePicture) else part
            for part in content
        ]
    }


_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}


def read_messages(messages: list[Fields]) -> list[dict[str, Any]]:
    """Return a chat's messages for the template: with its names of roles, and the arguments of calls as objects.

    >>> read_messages([Fields({"role": "developer", "content": "Be brief."})])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    if not messages:
        raise ApiError("messages must hold at least one message", param="messages")
    return [_message(message) for message in messages]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.refusal("role", f"is {role!r:.40}; it must be one of {', '.join(_ROLES)}")
    calls = [_read_call(call) for call in fields.each("tool_calls")]
    if fields.has("function_call"):
        calls.append(_called(fields.object("function_call")))
    result: dict[str, Any] = {"role": _ROLES[role]} | ({"tool_calls": calls} if calls else {})
    thoughts = [text for name in ("reasoning_content", "reasoning", "thinking") if (text := fields.string(name))]
    if thoughts:
        result["reasoning_content"] = thoughts[0]
    result["content"] = _with_images(fields, role, _content(fields, role))
    for name in ("name", "tool_call_id", "tool_name"):
        value = fields.string(name)
        if value is not None:
            result[name] = value
    fields.end()
    return result


def _content(fields: Fields, role: str) -> str | list[Part]:
    content = fields.take("content")
    if content is None or isinstance(content, str):
        return content or ""
    others = {} if role == "assistant" else {"image_url": _picture}
    return read_parts(fields.parts("content", content), ("text",), others)


def _picture(part: Fields) -> Part:
    url = part.required("image_url")
    if not isinstance(url, dict):
        return picture_of_url(part, "image_url", url)
    inner = part.inner(url, "image_url")
    picture = picture_of_url(inner, "url", inner.take("url"))
    inner.end()
    return picture


def _with_images(fields: Fields, role: str, content: str | list[Part]) -> str | list[Part]:
    """Return a content behind the pictures of the field `images` (ollama's): texts of base64."""
    if role == "assistant":  # a picture in an answer is skipped by name
        return content
    images = fields.texts("images") or ()
    if not images:
        return content
    pictures = [picture_of_base64(fields, f"images[{i}]", image) for i, image in enumerate(images)]
    return [*pictures, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]


def _read_call(call: Fields) -> dict[str, Any]:
    """Return an earlier call of a function, or of a tool whose input is a text."""
    kind = call.string("type")
    function = _called(call.object("custom" if kind == "custom" else "function"))
    call_id = call.string("id")
    call.end()
    optional = {name: value for name, value in (("id", call_id), ("type", kind)) if value is not None}
    return {"type": "function"} | optional | function


def _called(function: Fields) -> dict[str, Any]:
    name, arguments, text = function.required_text("name"), function.take("arguments"), function.string("input")
    function.end()
    return call_of(name, arguments if text is None else {"input": text})


def call_of(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """Return an earlier call of a function as templates need it.

    Args:
        name: The function's.
        arguments: An object or the JSON of one. Anything else, as a model may write it, is passed on as text.
        call_id: The call's, if any.
    """
    if not isinstance(arguments, dict):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        try:
            arguments = {} if text.strip() in ("", "null") else parse_object(text.encode())
        except ApiError:
            arguments = text
    optional = {} if call_id is None else {"id": call_id}
    return {"type": "function"} | optional | {"function": {"name": name, "arguments": arguments}}
