"""The `input` of /v1/responses: a text, or items, as messages for the chat template."""

import json
from typing import Any

from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.known_fields import AS_TEXT
from edgedec_apps.server.core.messages import Part, call_of, content_of, picture_of_url, read_parts

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ARGUMENTS = ("arguments", "input", "action", "operation")  # what items of calls call them

Message = dict[str, Any]


def read_input(fields: Fields) -> list[Message]:
    """Return the messages of a request's `input`.

    Items of the assistant that follow each other (what it thought, a text, calls) are one message. Calls of other
    tools than functions, and their outputs, are passed on as those of functions; other items are skipped by name.

    Raises:
        ApiError: An item is malformed.
    """
    value = fields.required("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Message] = []
    for item in fields.parts("input", value):
        _add(messages, item)
    return messages


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item to the messages."""
    kind = item.take("type") or ("message" if item.has("role") else None)
    passes = kind in ("function_call", "function_call_output") or item.outcome_of(kind) == AS_TEXT
    if kind == "message":
        _add_message(messages, item)
    elif kind == "reasoning":
        parts = item.each("content") or item.each("summary")
        thought = "".join(part.text_of_kind(part.take("type"), *_TEXT_PARTS) or "" for part in parts)
        if thought:
            _answer(messages, "reasoning_content", "tool_calls")["reasoning_content"] = thought
    elif passes and str(kind).endswith("_output"):
        content, call_id = item.take("output"), item.string("call_id")
        messages.append({"role": "tool", "content": _content(item, "output", content), "tool_call_id": call_id or ""})
    elif passes:
        name = item.required_text("name") if kind == "function_call" else item.string("name") or str(kind)[:-5]
        arguments = next((value for each in _ARGUMENTS if (value := item.take(each)) is not None), None)
        if kind == "custom_tool_call":
            arguments = {"input": arguments}
        _answer(messages).setdefault("tool_calls", []).append(call_of(name, arguments, item.string("call_id")))
    else:
        item.text_of_kind(kind)
    item.end()


def _add_message(messages: list[Message], item: Fields) -> None:
    role = item.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise item.refusal("role", f"is {role!r:.40}; it must be one of {', '.join(_ROLES)}")
    content = item.take("content")
    if role == "assistant":
        answer = _answer(messages, "tool_calls")
        answer["content"] = f"{answer['content']}{_text(item, content)}"
    else:
        messages.append({"role": _ROLES[role], "content": _content(item, "content", content)})


def _answer(messages: list[Message], *ended_by: str) -> Message:
    """Return the message of the assistant that an item belongs to: the last one, unless it has what ends it."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(name in last for name in ended_by):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(item: Fields, content: Any) -> str:
    """Return the text of a content: a string, or a list of parts, of which those that are no texts are skipped."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in read_parts(item.parts("content", content), _TEXT_PARTS, {}))


def _content(item: Fields, name: str, content: Any) -> str | list[Part]:
    """Return a content of which parts may be pictures: a string, or where there is a picture, its parts."""
    if isinstance(content, dict):  # what a tool of its own kind answered
        return json.dumps(content, ensure_ascii=False)
    if content is None or isinstance(content, str):
        return content or ""
    return content_of(read_parts(item.parts(name, content), _TEXT_PARTS, {"input_image": _picture}), "\n")


def _picture(part: Fields) -> Part:
    part.unsupported("file_id", "no files are kept here; give image_url")
    return picture_of_url(part, "image_url", part.take("image_url"))
