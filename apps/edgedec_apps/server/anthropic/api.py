"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from secrets import token_hex
from typing import Any

from starlette.requests import Request

from edgedec.api.engine import Engine
from edgedec.exact_json import exact_float
from edgedec.sequence import Generation
from edgedec_apps.server.core.answer import Answer, Job, read_named, sse
from edgedec_apps.server.core.chat_options import (
    Tools,
    budget,
    choose_tools,
    effort_variables,
    read_format,
    read_thinking,
    read_tools,
    switch,
    with_close,
)
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Begun, Finished, Piece, TextRequest
from edgedec_apps.server.core.messages import Part, call_of, content_of, picture_of_base64, picture_of_url, read_parts
from edgedec_apps.server.core.parts import Block, Blocks, Change, blocks_of
from edgedec_apps.server.core.prompts import read_prompts
from edgedec_apps.server.core.reply import Delivery, Dialect, written
from edgedec_apps.server.core.reports import report
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.openai.requests import chat_request, read_decoding, read_max_tokens, read_sampling

_ROLES = ("user", "assistant", "system")

Message = dict[str, Any]


_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|\Z)")


def read_system(fields: Fields, *, keeps_billing: bool = False) -> list[Message]:
    """Return the message of the field `system`: a text or a list of text blocks; an empty list where it is absent.

    The line for Anthropic's bills with which Claude Code begins it has another value in each request, so that no kept
    prompt would fit. It is left out, and named as ignored, unless `keeps_billing`.
    """
    content = fields.take("system")
    blocks = [] if isinstance(content, str | None) else fields.parts("system", content)
    of_blocks = [block.text_of_kind(block.take("type"), "text") for block in blocks]
    texts = [content] if isinstance(content, str) else [text for text in of_blocks if text is not None]
    if texts and not keeps_billing and (line := _BILLING.match(texts[0])) is not None:
        fields.note_ignored("system", line[0].partition(":")[0])
        rest = texts[0][line.end() :]
        texts[:1] = [rest] if rest else []
    text = "\n".join(texts)
    return [{"role": "system", "content": text}] if text else []


def read_messages(fields: Fields) -> list[Message]:
    """Return the messages of the field `messages`. Results of tools become messages of their own.

    Raises:
        ApiError: A message or a block is malformed, or of a type that is known and can't be read.
    """
    entries = fields.each("messages")
    if not entries:
        raise ApiError("messages must hold at least one message", param="messages")
    messages: list[Message] = []
    for message in entries:
        role, content = message.required("role"), message.take("content")
        message.end()
        if role not in _ROLES:
            raise message.refusal("role", f"is {role!r:.40}; it must be user or assistant")
        if content is None or isinstance(content, str):
            messages.append({"role": role, "content": content or ""})
        else:
            blocks = message.parts("content", content)
            messages += _of_assistant(blocks) if role == "assistant" else _of_user(role, blocks)
    return messages


