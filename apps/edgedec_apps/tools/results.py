"""What a tool answered, as the text that the model gets: no pictures, no sounds, and no more than is allowed."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp_types import CallToolResult

MOST_CHARACTERS = 20_000
"""The most characters of a tool's answer that a model gets."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call brought.

    Attributes:
        text: What the model is told.
        failed: Whether the tool did not do what it was asked for.
        note: What a person should know of the answer, such as a picture that the model does not get; may be empty.
    """

    text: str
    failed: bool = False
    note: str = ""


def as_result(result: "CallToolResult", most: int = MOST_CHARACTERS) -> ToolResult:
    """Return an answer of a tool as text of at most about `most` characters; what is left out is said in it."""
    parts, left_out = [], list[str]()
    for block in result.content:
        text = _text(block)
        if text is None:
            what = f"{block.type} ({getattr(block, 'mime_type', None) or 'of no type'})"
            left_out.append(what[:100])
            text = f"[left out: {what[:100]}; only text is read]"
        parts.append(text)
    if not result.content and result.structured_content is not None:
        parts.append(_json(result.structured_content))
    text = "\n\n".join(part for part in parts if part) or "[the tool answered without a text]"
    shown, n_cut = cut(text, most)
    notes = [f"not text, left out: {', '.join(left_out[:5])}"] if left_out else []
    if n_cut:
        notes.append(f"its answer of {len(text)} characters was cut to {most}")
    return ToolResult(shown, bool(result.is_error), "; ".join(notes))


def cut(text: str, most: int) -> tuple[str, int]:
    """Return the beginning and the end of a text that has more than `most` characters, and how many are left out.

    >>> cut("abcdefgh", 4)
    ('abc\\n[4 characters left out]\\nh', 4)
    >>> cut("abc", 4)
    ('abc', 0)
    """
    n_cut = len(text) - most
    if n_cut <= 0:
        return text, 0
    n_end = most // 4
    return f"{text[: most - n_end]}\n[{n_cut} characters left out]\n{text[len(text) - n_end :]}", n_cut


def _text(block: Any) -> str | None:
    """Return a part of an answer as text; None for a picture, a sound or other bytes."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        content = getattr(block.resource, "text", None)
        return None if content is None else f"{block.resource.uri}:\n{content}"
    if block.type == "resource_link":
        return " ".join(str(text) for text in (block.name, block.uri, block.description) if text)
    return None


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "[the tool's answer is nested too deeply]"
