"""What a model thinks, at a terminal: between <think> and </think>, whatever marks the model writes.

Where the model has tools, its calls of them are taken out of what is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgedec.chat import may_think
from edgedec_apps.call_bodies import ToolCall, Tools
from edgedec_apps.cli.shown.replies import ShownText
from edgedec_apps.replies import USUAL, Parts, ReplyStream, split_reply
from edgedec_apps.reply_marks import Mark, hidden_marks, marks_of, thinking_mark

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec.chat import Message
    from edgedec.sequence import Generation


@dataclass(frozen=True, slots=True)
class OwnMarks:
    """The marks that a text is split by: none where the model thinks between <think> and </think>, and has no tools.

    Attributes:
        hidden: Those that are control tokens, which add nothing to a text, by their ids.
        tools: The schemas of the tools that the model may call; None where calls are text.
        opened: The mark with which the prompt ends, so that a text begins behind it; empty for none.
    """

    marks: tuple[Mark, ...] = ()
    hidden: Mapping[int, str] = field(default_factory=dict)
    tools: Tools | None = None
    opened: str = ""


def own_marks(engine: "Engine", tools: Tools | None = None, opened: str = "") -> OwnMarks:
    """Return the marks by which a model's texts are split, with its tools and the mark with which the prompt ends."""
    source = engine.requests.require_template().source
    marks = marks_of(source, engine.tokenizer)
    if tools is None and (not may_think(source) or thinking_mark(marks, source) in USUAL):
        return OwnMarks()
    return OwnMarks(marks, hidden_marks(marks, engine.tokenizer), tools, opened)


def answer_message(generation: "Generation", marks: OwnMarks) -> "tuple[Message, Sequence[ToolCall]]":
    """Return an answer as a message for the chat template, and the calls of tools in it.

    What was thought, and the calls, stand apart in the message where the marks are `marks`.
    """
    if not marks.marks:
        return {"role": "assistant", "content": generation.text}, ()
    text = "".join(output.text + marks.hidden.get(output.token_id, "") for output in generation.outputs)
    parts = split_reply(text, marks.marks, tools=marks.tools, opened=marks.opened)
    thought = {"reasoning_content": parts.thinking} if parts.thinking else {}
    calls = {"tool_calls": [call.for_template() for call in parts.calls]} if parts.calls else {}
    return {"role": "assistant", "content": parts.text} | thought | calls, parts.calls


def with_thoughts(show: ShownText, marks: OwnMarks) -> ShownText:
    """Return what shows a text with <think> and </think> in the place of these marks; `show` where there are none."""
    return ShownThoughts(show, marks.marks, marks.tools, marks.opened) if marks.marks else show


class ShownThoughts:
    """Shows a text with <think> and </think> in the place of the model's own marks.

    Args:
        show: Shows what comes of it.
        tools: The tools whose calls are left out; None where calls are text.
        opened: The mark with which the prompt ends; empty for none.
    """

    def __init__(self, show: ShownText, marks: tuple[Mark, ...], tools: Tools | None = None, opened: str = "") -> None:
        self._show = show
        self._stream = ReplyStream(marks, tools=tools, opened=opened)
        self._thinks = False

    def write(self, text: str) -> None:
        """Show the next part of the text."""
        self._write(self._stream.feed(text))

    def end(self) -> None:
        """End the text, and its last line."""
        self._write(self._stream.finish())
        self._show.end()

    def break_off(self) -> None:
        """End the line of the text at a terminal, for a note on standard error; the text may go on."""
        self._show.break_off()

    def _write(self, parts: Parts) -> None:
        if parts.thinking:
            self._show.write(parts.thinking if self._thinks else f"<think>\n{parts.thinking}")
            self._thinks = True
        if parts.text:
            self._show.write(f"\n</think>\n\n{parts.text}" if self._thinks else parts.text)
            self._thinks = False
