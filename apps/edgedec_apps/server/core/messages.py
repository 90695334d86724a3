"""The messages of a chat: from the form of requests to that of chat templates."""

import json
from typing import Any

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields

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
    result["content"] = _content(fields, may_be_empty=role == "assistant")
    for name in ("name", "tool_call_id", "tool_name"):
        value = fields.text(name)
        if value is not None:
            result[name] = value
    for name in ("audio", "function_call", "images"):
        fields.unsupported(name, "the model reads text only")
    fields.skip("refusal", "annotations", "reasoning_details", "cache_control", "prefix")
    fields.end()
    return result


def _content(fields: Fields, *, may_be_empty: bool) -> Any:
    content = fields.take("content")
    if content is None and may_be_empty:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise fields.refusal("content", f"must be a string or a list of text parts, not {content!r:.100}")
    return [{"type": "text", "text": part["text"]} for part in parts]


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
