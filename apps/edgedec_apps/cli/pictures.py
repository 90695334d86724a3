"""Pictures at the command line: files as parts of messages, and what is told of them."""

import os
import shlex
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from edgedec.chat import Message
from edgedec.errors import RequestError, StorageError, counted
from edgedec_apps.cli.shown.terminal import one_line

Part = dict[str, Any]
Reader = Callable[[Sequence[Message]], tuple[Sequence[Message], tuple[Any, ...]]]
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_BEGINNINGS = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
_MOST_BYTES = 64_000_000  # of a file; what a model takes may be less


def split_pictures(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the paths that are no pictures, and those that are, by their ending or their first bytes."""
    pictures = [path for path in paths if _is_picture(path)]
    return [path for path in paths if path not in pictures], pictures


def _is_picture(path: Path) -> bool:
    if path.suffix.lower() in _ENDINGS or not path.is_file():
        return path.suffix.lower() in _ENDINGS
    with path.open("rb") as file:
        return file.read(8).startswith(_BEGINNINGS)


def picture_part(path: Path) -> Part:
    """Return a file as a part of a message: its bytes, and its whole path as the name.

    Raises:
        RequestError: It is no file, or too large.
        StorageError: It can't be read.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > _MOST_BYTES:
        raise RequestError(f"{path} has more than {_MOST_BYTES} bytes, too many for a picture")
    return {"type": "image", "image": data, "name": os.path.abspath(path)}


def picture_parts(paths: Sequence[Path]) -> list[Part]:
    """Return files as parts of a message (raises what picture_part raises)."""
    return [picture_part(path) for path in paths]


def with_pictures(pictures: Sequence[Part], text: str) -> str | list[Part]:
    """Return the content of a message: its text, behind the pictures where there are any."""
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def pictures_document(reader: Reader, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return name, size and tokens of each picture of a chat (RequestError where one can't be taken).

    `reader` is Requests.mark_pictures, or a PictureReader's mark().
    """
    _, pictures = reader(messages)
    return [
        {"name": each.name, "width": each.width, "height": each.height, "n_tokens": each.n_rows} for each in pictures
    ]


def pictures_lines(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on each picture that pictures_document describes."""
    return [
        f"picture {one_line(each['name'])}: {each['width']} x {each['height']}, {counted(each['n_tokens'], 'token')}"
        for each in documents
    ]


def dropped(text: str) -> tuple[list[Path], str]:
    """Return the pictures that a typed line begins with, and the rest of the line.

    A terminal types the path of a file that is dropped onto it, in quotes or with backslashes where it has spaces.

    >>> dropped("What is /home?")
    ([], 'What is /home?')
    """
    paths, rest = list[Path](), text.strip()
    while rest:
        stream = StringIO(rest)
        lexer = shlex.shlex(stream, posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            word = (lexer.get_token() or "").removeprefix("file://")
        except ValueError:  # a quotation mark without its other one
            break
        path = Path(word).expanduser() if word.lower().endswith(_ENDINGS) else None
        if path is None or not path.is_absolute() or not path.is_file():
            break
        paths.append(path)
        rest = rest[stream.tell() :].strip()
    return paths, rest
