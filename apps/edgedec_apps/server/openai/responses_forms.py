"""Answers of /v1/responses, in one piece or as server-sent events."""

import time
from collections.abc import Callable, Iterable, Iterator
from secrets import token_hex
from typing import Any

from edgedec.sequence import Generation, TokenOutput
from edgedec.tokenizer import Tokenizer
from edgedec_apps.replies import Parts
from edgedec_apps.server.core.blocks import Block, Blocks, Change, blocks_of, message_of
from edgedec_apps.server.core.errors import problem_of
from edgedec_apps.server.core.generation import Begun, Finished, Piece
from edgedec_apps.server.core.parts import Splitter
from edgedec_apps.server.core.reply import Dialect
from edgedec_apps.server.core.reports import chat_entries
from edgedec_apps.server.core.sender import sse
from edgedec_apps.server.openai.forms import report, usage
from edgedec_apps.server.openai.responses_requests import Asked

Keep = Callable[[dict[str, Any], list[dict[str, Any]]], None]
"""Keeps a response with its chat for later requests."""

_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


class ResponseForm(Dialect):
    """The answers of /v1/responses. Implements reply.Dialect.

    Args:
        model: The model's name.
        asked: What the answer needs to know of the request.
        tokenizer: The model's tokenizer.
        splitter: Splits the text into its parts.
        keep: Keeps the response for later requests.
    """

    def __init__(self, model: str, asked: Asked, tokenizer: Tokenizer, splitter: Splitter, keep: Keep) -> None:
        super().__init__(streams=asked.stream, splitter=splitter)
        self._asked = asked
        self._tokenizer = tokenizer
        self._keep = keep
        self._blocks = Blocks()
        self._n_sent = 0
        self._logprobs: list[dict[str, Any]] = []
        shown: dict[str, Any] = {"instructions": None, "metadata": {}, "previous_response_id": None}
        shown |= {"tool_choice": "auto"} | asked.shown
        text = {"format": {"type": "text"}} | (shown.pop("text", None) or {})
        reasoning = {"effort": None, "summary": None} | (shown.pop("reasoning", None) or {})
        self._head = {"id": f"resp_{token_hex(24)}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": model, "background": False, "error": None, "incomplete_details": None}
        self._head |= shown | {"text": text, "reasoning": reasoning, "truncation": "disabled"}

    def begun(self, begun: Begun) -> Iterator[bytes]:
        """Return the events that begin the stream."""
        document = self._document("in_progress", [])
        return (self._event(kind, response=document) for kind in ("response.created", "response.in_progress"))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to the answer."""
        entries = self._entries([piece.output])
        self._logprobs += entries
        yield from self._changed(self.splitter.feed(0, piece.output), entries)

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield the rest of the answer, and the whole response."""
        yield from self._changed(self.splitter.finish(0), [])
        if not self._blocks.all:
            yield from self._of(self._blocks.take_empty(), [])
        for change in self._blocks.close():
            yield from self._of(change, [])
        document = self._complete(self._blocks.all, finished.generation, queued_s)
        yield self._event(f"response.{document['status']}", response=document)

    def failed(self, error: BaseException) -> bytes:
        """Return the events of an error."""
        problem = problem_of(error)
        code = problem.code or "server_error"
        document = self._document("failed", self._blocks.all)
        document["error"] = {"code": "server_error", "message": str(problem)}
        told = self._event("error", code=code, message=str(problem), param=problem.param)
        return told + self._event("response.failed", response=document)

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        (generation,) = generations
        self._logprobs = self._entries(generation.outputs)
        blocks = blocks_of(self.splitter.whole(0, generation)) or [Block(0, "text")]
        return self._complete(blocks, generation, queued_s)

    def _changed(self, parts: Parts, entries: list[dict[str, Any]]) -> Iterator[bytes]:
        for change in self._blocks.take(parts):
            yield from self._of(change, entries)

    def _of(self, change: Change, entries: list[dict[str, Any]]) -> Iterator[bytes]:
        """Yield the events of a change."""
        block = change.block
        at = {"item_id": _item_id(block), "output_index": block.index}
        if change.what == "begin":
            item = self._item(block, begins=True)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            yield from self._of_call(change, at)
        else:
            yield from self._of_text(change, at | {"content_index": 0}, entries)
        if change.what == "end":
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _of_call(self, change: Change, at: dict[str, Any]) -> Iterator[bytes]:
        if change.what == "add":
            yield self._event("response.function_call_arguments.delta", **at, delta=change.text)
        elif change.what == "end":
            call = change.block.call
            named = {"name": call.name} if call is not None else {}
            yield self._event("response.function_call_arguments.done", **at, arguments=change.block.text, **named)

    def _of_text(self, change: Change, at: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[bytes]:
        block, is_answer = change.block, change.block.kind == "text"
        name = "response.output_text" if is_answer else "response.reasoning_text"
        if change.what == "begin":
            yield self._event("response.content_part.added", **at, part=self._part(block, text=""))
        elif change.what == "add":
            yield self._event(f"{name}.delta", **at, delta=change.text, **({"logprobs": entries} if is_answer else {}))
        else:
            more = {"logprobs": self._logprobs} if is_answer else {}
            yield self._event(f"{name}.done", **at, text=block.text, **more)
            yield self._event("response.content_part.done", **at, part=self._part(block))

    def _entries(self, outputs: Iterable[TokenOutput]) -> list[dict[str, Any]]:
        return chat_entries(outputs, self._tokenizer) if self._asked.logprobs else []

    def _part(self, block: Block, text: str | None = None) -> dict[str, Any]:
        shown = block.text if text is None else text
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": shown}
        entries = self._logprobs if text is None else []
        return {"type": "output_text", "text": shown, "annotations": [], "logprobs": entries}

    def _item(self, block: Block, *, begins: bool = False) -> dict[str, Any]:
        """Return a block as an item of `output`."""
        item: dict[str, Any] = {"id": _item_id(block), "status": "in_progress" if begins else "completed"}
        if block.call is not None:
            arguments = "" if begins else block.text
            return item | {
                "type": "function_call",
                "call_id": block.call.id,
                "name": block.call.name,
                "arguments": arguments,
            }
        content = [] if begins else [self._part(block)]
        if block.kind == "thinking":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _document(self, status: str, blocks: list[Block]) -> dict[str, Any]:
        output = [self._item(block) for block in blocks]
        return self._head | {"status": status, "output": output, "usage": None}

    def _complete(self, blocks: list[Block], generation: Generation, queued_s: float) -> dict[str, Any]:
        """Return the whole response, and keep it."""
        is_cut = generation.finish_reason == "length"
        document = self._document("incomplete" if is_cut else "completed", blocks)
        if is_cut:
            document["incomplete_details"] = {"reason": "max_output_tokens"}
            document["output"][-1]["status"] = "incomplete"
        counts = usage([generation], 1)
        document["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.splitter.n_thinking},
            "total_tokens": counts["total_tokens"],
        }
        if self._asked.keep:
            self._keep(document, [*self._asked.messages, message_of(blocks)])
        return document | report([generation], queued_s)

    def _event(self, kind: str, **values: Any) -> bytes:
        self._n_sent += 1
        return sse({"type": kind, "sequence_number": self._n_sent - 1} | values, kind)


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"
