"""The blocks of an answer, one after the other: thoughts, text, calls; for interfaces that stream them by name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal

from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.replies import Parts

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
            block = self._begin("call", call)
            yield Change("begin", block)
            block.text = call.arguments
            yield Change("add", block, call.arguments)
            yield from self.close()

    def take_empty(self) -> Change:
        """Return the beginning of a text that has nothing in it."""
        return Change("begin", self._begin("text"))

    def close(self) -> Iterator[Change]:
        """Yield the end of the block that is open, if any."""
        block, self._open = self._open, None
        if block is not None:
            yield Change("end", block)

    def _add(self, kind: BlockKind, text: str) -> Iterator[Change]:
        block = self._open
        if block is None or block.kind != kind:
            yield from self.close()
            block = self._begin(kind)
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
