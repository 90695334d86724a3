"""The messages of a chat: from the form of requests to that of chat templates."""

import json
from typing import Any

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.pictures import Part, picture_of_base64, picture_of_url

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages for the template: with its names of roles, and the arguments of calls as objects.

    >>> read_messages([{"role": "developer", "content": "Be brief."}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    if not messages:
        raise ApiError("messages must hold at least one message", param="messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(message, f"messages[{i}].")
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.refusal("role", f"is {role!r:.40}; it must be one of {', '.join(_ROLES)}")
    calls = [read_call(call, f"messages[{i}].tool_calls.") for call in fields.objects("tool_calls")]
    result: dict[str, Any] = {"role": _ROLES[role]} | ({"tool_calls": calls} if calls else {})
    thoughts = [text for name in ("reasoning_content", "reasoning", "thinking") if (text := fields.text(name))]
    if thoughts:
        result["reasoning_content"] = thoughts[0]
    result["content"] = _with_images(fields, role, _content(fields, role))
    for name in ("name", "tool_call_id", "tool_name"):
        value = fields.text(name)
        if value is not None:
            result[name] = value
    for name in ("audio", "function_call"):
        fields.unsupported(name, "texts and pictures are taken")
    fields.skip("refusal", "annotations", "reasoning_details", "cache_control", "prefix")
    fields.end()
    return result


def _content(fields: Fields, role: str) -> str | list[Part]:
    content = fields.take("content")
    if content is None and (role == "assistant" or fields.has("images")):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise fields.refusal("content", f"must be a string or a list of parts, not {content!r:.100}")
    return [_part(Fields(part, f"{fields.path('content')}[{i}]."), role) for i, part in enumerate(content)]


def _part(part: Fields, role: str) -> Part:
    """Return a part of a content: a text, or a picture where it is not the assistant's."""
    kind = part.take("type")
    if kind == "text":
        return {"type": "text", "text": part.required_text("text")}
    if kind != "image_url" or role == "assistant":
        known = "text" if role == "assistant" else "text or image_url"
        raise part.refusal("type", f"is {kind!r:.40}; it must be {known}")
    url = part.required("image_url")
    if not isinstance(url, dict):
        return picture_of_url(part, "image_url", url)
    inner = Fields(url, part.path("image_url."))
    return picture_of_url(inner, "url", inner.take("url"))


def _with_images(fields: Fields, role: str, content: str | list[Part]) -> str | list[Part]:
    """Return a content behind the pictures of the field `images` (ollama's): texts of base64."""
    images = fields.texts("images") or ()
    if not images:
        return content
    if role == "assistant":
        raise fields.refusal("images", "are pictures in an answer; give them in a message of the user or a tool")
    found = [picture_of_base64(fields, f"images[{i}]", image) for i, image in enumerate(images)]
    return [*found, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]


def read_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an earlier call of a function, with its arguments as an object, as templates need them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}function must be an object with a name", param=f"{where}function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"{where}function.arguments is not valid JSON: {error}", param=f"{where}function") from error
    kept = {name: call[name] for name in ("id", "type") if isinstance(call.get(name), str)}
    return {"type": "function"} | kept | {"function": {"name": function["name"], "arguments": arguments}}
