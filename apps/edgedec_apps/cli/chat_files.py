"""Chats in files: what /save writes, and /load reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgedec.chat import Message
from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec.storage.whole_file import write_atomically
from edgedec_apps.texts import read_text

_FORMAT = "edgedec chat 1"
_ROLES = ("system", "user", "assistant")


def save_messages(path: Path, model: str, messages: Sequence[Message]) -> None:
    """Write a chat as JSON, whole or not at all, to a file that only its owner can read.

    A file that is no chat is never replaced.

    Raises:
        RequestError: The file exists, and is no chat.
        StorageError: The file can't be written.
    """
    if path.exists() or path.is_symlink():
        try:
            load_messages(path)
        except (ModelFormatError, RequestError) as error:
            raise RequestError(f"{path} exists and is no saved chat; give another name") from error
    document = {"format": _FORMAT, "model": model, "messages": list(messages)}
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    try:
        write_atomically(path, text.encode("utf-8", "replace"), private=True)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


def load_messages(path: Path) -> list[Message]:
    """Return the messages of a saved chat.

    Raises:
        ModelFormatError: The file is no saved chat.
        RequestError: The file is not UTF-8, or too long.
        StorageError: The file can't be read.
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
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
