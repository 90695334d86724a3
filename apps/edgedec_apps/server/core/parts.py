"""The parts of an answer: what the model thought, the text, and the calls of tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgedec.sequence import Generation
from edgedec_apps.thinking import ThinkingStream
from edgedec_apps.tool_calls import ToolCall, ToolCallStream, parse_tool_calls


@dataclass(frozen=True, slots=True)
class Parts:
    """What an answer consists of, or what a token adds to it.

    Attributes:
        thinking: What the model thought before it answered.
        text: The text of the answer.
        calls: The tools that are to be called.
    """

    thinking: str = ""
    text: str = ""
    calls: Sequence[ToolCall] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.thinking or self.text or self.calls)


@dataclass(slots=True)
class _Text:
    """The streams of one text."""

    thinking: ThinkingStream | None
    calls: ToolCallStream | None
    n_calls: int = 0
    n_thinking: int = 0


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits the texts of a request into their parts; `index` tells the texts apart.

    Attributes:
        tool_names: The names of the tools that the model may call; None where there are none.
        thinks: Whether a text may begin with what the model thinks.
        one_call: Whether calls after a text's first are dropped (`parallel_tool_calls: false`).
    """

    tool_names: frozenset[str] | None = None
    thinks: bool = False
    one_call: bool = False
    _opened: list[bool] = field(default_factory=list)
    _texts: dict[int, _Text] = field(default_factory=dict)

    def begin(self, opened: Sequence[bool]) -> None:
        """Take by text whether its prompt ends with the beginning of what is thought."""
        self._opened.extend(opened)

    def feed(self, index: int, piece: str) -> Parts:
        """Take the next piece of a text; return the parts that are certain now."""
        text = self._text(index)
        thought, answer = "", piece
        if text.thinking is not None:
            before = text.thinking.thinks
            thought, answer = text.thinking.feed(piece)
            text.n_thinking += before or text.thinking.thinks
        content, calls = (answer, []) if text.calls is None else text.calls.feed(answer)
        return Parts(thought, content, self._kept(text, calls))

    def finish(self, index: int) -> Parts:
        """Return the rest of a text that has ended."""
        text = self._text(index)
        thought, answer = ("", "") if text.thinking is None else text.thinking.finish()
        if text.calls is None:
            return Parts(thought, answer)
        content, calls = text.calls.feed(answer) if answer else ("", [])
        rest, more = text.calls.finish()
        return Parts(thought, content + rest, self._kept(text, calls + more))

    def whole(self, index: int, generation: Generation) -> Parts:
        """Return the parts of a whole text."""
        text = self._text(index)
        thinking, answer = "", generation.text
        if text.thinking is not None:
            thoughts, answers = [], []
            for output in generation.outputs:
                before = text.thinking.thinks
                thought, piece = text.thinking.feed(output.text)
                text.n_thinking += before or text.thinking.thinks
                thoughts.append(thought)
                answers.append(piece)
            thought, piece = text.thinking.finish()
            thinking, answer = "".join(thoughts) + thought, "".join(answers) + piece
        if self.tool_names is None:
            return Parts(thinking, answer)
        content, calls = parse_tool_calls(answer, self.tool_names)
        return Parts(thinking, content, self._kept(text, calls))

    def count(self, index: int) -> int:
        """Return the number of calls in a text so far."""
        return self._text(index).n_calls

    @property
    def n_thinking(self) -> int:
        """Number of tokens of all texts so far that were thought, with the tags around them."""
        return sum(text.n_thinking for text in self._texts.values())

    def _kept(self, text: _Text, calls: list[ToolCall]) -> list[ToolCall]:
        kept = calls[: 1 - text.n_calls] if self.one_call else calls
        text.n_calls += len(kept)
        return kept

    def _text(self, index: int) -> _Text:
        if index not in self._texts:
            opened = index < len(self._opened) and self._opened[index]
            thinking = ThinkingStream(opened=opened) if self.thinks else None
            calls = None if self.tool_names is None else ToolCallStream(self.tool_names)
            self._texts[index] = _Text(thinking, calls)
        return self._texts[index]
