"""The messages of Anthropic's interface, with their blocks, as messages for the chat template."""

from typing import Any

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import Part, call_of, content_of, picture_of_base64, picture_of_url

_ROLES = ("user", "assistant", "system")

Message = dict[str, Any]


def read_system(fields: Fields) -> list[Message]:
    """Return the message of the field `system`: a text or a list of text blocks; an empty list where it is absent."""
    content = fields.take("system")
    blocks = [] if isinstance(content, str | None) else fields.parts("system", content)
    texts = [block.text_of_kind(block.take("type"), "text") for block in blocks]
    text = content if isinstance(content, str) else "\n".join(each for each in texts if each is not None)
    return [{"role": "system", "content": text}] if text else []


def read_messages(fields: Fields) -> list[Message]:
    """Return the messages of the field `messages`. Results of tools become messages of their own.

    Raises:
        ApiError: A message or a block is malformed, or of a type that is known and can't be read.
    """
    given = fields.each("messages")
    if not given:
        raise ApiError("messages must hold at least one message", param="messages")
    messages: list[Message] = []
    for message in given:
        role, content = message.required("role"), message.take("content")
        message.end()
        if role not in _ROLES:
            raise message.refusal("role", f"is {role!r:.40}; it must be user or assistant")
        if content is None or isinstance(content, str):
            messages.append({"role": role, "content": content or ""})
        else:
            blocks = message.parts("content", content)
            messages += _of_assistant(blocks) if role == "assistant" else _of_user(role, blocks)
    return messages


def _of_assistant(blocks: list[Fields]) -> list[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.take("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            calls.append(call_of(block.required_text("name"), block.take("input"), block.string("id")))
        elif (text := block.text_of_kind(kind, "text")) is not None:
            texts.append(text)
        block.end()
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [message | ({"tool_calls": calls} if calls else {})]


def _of_user(role: str, blocks: list[Fields]) -> list[Message]:
    results: list[Message] = []
    parts: list[Part] = []
    for block in blocks:
        kind = block.take("type")
        if kind == "tool_result":
            content = block.take("content")
            found = content or "" if isinstance(content, str | None) else _of_result(block.parts("content", content))
            results.append({"role": "tool", "content": found, "tool_call_id": block.string("tool_use_id") or ""})
        elif (part := _part(block, kind)) is not None:
            parts.append(part)
        block.end()
    return [*results, *([{"role": role, "content": content_of(parts, "\n")}] if parts or not results else [])]


def _part(block: Fields, kind: Any) -> Part | None:
    """Return the text or the picture of a block of the user or of a tool; None for one that is skipped by name."""
    if kind == "image":
        return _picture(block)
    source = block.peek("source").get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        block.skip("source")
        return {"type": "text", "text": source["data"]}
    text = block.text_of_kind(kind, "text")
    return None if text is None else {"type": "text", "text": text}


def _picture(block: Fields) -> Part:
    """Return the picture of a block, from its `source`: base64, or an address."""
    source = block.object("source")
    kind = source.take("type")
    if kind == "base64":
        return picture_of_base64(source, "data", source.take("data"))
    if kind == "url":
        return picture_of_url(source, "url", source.take("url"))
    raise source.refusal("type", f"is {kind!r:.40}; it must be base64 or url, as no files are kept here")


def _of_result(blocks: list[Fields]) -> str | list[Part]:
    """Return the content of a tool's result, which may have pictures."""
    parts: list[Part] = []
    for block in blocks:
        part = _part(block, block.take("type"))
        block.end()
        if part is not None:
            parts.append(part)
    return content_of(parts, "\n")
