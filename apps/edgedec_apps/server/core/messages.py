"""The messages of a chat: from the form of requests to that of chat templates."""

import json
from typing import Any

from edgedec_apps.server.core.bodies import parse_object
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.pictures import Part, picture_of_base64, picture_of_url

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
    return [part for each in fields.parts("content", content) if (part := _part(each, role)) is not None]


def _part(part: Fields, role: str) -> Part | None:
    """Return a part of a content: a text, or a picture where it is not the assistant's; None for one to skip."""
    kind = part.take("type")
    if kind == "image_url" and role != "assistant":
        picture = _picture(part)
        part.end()
        return picture
    text = part.text_of_kind(kind, "text")
    return None if text is None else {"type": "text", "text": text}


def _picture(part: Fields) -> Part:
    url = part.required("image_url")
    if not isinstance(url, dict):
        return picture_of_url(part, "image_url", url)
    inner = part.inner(url, "image_url")
    found = picture_of_url(inner, "url", inner.take("url"))
    inner.end()
    return found


def _with_images(fields: Fields, role: str, content: str | list[Part]) -> str | list[Part]:
    """Return a content behind the pictures of the field `images` (ollama's): texts of base64."""
    if role == "assistant":  # a picture in an answer is skipped by name
        return content
    images = fields.texts("images") or ()
    if not images:
        return content
    found = [picture_of_base64(fields, f"images[{i}]", image) for i, image in enumerate(images)]
    return [*found, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]


def _read_call(call: Fields) -> dict[str, Any]:
    """Return an earlier call of a function, or of a tool whose input is a text."""
    kind = call.string("type")
    found = _called(call.object("custom" if kind == "custom" else "function"))
    call_id = call.string("id")
    call.end()
    kept = {name: value for name, value in (("id", call_id), ("type", kind)) if value is not None}
    return {"type": "function"} | kept | found


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
    kept = {} if call_id is None else {"id": call_id}
    return {"type": "function"} | kept | {"function": {"name": name, "arguments": arguments}}
