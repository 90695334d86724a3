"""Answers of Anthropic's /v1/messages, in one piece or as server-sent events."""

import json
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

from edgedec.exact_json import exact_float
from edgedec.sequence import Generation
from edgedec_apps.server.core.blocks import Block, Blocks, Change, blocks_of
from edgedec_apps.server.core.errors import problem_of
from edgedec_apps.server.core.generation import Begun, Finished, Piece
from edgedec_apps.server.core.parts import Splitter
from edgedec_apps.server.core.reply import Dialect
from edgedec_apps.server.core.sender import sse
from edgedec_apps.server.openai.forms import report

_REASONS = {"length": "max_tokens"}


class MessageForm(Dialect):
    """The answers of /v1/messages. Implements reply.Dialect.

    Args:
        model: The model's name.
        streams: Whether the answer is a stream.
        splitter: Splits the text into its parts.
    """

    def __init__(self, model: str, splitter: Splitter, *, streams: bool) -> None:
        super().__init__(streams=streams, splitter=splitter)
        self._blocks = Blocks()
        self._head = {"id": f"msg_{token_hex(12)}", "type": "message", "role": "assistant", "model": model}

    def begun(self, begun: Begun) -> Iterator[bytes]:
        """Return the events that begin the stream."""
        usage = {"input_tokens": begun.n_prompt_tokens, "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        message: dict[str, Any] = self._head | {"content": []} | ends
        return iter((_event("message_start", message=message), _event("ping")))

    def quiet(self) -> bytes:
        """Return an event that says nothing."""
        return _event("ping")

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to the answer."""
        for change in self._blocks.take(self.splitter.feed(0, piece.output)):
            yield _changed(change)

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield the rest of the answer, why it ended, and the counts."""
        for change in (*self._blocks.take(self.splitter.finish(0)), *self._blocks.close()):
            yield _changed(change)
        generation = finished.generation
        delta = self._end(generation)
        usage = _usage(generation)
        yield _event("message_delta", delta=delta, usage=usage, **report([generation], queued_s))
        yield _event("message_stop")

    def failed(self, error: BaseException) -> bytes:
        """Return an error as the last event."""
        return _event("error", error=problem_of(error).anthropic()["error"])

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        (generation,) = generations
        content = [_shown(block) for block in blocks_of(self.splitter.whole(0, generation))]
        ends = self._end(generation) | {"usage": _usage(generation)}
        return self._head | {"content": content} | ends | report(generations, queued_s)

    def _end(self, generation: Generation) -> dict[str, Any]:
        """Return why the text ended."""
        reason = _REASONS.get(generation.finish_reason, "end_turn")
        if generation.stop_string is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self.splitter.count(0):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": generation.stop_string}


def _usage(generation: Generation) -> dict[str, int]:
    """Return Anthropic's counts of tokens: those of the prompt that were in the KV cache are counted apart."""
    stats = generation.stats
    return {
        "input_tokens": stats.n_prompt_tokens - stats.n_reused_tokens,
        "cache_read_input_tokens": stats.n_reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.n_generated_tokens,
    }


def _shown(block: Block, *, begins: bool = False) -> dict[str, Any]:
    """Return a block of the content."""
    text = "" if begins else block.text
    if block.call is not None:
        arguments = {} if begins else json.loads(block.text, parse_float=exact_float)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _changed(change: Change) -> bytes:
    """Return a change as an event."""
    block = change.block
    if change.what == "begin":
        return _event("content_block_start", index=block.index, content_block=_shown(block, begins=True))
    if change.what == "end":
        return _event("content_block_stop", index=block.index)
    kinds = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
    kind, name = kinds.get(block.kind, ("input_json_delta", "partial_json"))
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: change.text})


def _event(kind: str, **values: Any) -> bytes:
    return sse({"type": kind} | values, kind)
