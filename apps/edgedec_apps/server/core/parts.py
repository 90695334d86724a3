"""The parts of the texts of a request, as their tokens come, and as blocks: thoughts, text, calls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal

from edgedec.sequence import Generation, TokenOutput
from edgedec_apps.call_bodies import ToolCall, Tools
from edgedec_apps.replies import USUAL, Parts, ReplyStream, joined
from edgedec_apps.reply_marks import Mark


@dataclass(slots=True)
class _Text:
    """The stream of one text."""

    stream: ReplyStream
    n_calls: int = 0
    n_thinking: int = 0


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits the texts of a request into their parts; `index` tells the texts apart.

    Attributes:
        tools: The tools that the model may call; None where there are none.
        thinks: Whether a text may begin with what the model thinks.
        one_call: Whether calls after a text's first are dropped (`parallel_tool_calls: false`).
        marks: The marks that the model may write.
        hidden: The marks that are control tokens, which add nothing to a text, by their ids.
    """

    tools: Tools | None = None
    thinks: bool = False
    one_call: bool = False
    marks: tuple[Mark, ...] = USUAL
    hidden: Mapping[int, str] = field(default_factory=dict)
    _opened: list[str] = field(default_factory=list)
    _texts: dict[int, _Text] = field(default_factory=dict)

    def begin(self, opened: Sequence[str]) -> None:
        """Take by text the mark with which its prompt ends, so that the text begins behind it."""
        self._opened.extend(opened)

    def feed(self, index: int, output: TokenOutput) -> Parts:
        """Take the next token of a text; return the parts that are certain now."""
        text = self._text(index)
        before = text.stream.thinks
        parts = text.stream.feed(output.text + self.hidden.get(output.token_id, ""))
        text.n_thinking += before or text.stream.thinks
        return self._kept(text, parts)

    def finish(self, index: int) -> Parts:
        """Return the rest of a text that has ended."""
        text = self._text(index)
        return self._kept(text, text.stream.finish())

    def whole(self, index: int, generation: Generation) -> Parts:
        """Return the parts of a whole text."""
        return joined([*(self.feed(index, output) for output in generation.outputs), self.finish(index)])

    def count(self, index: int) -> int:
        """Return the number of calls in a text so far."""
        return self._text(index).n_calls

    @property
    def n_thinking(self) -> int:
        """Number of tokens of all texts so far that were thought, with the marks around them."""
        return sum(text.n_thinking for text in self._texts.values())

    def _kept(self, text: _Text, parts: Parts) -> Parts:
        calls = parts.calls[: 1 - text.n_calls] if self.one_call else parts.calls
        text.n_calls += len(calls)
        return Parts(parts.thinking, parts.text, calls)

    def _text(self, index: int) -> _Text:
        if index not in self._texts:
            opened = self._opened[index] if index < len(self._opened) else ""
            # Under a grammar nothing is thought, and no channel has a name.
            marks = self.marks if self.thinks else [m for m in self.marks if m.read is not None and not m.head_ends]
            self._texts[index] = _Text(ReplyStream(marks, tools=self.tools, opened=opened))
        return self._texts[index]


BlockKind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        index: Its place among the blocks of the answer.
        kind: What it is.
        text: The text so far; of a call its arguments.
        call: The call, of a call.
        id: A random text that no other block has.
    """

    index: int
    kind: BlockKind
    text: str = ""
    call: ToolCall | None = None
    id: str = field(default_factory=lambda: token_hex(12))


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to a block: it begins, gets more text, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Makes blocks of the parts of an answer, in the order in which they come.

    Attributes:
        all: The blocks so far.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, parts: Parts) -> Iterator[Change]:
        """Yield what these parts change."""
        if parts.thinking:
            yield from self._add("thinking", parts.thinking)
        if parts.text:
            yield from self._add("text", parts.text)
        for call in parts.calls:
            yield from self.close()
            yield from self._add("call", call.arguments, call)
            yield from self.close()

    def take_empty(self) -> Change:
        """Return the beginning of a text that has nothing in it."""
        return Change("begin", self._begin("text"))

    def close(self) -> Iterator[Change]:
        """Yield the end of the block that is open, if any."""
        block, self._open = self._open, None
        if block is not None:
            yield Change("end", block)

    def _add(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> Iterator[Change]:
        block = self._open
        if block is None or block.kind != kind:
            yield from self.close()
            block = self._begin(kind, call)
            yield Change("begin", block)
        block.text += text
        yield Change("add", block, text)

    def _begin(self, kind: BlockKind, call: ToolCall | None = None) -> Block:
        self._open = block = Block(len(self.all), kind, call=call)
        self.all.append(block)
        return block


def blocks_of(parts: Parts) -> list[Block]:
    """Return the blocks of a whole answer."""
    blocks = Blocks()
    for _ in blocks.take(parts):
        pass
    return blocks.all


def message_of(blocks: list[Block]) -> dict[str, object]:
    """Return an answer as a message for the chat template."""
    joined = {kind: "".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "thinking")}
    message: dict[str, object] = {"role": "assistant", "content": joined["text"]}
    if joined["thinking"]:
        message["reasoning_content"] = joined["thinking"]
    calls = [block.call.for_template() for block in blocks if block.call is not None]
    return message | ({"tool_calls": calls} if calls else {})
