"""Files of a chat: what /save writes and /load reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgedec.chat import Message
from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec.storage.whole_file import write_atomically
from edgedec_apps.cli.pictures import picture_part
from edgedec_apps.texts import read_text

_FORMAT = "edgedec chat 1"
_ROLES = ("system", "user", "assistant", "tool")
_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")


def save_messages(path: Path, model: str, messages: Sequence[Message]) -> None:
    """Write a chat as JSON, whole or not at all, to a file that only its owner can read.

    Of a picture, the name of its file is kept. A file that is no chat is never replaced.

    Raises:
        RequestError: The file exists, and is no chat.
        StorageError: The file can't be written.
    """
    if path.exists() or path.is_symlink():
        try:
            load_messages(path)
        except (ModelFormatError, RequestError) as error:
            raise RequestError(f"{path} exists and is no saved chat; give another name") from error
    document = {"format": _FORMAT, "model": model, "messages": [_named(message) for message in messages]}
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    try:
        write_atomically(path, text.encode("utf-8", "replace"), private=True)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


def load_messages(path: Path) -> list[Message]:
    """Return the messages of a saved chat, with its pictures, which are read again from their files.

    Raises:
        ModelFormatError: The file is no saved chat.
        RequestError: The file is not UTF-8, or too long.
        StorageError: The file, or that of a picture, can't be read.
    """
    text = read_text(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is no chat that /save wrote: it is not JSON") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ModelFormatError(f"{path} is no chat that /save wrote: its format is not {_FORMAT!r}")
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ModelFormatError(f"{path} is damaged: its messages must have a role, {', '.join(_ROLES)}, and a content")
    return [
        {key: each[key] for key in (*_TEXTS, "tool_calls") if key in each} | {"content": _read(each["content"])}
        for each in messages
    ]


def _named(message: Message) -> Message:
    """Return a message with the names of the files of its pictures in place of their bytes."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [{"type": "image", "image": part["name"]} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}


def _read(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [picture_part(Path(part["image"])) if part["type"] == "image" else part for part in content]


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES or "content" not in value:
        return False
    content, calls = value["content"], value.get("tool_calls", [])
    has_parts = isinstance(content, list) and bool(content) and all(map(_is_part, content))
    return (
        (has_parts or isinstance(content, str))
        and all(isinstance(value.get(key, ""), str) for key in _TEXTS if key != "content")
        and isinstance(calls, list)
        and all(map(_is_call, calls))
    )


def _is_part(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind in ("text", "image") and set(value) == {"type", kind} and isinstance(value[kind], str)


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )
