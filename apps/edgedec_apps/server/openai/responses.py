"""OpenAI's /v1/responses: requests, answers in one piece or as server-sent events, and those that are kept."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.api.engine import Engine
from edgedec.sequence import Generation, TokenOutput
from edgedec_apps.replies import Parts
from edgedec_apps.server.core.answer import Answer, Job, read_named, sse
from edgedec_apps.server.core.chat_options import choose_tools, read_format, read_thinking, read_tools, with_close
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Begun, Finished, Piece, TextRequest
from edgedec_apps.server.core.parts import Block, Blocks, Change, blocks_of, message_of
from edgedec_apps.server.core.reply import Delivery, Dialect, written
from edgedec_apps.server.core.reports import chat_entries, report, usage
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.openai.requests import (
    MOST_LOGPROBS,
    chat_request,
    read_decoding,
    read_max_tokens,
    read_sampling,
)
from edgedec_apps.server.openai.response_store import ResponseStore
from edgedec_apps.server.openai.responses_items import read_input

_WITH_LOGPROBS = "message.output_text.logprobs"
_SHOWN = (
    "instructions metadata previous_response_id prompt_cache_key reasoning safety_identifier text tool_choice user"
).split()


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer of /v1/responses needs to know of its request.

    Attributes:
        keep: Whether later requests may refer to it.
        messages: The chat without the instructions.
        shown: Fields of the request that the answer repeats.
    """

    keep: bool
    messages: list[dict[str, Any]]
    shown: dict[str, Any] = field(default_factory=dict)


