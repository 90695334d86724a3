"""The messages of Anthropic's interface, with their blocks, as messages for the chat template."""

from typing import Any

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import read_call
from edgedec_apps.server.core.pictures import Part, content_of, picture_of_base64, picture_of_url

_ROLES = ("user", "assistant", "system")
_MARKS = ("cache_control", "citations", "caller", "toolset_name")  # of blocks; they change no text

Message = dict[str, Any]


def read_system(fields: Fields) -> list[Message]:
    """Return the message of the field `system`: a text or a list of text blocks; an empty list where it is absent."""
    content = fields.take("system")
    if content is None:
        return []
    text = content if isinstance(content, str) else _joined_text(fields, "system", content)
    return [{"role": "system", "content": text}] if text else []


def read_messages(fields: Fields) -> list[Message]:
    """Return the messages of the field `messages`. Results of tools become messages of their own.

    Raises:
        ApiError: A message or a block is malformed, or of a type that is not supported.
    """
    given = fields.objects("messages")
    if not given:
        raise ApiError("messages must hold at least one message", param="messages")
    messages: list[Message] = []
    for i, message in enumerate(given):
        inner = Fields(message, f"messages[{i}].")
        role, content = inner.required("role"), inner.required("content")
        inner.end()
        if role not in _ROLES:
            raise inner.refusal("role", f"is {role!r:.40}; it must be user or assistant")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise inner.refusal("content", f"is {content!r:.100}; it must be a string or a list of blocks")
        else:
            blocks = [Fields(block, f"messages[{i}].content[{k}].") for k, block in enumerate(content)]
            messages += _of_assistant(blocks) if role == "assistant" else _of_user(role, blocks)
    return messages


def _of_assistant(blocks: list[Fields]) -> list[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.take("type")
        block.skip(*_MARKS)
        if kind == "text":
            texts.append(block.required_text("text"))
        elif kind == "thinking":
            thoughts.append(block.required_text("thinking"))
            block.skip("signature")
        elif kind == "redacted_thinking":
            block.skip("data")
        elif kind == "tool_use":
            arguments = block.object("input").rest()
            call = {"id": block.text("id"), "function": {"name": block.required("name"), "arguments": arguments}}
            calls.append(read_call(call, block.path("")))
        else:
            raise _unsupported(block, kind, "text, thinking or tool_use")
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
        block.skip(*_MARKS)
        if kind == "text":
            parts.append({"type": "text", "text": block.required_text("text")})
        elif kind == "image":
            parts.append(_picture(block))
        elif kind == "tool_result":
            content = block.take("content")
            found = content if isinstance(content, str) else _of_result(block, content or [])
            block.skip("is_error")
            results.append({"role": "tool", "content": found, "tool_call_id": block.text("tool_use_id") or ""})
        else:
            raise _unsupported(block, kind, "text, image or tool_result")
        block.end()
    return [*results, *([{"role": role, "content": content_of(parts, "\n")}] if parts or not results else [])]


def _picture(block: Fields) -> Part:
    """Return the picture of a block, from its `source`: base64, or an address."""
    source = block.object("source")
    kind = source.take("type")
    if kind == "base64":
        source.skip("media_type")  # the bytes say it
        return picture_of_base64(source, "data", source.take("data"))
    if kind == "url":
        return picture_of_url(source, "url", source.take("url"))
    raise source.refusal("type", f"is {kind!r:.40}; it must be base64 or url, as no files are kept here")


def _of_result(block: Fields, content: Any) -> str | list[Part]:
    """Return the content of a tool's result, which may have pictures."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise block.refusal("content", f"is {content!r:.100}; it must be a string or a list of blocks")
    parts: list[Part] = []
    for i, part in enumerate(content):
        inner = Fields(part, block.path(f"content[{i}]."))
        kind = inner.take("type")
        if kind == "image":
            parts.append(_picture(inner))
        elif kind == "text":
            parts.append({"type": "text", "text": inner.required_text("text")})
        else:
            raise _unsupported(inner, kind, "text or image")
    return content_of(parts, "\n")


def _joined_text(fields: Fields, name: str, content: Any) -> str:
    """Return the text of a list of text blocks."""
    if not isinstance(content, list):
        raise fields.refusal(name, f"is {content!r:.100}; it must be a string or a list of text blocks")
    texts = []
    for block in content:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise fields.refusal(name, f"holds {block!r:.100}; a block here must be a text")
        texts.append(text)
    return "\n".join(texts)


def _unsupported(block: Fields, kind: Any, known: str) -> ApiError:
    return block.refusal("type", f"is {kind!r:.40}; it must be {known}")