def _of_assistant(blocks: list[Fields]) -> list[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.take("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            calls.append(call_of(block.required_text("name"), block.take("input"), block.string("id")))
        elif (text := block.text_of_kind(kind, "text")) is not None:
            texts.append(text)
        block.end()
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [message | ({"tool_calls": calls} if calls else {})]


def _of_user(role: str, blocks: list[Fields]) -> list[Message]:
    results: list[Message] = []

    def take_result(block: Fields) -> None:
        content = block.take("content")
        if not isinstance(content, str | None):
            content = content_of(read_parts(block.parts("content", content), ("text",), _OTHERS), "\n")
        results.append({"role": "tool", "content": content or "", "tool_call_id": block.string("tool_use_id") or ""})

    parts = read_parts(blocks, ("text",), {**_OTHERS, "tool_result": take_result})
    return [*results, *([{"role": role, "content": content_of(parts, "\n")}] if parts or not results else [])]


def _document(block: Fields) -> Part | None:
    """Return the text of a document as a part (ApiError for a document that is no text)."""
    source = block.peek("source").get("source")
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        block.skip("source")
        return {"type": "text", "text": source["data"]}
    block.text_of_kind("document")
    return None


def _picture(block: Fields) -> Part:
    """Return the picture of a block, from its `source`: base64, or an address."""
    source = block.object("source")
    kind = source.take("type")
    if kind == "base64":
        return picture_of_base64(source, "data", source.take("data"))
    if kind == "url":
        return picture_of_url(source, "url", source.take("url"))
    raise source.refusal("type", f"is {kind!r:.40}; it must be base64 or url, as no files are kept here")


_OTHERS: Mapping[str, Callable[[Fields], Part | None]] = {"image": _picture, "document": _document}
"""What reads the blocks of a user or of a tool's result that are no texts."""


def read_message(fields: Fields, engine: Engine, *, keeps_billing: bool = False) -> tuple[TextRequest, Delivery]:
    """Read the fields of /v1/messages except `model`; `keeps_billing` as of read_system.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    if fields.has("thread"):  # the client sends the whole chat then
        raise ApiError(
            "thread is not supported: no messages are kept here; send all of them without it",
            param="thread",
            code="thread_unsupported_request",
        )
    messages = [*read_system(fields, keeps_billing=keeps_billing), *read_messages(fields)]
    fields.rename("stop_sequences", "stop")
    options = read_sampling(fields, engine) | read_max_tokens(fields, "max_tokens")
    config = fields.object("output_config")
    structured = read_format(config.object("format"))
    variables = effort_variables(config, "effort", engine, config.text("effort"))
    config.end()
    tools, choice, one_call = _read_tools(fields)
    tools, structured, binds = choose_tools(fields, engine, tools, choice, structured)
    options |= with_close(fields, structured)
    variables |= _read_thinking(fields.object("thinking"), engine) | read_thinking(fields, engine)
    stream = fields.flag("stream")
    decoding = read_decoding(fields)
    fields.end()
    return chat_request(
        engine, messages, options, tools, variables, one_call=one_call, binds_calls=binds, **decoding
    ), Delivery(stream)


def _read_tools(fields: Fields) -> tuple[Tools, Any, bool]:
    """Return the tools, the choice among them in OpenAI's words, and whether the model may call only one."""
    tools = read_tools(fields, ("name", "description", "parameters"), "custom")
    tool_choice = fields.object("tool_choice")
    kind, name, one_call = (
        tool_choice.text("type"),
        tool_choice.text("name"),
        tool_choice.flag("disable_parallel_tool_use"),
    )
    tool_choice.end()
    if kind not in (None, "auto", "any", "tool", "none"):
        raise tool_choice.refusal("type", f"is {kind!r:.40}; it must be auto, any, tool or none")
    choice = {"type": "function", "name": name} if kind == "tool" else kind
    return tools, choice, one_call


def _read_thinking(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of `thinking`; the field is ignored by name where the template can't do it."""
    kind, tokens = fields.text("type"), budget(fields, "budget_tokens", engine)
    fields.end()
    if kind in (None, "adaptive"):
        return tokens
    if kind not in ("enabled", "disabled"):
        raise fields.refusal("type", f"is {kind!r:.40}; it must be enabled, disabled or adaptive")
    return tokens | switch(fields, "type", engine, kind == "enabled")


_REASONS = {"length": "max_tokens"}
_SIGNATURE = "edgedec"  # of thoughts; clients send thoughts without one back as text


class MessageForm(Dialect):
    """The answers of /v1/messages. Implements reply.Dialect."""

    def __init__(self, job: Job, texts: TextRequest, delivery: Delivery) -> None:
        super().__init__(job, texts, delivery)
        self._blocks = Blocks()
        self._head = {"id": f"msg_{token_hex(12)}", "type": "message", "role": "assistant", "model": self._model}

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
        return {"type": "thinking", "thinking": text, "signature": "" if begins else _SIGNATURE}
    return {"type": "text", "text": text}


def _changed(change: Change) -> bytes:
    """Return a change as an event; the end of thoughts has their signature, too."""
    block = change.block
    if change.what == "begin":
        return _event("content_block_start", index=block.index, content_block=_shown(block, begins=True))
    if change.what == "end":
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        events = _event("content_block_delta", index=block.index, delta=signed) if block.kind == "thinking" else b""
        return events + _event("content_block_stop", index=block.index)
    kinds = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
    kind, name = kinds.get(block.kind, ("input_json_delta", "partial_json"))
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: change.text})


def _event(kind: str, **values: Any) -> bytes:
    return sse({"type": kind} | values, kind)


async def create(request: Request, service: Service) -> Answer:
    """Answer a chat."""
    fields, model = await read_named(request, service)

    keeps = service.settings.keeps_billing
    return written(
        service, model, fields, lambda job: MessageForm(job, *read_message(fields, job.engine, keeps_billing=keeps))
    )


async def count_tokens(request: Request, service: Service) -> Answer:
    """Count the tokens of a chat's prompt."""
    fields, model = await read_named(request, service)

    async def compute(job: Job) -> dict[str, Any]:
        texts, _ = read_message(fields, job.engine, keeps_billing=service.settings.keeps_billing)
        with job.queue.preparing():
            (prompt,) = await read_prompts(job, model.completed(texts))
        return {"input_tokens": len(prompt.token_ids)}

    return Answer(service, model, fields, compute)
