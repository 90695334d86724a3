"""From messages with pictures to a prompt: marks stand for the pictures while the chat template renders the messages.

A mark is drawn for each request, so no text of a user is taken for one.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.control_tokens import encode_with_controls
from edgedec.decoding.prompt_length import about_tokens, require_may_fit, too_long
from edgedec.errors import RequestError, TemplateError
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.pictures.contract import PictureLayout

MOST_PICTURES = 64
"""Most pictures of a prompt; a server allows fewer."""


@dataclass(frozen=True, slots=True)
class GivenPicture:
    """A picture of a message.

    Attributes:
        marker: The mark that stands for it.
        image: The bytes of a file, a path or a PIL.Image.
        name: What messages call it, or "".
    """

    marker: str
    image: Any
    name: str


def with_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[GivenPicture]]:
    """Return messages whose contents are texts, with a mark in place of each picture, and the pictures in their order.

    Texts beside a picture are joined to its mark as they are; between two texts there is a line break where the chat
    template takes no parts.

    Raises:
        RequestError: A part or a list of pictures is malformed, or there are too many pictures.
    """
    key, pictures, marked = secrets.token_hex(16), list[GivenPicture](), list[Mapping[str, Any]]()

    def mark(image: Any, name: Any) -> str:
        if len(pictures) >= MOST_PICTURES:
            raise RequestError(f"the messages have more than {MOST_PICTURES} pictures; leave the oldest ones out")
        pictures.append(
            GivenPicture(f"picture{key}number{len(pictures)}end", image, name if isinstance(name, str) else "")
        )
        return pictures[-1].marker

    for i, message in enumerate(messages):
        content, images = message.get("content"), message.get("images") or ()
        if isinstance(images, str | bytes) or not isinstance(images, Sequence):
            raise RequestError(f"message {i}: 'images' must be a list of pictures, not {type(images).__name__}")
        parts = [{"type": "image", "image": image} for image in images]
        if isinstance(content, list):
            parts += content
        elif isinstance(content, str) and parts:
            parts.append({"type": "text", "text": content})
        texts = list[str]()
        is_text = True  # whether the latest part was a text, which another text is not joined to
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") != "image":
                text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
                if not isinstance(text, str):
                    raise RequestError(
                        f"message {i}: a part of 'content' must be a text or a picture, not {part!r:.100}"
                    )
                _join(texts, text, apart=is_text)
                is_text = True
                continue
            if "image" not in part:
                raise RequestError(f"message {i}: a picture's part needs 'image', found {', '.join(map(str, part))}")
            _join(texts, mark(part["image"], part.get("name")), apart=False)
            is_text = False
        rest = {key: value for key, value in message.items() if key != "images"}
        marked.append({**rest, "content": _content(texts)} if texts else message)
    return marked, pictures


def _join(texts: list[str], text: str, *, apart: bool) -> None:
    """Add a text to the last one, or behind it as one of its own."""
    if apart or not texts:
        texts.append(text)
    else:
        texts[-1] += text


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


Spelled = tuple[str, PictureLayout, Sequence[Sequence[int]]]
"""A picture's mark, its layout, and for each block the ids of its rows."""


def prompt_ids(tokenizer: Tokenizer, text: str, pictures: Sequence[Spelled], n_most: int) -> list[int]:
    """Return the ids of a prompt in which marks stand for pictures: those of its texts, of marks and of rows.

    Args:
        tokenizer: The text model's.
        text: The rendered prompt.
        pictures: Of each picture its mark, its layout, and the ids of each block's rows.
        n_most: Most ids.

    Raises:
        PromptTooLongError: The prompt has more ids.
        TemplateError: The chat template left a mark out.
    """
    require_may_fit(tokenizer, text, n_most)
    spelled = {marker: (layout, rows) for marker, layout, rows in pictures}
    pieces = re.split(f"({'|'.join(spelled)})", text)
    if missing := [i for i, marker in enumerate(spelled) if marker not in pieces]:
        raise TemplateError(
            f"the chat template leaves out picture {missing[0] + 1}; take it out, or use another template"
        )
    ids = encode_with_controls(tokenizer, pieces[0], most=n_most)
    for piece in pieces[1:]:
        if piece in spelled:
            layout, rows = spelled[piece]
            for part in layout.parts:
                ids += rows[part] if isinstance(part, int) else _encoded(tokenizer, part, n_most)
        elif piece:
            ids += _encoded(tokenizer, piece, n_most)
        if len(ids) > n_most:
            counts = [_about(tokenizer, each, spelled.get(each), n_most) for each in pieces]
            raise too_long(max(sum(counts), len(ids)), n_most, exact=False)
    return ids


def _about(
    tokenizer: Tokenizer, text: str, picture: tuple[PictureLayout, Sequence[Sequence[int]]] | None, most: int
) -> int:
    """Return about how many ids a text has, or exactly how many a picture has."""
    if picture is None:
        return about_tokens(tokenizer, text, 0) if text else 0
    layout, rows = picture
    return sum(len(rows[part] if isinstance(part, int) else _encoded(tokenizer, part, most)) for part in layout.parts)


def _encoded(tokenizer: Tokenizer, text: str, n_most: int) -> list[int]:
    return encode_with_controls(tokenizer, text, add_special=False, most=n_most)