def read_response(fields: Fields, engine: Engine, store: ResponseStore) -> tuple[TextRequest, Delivery, Asked]:
    """Read the fields of /v1/responses except `model`.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    request_fields = fields.peek(*_SHOWN)
    instructions = fields.text("instructions")
    messages = [*_earlier(fields, store), *read_input(fields)]
    if not messages:
        raise fields.refusal("input", "holds no message; give at least one")
    options = read_sampling(fields, engine) | read_max_tokens(fields, "max_output_tokens")
    include, top = fields.texts("include") or (), fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS)
    with_logprobs = _WITH_LOGPROBS in include
    for name in include:
        if name != _WITH_LOGPROBS:
            fields.note_ignored("include", name)
    if with_logprobs:
        options["logprobs"] = top or 0
    tools = read_tools(fields, ("name", "description", "parameters", "strict"))
    text = fields.object("text")
    structured, choice = read_format(text.object("format")), fields.take("tool_choice")
    tools, structured, binds = choose_tools(fields, engine, tools, choice, structured)
    options |= with_close(fields, structured)
    text.end()
    one_call = fields.optional_flag("parallel_tool_calls") is False
    variables = read_thinking(fields, engine)
    stream, keep = fields.flag("stream"), fields.optional_flag("store") is not False
    fields.object("stream_options").end()
    system = [{"role": "system", "content": instructions}] if instructions else []
    decoding = read_decoding(fields)
    fields.end()
    request = chat_request(
        engine, [*system, *messages], options, tools, variables, one_call=one_call, binds_calls=binds, **decoding
    )
    shown = request_fields | {
        "max_output_tokens": options.get("max_tokens"),
        "parallel_tool_calls": not one_call,
        "store": keep,
        "tools": [_shown(tool) for tool in tools],
        "top_logprobs": top or 0,
    }
    sampling = engine.requests.sampling(**{name: options[name] for name in ("temperature", "top_p") if name in options})
    shown |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return request, Delivery(stream, logprobs=with_logprobs), Asked(keep, messages, shown)


def _earlier(fields: Fields, store: ResponseStore) -> list[dict[str, Any]]:
    """Return the chat up to the response that the request goes on from; no messages where it names none."""
    previous = fields.text("previous_response_id")
    if not previous:
        return []
    stored = store.get(previous)
    if stored is None:
        raise ApiError(
            f"previous_response_id is {previous!r:.100}, which is not kept here: responses are kept in memory, the "
            "latest ones, unless store is false; send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored.messages


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return {"type": "function", "description": None, "parameters": None, "strict": None} | function


_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


class ResponseForm(Dialect):
    """The answers of /v1/responses. Implements reply.Dialect.

    Where a request asks for a summary of the thoughts, they are it: clients that ask for one show no other thoughts.

    Args:
        texts: The text that it wants.
        delivery: How the answer is sent.
        asked: What else the answer needs to know of the request.
    """

    def __init__(self, job: Job, texts: TextRequest, delivery: Delivery, asked: Asked) -> None:
        super().__init__(job, texts, delivery)
        self._asked = asked
        self._keep = job.service.responses.put
        self._blocks = Blocks()
        self._n_sent = 0
        self._logprobs: list[dict[str, Any]] = []
        shown: dict[str, Any] = {"instructions": None, "metadata": {}, "previous_response_id": None}
        shown |= {"tool_choice": "auto"} | asked.shown
        text = {"format": {"type": "text"}} | (shown.pop("text", None) or {})
        reasoning = {"effort": None, "summary": None} | (shown.pop("reasoning", None) or {})
        self._summarizes = bool(reasoning["summary"] or reasoning.get("generate_summary"))  # its older name
        self._head = {"id": f"resp_{token_hex(24)}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": self._model, "background": False, "error": None, "incomplete_details": None}
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
        event = self._event("error", code=code, message=str(problem), param=problem.param)
        return event + self._event("response.failed", response=document)

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
            yield from self._of_text(change, at, entries)
        if change.what == "end":
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _of_call(self, change: Change, at: dict[str, Any]) -> Iterator[bytes]:
        if change.what == "add":
            yield self._event("response.function_call_arguments.delta", **at, delta=change.text)
        elif change.what == "end":
            call = change.block.call
            function = {"name": call.name} if call is not None else {}
            yield self._event("response.function_call_arguments.done", **at, arguments=change.block.text, **function)

    def _of_text(self, change: Change, at: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[bytes]:
        block, is_answer = change.block, change.block.kind == "text"
        name, part = "response.output_text" if is_answer else "response.reasoning_text", "response.content_part"
        if self._summarizes and not is_answer:
            name, part = "response.reasoning_summary_text", "response.reasoning_summary_part"
        at = at | {"content_index" if part == "response.content_part" else "summary_index": 0}
        if change.what == "begin":
            yield self._event(f"{part}.added", **at, part=self._part(block, text=""))
        elif change.what == "add":
            yield self._event(f"{name}.delta", **at, delta=change.text, **({"logprobs": entries} if is_answer else {}))
        else:
            more = {"logprobs": self._logprobs} if is_answer else {}
            yield self._event(f"{name}.done", **at, text=block.text, **more)
            yield self._event(f"{part}.done", **at, part=self._part(block))

    def _entries(self, outputs: Iterable[TokenOutput]) -> list[dict[str, Any]]:
        return chat_entries(outputs, self._tokenizer) if self.delivery.logprobs else []

    def _part(self, block: Block, text: str | None = None) -> dict[str, Any]:
        shown = block.text if text is None else text
        if block.kind == "thinking":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": shown}
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
            thoughts = [{"type": "reasoning_text", "text": block.text}] if content else []
            return item | {"type": "reasoning", "summary": content if self._summarizes else [], "content": thoughts}
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


async def create(request: Request, service: Service) -> Answer:
    """Answer a conversation."""
    fields, model = await read_named(request, service)
    responses = service.responses
    return written(service, model, fields, lambda job: ResponseForm(job, *read_response(fields, job.engine, responses)))


async def retrieve(request: Request, service: Service) -> Response:
    """Send a response that is kept."""
    response_id = request.path_params["id"]
    stored = service.responses.get(response_id)
    if stored is None:
        raise _not_kept(response_id)
    return JSONResponse(stored.document)


async def delete(request: Request, service: Service) -> Response:
    """Forget a response."""
    response_id = request.path_params["id"]
    if not service.responses.drop(response_id):
        raise _not_kept(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _not_kept(response_id: str) -> ApiError:
    what = f"there is no response {response_id!r:.100} here; the latest ones are kept in memory, unless store is false"
    return ApiError(what, status=404, code="not_found", param="id")
