"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions, in one piece or as server-sent events."""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.sequence import Generation, TokenOutput
from edgedec_apps.replies import Parts
from edgedec_apps.server.core.answer import Answer, Job, read_named, sse
from edgedec_apps.server.core.generation import Begun, Finished, Piece, Reading, TextRequest
from edgedec_apps.server.core.reply import Delivery, Dialect, written
from edgedec_apps.server.core.reports import (
    chat_entries,
    completion_logprobs,
    finish_reason,
    prompt_progress,
    report,
    usage,
)
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import timestamp
from edgedec_apps.server.ollama.models import capabilities
from edgedec_apps.server.openai.requests import read_chat, read_completion, read_refine, with_refine
from edgedec_apps.server.registry.models import ModelFile
from edgedec_apps.server.registry.names import Named, with_files


class _Form(Dialect):
    """What both kinds of answers have in common. Implements reply.Dialect, with the methods of the kinds below.

    Args:
        texts: The texts that it wants.
        delivery: How the answer is sent.
    """

    _prefix: str
    """The beginning of an answer's id."""
    _whole: str
    """The type of an answer in one piece."""
    _part: str
    """The type of a part of a stream."""

    def __init__(self, job: Job, texts: TextRequest, delivery: Delivery) -> None:
        super().__init__(job, texts, delivery)
        self._n, self._prompts = texts.n, texts.prompts
        self._head = {"id": f"{self._prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self._head["model"] = self._model
        self._lengths: dict[int, int] = {}  # of the texts of /v1/completions so far

    @abstractmethod
    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return a whole text as an entry of `choices`."""

    def reading(self, reading: Reading) -> Iterator[bytes]:
        """Yield how far a prompt is read, in llama-server's form."""
        yield self._event(self._nothing(reading.index), prompt_progress(reading))

    @abstractmethod
    def _nothing(self, index: int) -> dict[str, Any]:
        """Return an entry of `choices` that adds nothing to a text."""

    def end(self, generations: list[Generation]) -> Iterator[bytes]:
        """Yield the token counts, where the request wants them, and the end of the stream."""
        if self.delivery.usage:
            yield sse(self._document(self._part, []) | {"usage": self._usage(generations)})
        yield sse("[DONE]")

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = [self._choice(index, text) | self._weighed(index) for index, text in enumerate(generations)]
        counts = {"usage": self._usage(generations)}
        return self._document(self._whole, choices) | counts | report(generations, queued_s)

    def _weighed(self, index: int) -> dict[str, Any]:
        """Return the probabilities of the choices among which a text was drawn; nothing where there were none."""
        return {"choice_probabilities": self.choices[index]} if self.choices.get(index) else {}

    def _usage(self, generations: list[Generation]) -> dict[str, Any]:
        return usage(generations, self._n)

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._head["id"], "object": kind} | self._head | {"choices": choices}

    def _event(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        """Return a part of a stream."""
        counts = {"usage": None} if self.delivery.usage else {}
        return sse(self._document(self._part, [choice]) | counts | (more or {}))

    def _live_counts(self, piece: Piece) -> dict[str, Any]:
        """Return the counts so far, where the request wants them in every part; else an empty dict."""
        if not self.delivery.live:
            return {}
        counts = {"predicted_n": piece.n_generated, "draft_n": piece.n_drafted, "draft_n_accepted": piece.n_accepted}
        return {"timings": counts}


class ChatForm(_Form):
    """The answers of /v1/chat/completions."""

    _prefix, _whole, _part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return the role of each text."""
        role = {"role": "assistant", "content": ""}
        return [self._event(_chunk(index, role)) for index in range(len(begun.opened))]

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to its text."""
        entries = self._logprobs([piece.output])
        n_before = self.splitter.count(piece.index)
        parts = self.splitter.feed(piece.index, piece.output)
        if parts or entries:
            delta = _delta(parts, n_before)
            yield self._event(_chunk(piece.index, delta, entries), self._live_counts(piece))

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield the rest of a text, why it ended, and the report on it."""
        index, generation = finished.index, finished.generation
        n_before = self.splitter.count(index)
        parts = self.splitter.finish(index)
        if parts:
            yield self._event(_chunk(index, _delta(parts, n_before)))
        reason = _reason(generation, self.splitter.count(index))
        yield self._event(_chunk(index, {}, reason=reason) | self._weighed(index), report([generation], queued_s))

    def _nothing(self, index: int) -> dict[str, Any]:
        return _chunk(index, {"role": "assistant", "content": None})

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        parts = self.splitter.whole(index, generation)
        text = parts.text or (None if parts.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parts.thinking:
            message["reasoning_content"] = parts.thinking
        if parts.calls:
            message["tool_calls"] = [call.as_dict() for call in parts.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(generation.outputs),
            "finish_reason": _reason(generation, len(parts.calls)),
        }

    def _usage(self, generations: list[Generation]) -> dict[str, Any]:
        counts = super()._usage(generations)
        if self.splitter.thinks:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.splitter.n_thinking}
        return counts

    def _logprobs(self, outputs: Sequence[TokenOutput]) -> dict[str, Any] | None:
        entries = chat_entries(outputs, self._tokenizer) if self.delivery.logprobs else []
        return {"content": entries, "refusal": None} if entries else None


def _chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _delta(parts: Parts, n_before: int) -> dict[str, Any]:
    """Return what a part of a stream adds to a message that has had `n_before` calls."""
    delta: dict[str, Any] = {"content": parts.text} if parts.text or not (parts.calls or parts.thinking) else {}
    if parts.thinking:
        delta["reasoning_content"] = parts.thinking
    if parts.calls:
        delta["tool_calls"] = [{"index": n_before + i} | call.as_dict() for i, call in enumerate(parts.calls)]
    return delta


def _reason(generation: Generation, n_calls: int) -> str:
    return "tool_calls" if n_calls and generation.finish_reason == "stop" else finish_reason(generation)


class CompletionForm(_Form):
    """The answers of /v1/completions."""

    _prefix, _whole, _part = "cmpl", "text_completion", "text_completion"

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to its text, with the echoed prompt before the first token."""
        text = piece.output.text
        if piece.index not in self._lengths:
            text = self._echo(piece.index) + text
        offset = self._lengths.get(piece.index, 0)
        self._lengths[piece.index] = offset + len(text)
        logprobs = self._logprobs([piece.output], offset)
        if text or logprobs:
            yield self._event(_completion(piece.index, text, logprobs), self._live_counts(piece))

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield why a text ended, and the report on it."""
        text = "" if finished.index in self._lengths else self._echo(finished.index)
        choice = _completion(finished.index, text, None, finish_reason(finished.generation))
        yield self._event(choice | self._weighed(finished.index), report([finished.generation], queued_s))

    def _nothing(self, index: int) -> dict[str, Any]:
        return _completion(index, "", None)

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        logprobs = self._logprobs(generation.outputs, 0)
        return _completion(index, self._echo(index) + generation.text, logprobs, finish_reason(generation))

    def _echo(self, index: int) -> str:
        prompt = self._prompts[index // self._n] if self.delivery.echo else ""
        return self._tokenizer.decode(prompt) if isinstance(prompt, tuple) else str(prompt)

    def _logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> dict[str, Any] | None:
        return completion_logprobs(outputs, self._tokenizer, offset) if self.delivery.logprobs else None


def _completion(index: int, text: str, logprobs: Any, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def models(request: Request, service: Service) -> Response:
    """List the models, those of the command line first."""
    listed = await asyncio.to_thread(lambda: with_files(service.names.all()))
    cards = [_card(service, served, file) for served, file in listed]
    ends = {"first_id": cards[0]["id"] if cards else None, "last_id": cards[-1]["id"] if cards else None}
    return JSONResponse({"object": "list", "data": cards, "has_more": False} | ends)


async def model(request: Request, service: Service) -> Response:
    """Describe the model of a name (ApiError 404 where there is none)."""
    name = request.path_params["name"]
    ((served, file),) = await asyncio.to_thread(lambda: with_files([service.names.find(name)]))
    return JSONResponse(_card(service, served, file))


async def chat_completions(request: Request, service: Service) -> Answer:
    """Answer a chat."""
    fields, model = await read_named(request, service)

    def read(job: Job) -> ChatForm:
        how = read_refine(fields, service.settings.checks)
        texts, delivery = read_chat(fields, job.engine)
        return ChatForm(job, with_refine(fields, texts, how, streams=delivery.stream), delivery)

    return written(service, model, fields, read)


async def completions(request: Request, service: Service) -> Answer:
    """Continue texts."""
    fields, model = await read_named(request, service)

    return written(service, model, fields, lambda job: CompletionForm(job, *read_completion(fields, job.engine)))


def _card(service: Service, served: Named, file: ModelFile | None) -> dict[str, Any]:
    loaded = service.registry.entry(served.recipe).loaded
    card: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": service.created,
        "owned_by": "edgedec",
        "ready": loaded is not None,
    }
    if service.settings.checks:
        card["checks"] = list(service.settings.checks)  # what `refine` may name
    card |= {"type": "model", "display_name": served.name, "created_at": timestamp(service.created)}  # Anthropic's
    file = file if loaded is None else loaded.file
    if file is not None:
        card["capabilities"] = capabilities(file, loaded)
    facts = loaded.engine.card if loaded is not None else None if file is None else file.info
    meta: dict[str, Any] = {}
    if file is not None and facts is not None:
        meta = {"n_ctx_train": facts.n_ctx_train, "n_vocab": facts.n_vocab, "n_embd": facts.n_embd}
        meta |= {"architecture": facts.architecture, "chat": file.template is not None}
        meta["tools"] = "tools" in (file.template or "")
    if loaded is not None:
        engine = loaded.engine
        template = engine.template
        meta |= {"n_ctx": engine.n_ctx, "runtime": engine.card.runtime, "chat": template is not None}
        meta["tools"] = template is not None and "tools" in template.source
        meta |= {"lossy": engine.card.lossy} if engine.card.lossy else {}
    return card | {"meta": meta}
