"""The `input` of /v1/responses: a text, or items, as messages for the chat template."""

from typing import Any

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import read_call
from edgedec_apps.server.core.pictures import Part, content_of, picture_of_url

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MARKS = ("id", "status", "phase", "caller", "namespace", "async")  # of items that come back as they were sent

Message = dict[str, Any]


def read_input(fields: Fields) -> list[Message]:
    """Return the messages of a request's `input`.

    Items of the assistant that follow each other (what it thought, a text, calls) are one message.

    Raises:
        ApiError: An item is malformed, or of a type that is not supported.
    """
    given = fields.required("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise fields.refusal("input", f"is {given!r:.100}; it must be a string or a list of items")
    messages: list[Message] = []
    for i, item in enumerate(given):
        _add(messages, Fields(item, f"input[{i}]."))
    return messages


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item to the messages."""
    kind = item.take("type") or ("message" if item.has("role") else None)
    item.skip(*_MARKS)
    if kind == "message":
        _add_message(messages, item)
    elif kind == "reasoning":
        parts = [*item.objects("content")] or item.objects("summary")
        item.skip("summary", "encrypted_content")
        thought = "".join(_part_text(item, "content", part) for part in parts)
        if thought:
            _answer(messages, "reasoning_content", "tool_calls")["reasoning_content"] = thought
    elif kind == "function_call":
        name, arguments = item.required("name"), item.text("arguments")
        where = item.path("")
        call = {"id": item.text("call_id"), "function": {"name": name, "arguments": arguments}}
        _answer(messages).setdefault("tool_calls", []).append(read_call(call, where))
    elif kind == "function_call_output":
        call_id = item.text("call_id")
        content = item.required("output")
        messages.append({"role": "tool", "content": _content(item, "output", content), "tool_call_id": call_id or ""})
    else:
        raise item.refusal(
            "type", f"is {kind!r:.40}; it must be message, function_call, function_call_output or reasoning"
        )
    item.end()


def _add_message(messages: list[Message], item: Fields) -> None:
    role = item.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise item.refusal("role", f"is {role!r:.40}; it must be one of {', '.join(_ROLES)}")
    content = item.required("content")
    if role == "assistant":
        answer = _answer(messages, "tool_calls")
        answer["content"] = f"{answer['content']}{_text(item, 'content', content)}"
    else:
        messages.append({"role": _ROLES[role], "content": _content(item, "content", content)})


def _answer(messages: list[Message], *ended_by: str) -> Message:
    """Return the message of the assistant that an item belongs to: the last one, unless it has what ends it."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(name in last for name in ended_by):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(item: Fields, name: str, content: Any) -> str:
    """Return the text of a content: a string, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(item, name, part) for part in _parts(item, name, content))


def _content(item: Fields, name: str, content: Any) -> str | list[Part]:
    """Return a content of which parts may be pictures: a string, or where there is a picture, its parts."""
    if isinstance(content, str):
        return content
    return content_of([_part(item, name, i, part) for i, part in enumerate(_parts(item, name, content))], "\n")


def _parts(item: Fields, name: str, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise item.refusal(name, f"is {content!r:.100}; it must be a string or a list of parts")
    return content


def _part(item: Fields, name: str, i: int, part: dict[str, Any]) -> Part:
    if part.get("type") != "input_image":
        return {"type": "text", "text": _part_text(item, name, part)}
    inner = Fields(part, item.path(f"{name}[{i}]."))
    inner.unsupported("file_id", "no files are kept here; give image_url")
    return picture_of_url(inner, "image_url", inner.take("image_url"))


def _part_text(item: Fields, name: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    text = part.get("text") if kind in _TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
    if not isinstance(text, str):
        raise item.refusal(name, f"holds {part!r:.100}; a part must be input_text, input_image or output_text")
    return text


def require_messages(messages: list[Message]) -> None:
    """Raise ApiError where a chat has no message."""
    if not messages:
        raise ApiError("input holds no message; give at least one", param="input")
