"""ollama's interface: /api/chat and /api/generate, and the addresses that are not supported."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edgedec.api.engine import Engine
from edgedec.exact_json import exact_float
from edgedec.sequence import Generation, TokenOutput
from edgedec_apps.infill import Gap
from edgedec_apps.replies import Parts
from edgedec_apps.server.core.answer import Job, json_line
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.chat_options import (
    Tools,
    choose_tools,
    ollama_format,
    read_think,
    read_tools,
    thinks,
    with_close,
)
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.fields import Fields, checked, read_seed, read_stops
from edgedec_apps.server.core.generation import Begun, Finished, Piece, Prompt, TextRequest
from edgedec_apps.server.core.messages import picture_of_base64, read_messages
from edgedec_apps.server.core.reply import Delivery, Dialect, written
from edgedec_apps.server.core.reports import chat_entries, decoding_s, finish_reason, report
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.openai.requests import MOST_LOGPROBS, read_decoding, require_gaps
from edgedec_apps.server.registry.models import asked_seconds

_SAME = "temperature top_p min_p presence_penalty frequency_penalty momentum stop_unsure".split()
_NUMBERS = {name: name for name in _SAME} | {"repeat_penalty": "repetition_penalty"}
_WHOLE = {"top_k": "top_k", "repeat_last_n": "penalty_last_n"}
_NAMES = {option: name for name, option in (_NUMBERS | _WHOLE | {"num_predict": "max_tokens"}).items()}


def read_chat(fields: Fields, options: dict[str, Any], engine: Engine) -> tuple[TextRequest | None, Delivery]:
    """Read the fields of /api/chat except `model`. The first result is None for a request without messages.

    Such a request only wants the model to be loaded.

    Args:
        fields: The fields of the request.
        options: The options that read_options returned.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    entries = fields.each("messages")
    prompt: Prompt | None = read_messages(entries) if entries else None
    return _text_request(fields, options, prompt, engine, read_tools(fields))


def read_generate(fields: Fields, options: dict[str, Any], engine: Engine) -> tuple[TextRequest | None, Delivery]:
    """Read the fields of /api/generate except `model`. The first result is None for a request without a prompt."""
    text, system, raw = fields.text("prompt"), fields.text("system"), fields.flag("raw")
    suffix = fields.text("suffix")
    images = fields.texts("images") or ()
    pictures = [picture_of_base64(fields, f"images[{i}]", image) for i, image in enumerate(images)]
    if pictures and (raw or suffix or engine.template is None):
        raise fields.refusal("images", "needs a model with a chat template, raw: false, and no suffix")
    prompt: Prompt | None = None
    if suffix:
        require_gaps(fields, "suffix", engine)
        if system:
            raise fields.refusal("system", "and suffix exclude each other; leave one out")
        prompt = Gap(text or "", suffix)
    elif text or pictures:
        chats = engine.template is not None and not raw
        if system and not chats:
            raise fields.refusal("system", "needs a model with a chat template, and raw: false")
        before = [{"role": "system", "content": system}] if system else []
        typed = [{"type": "text", "text": text}] if text else []
        content = [*pictures, *typed] if pictures else text
        prompt = [*before, {"role": "user", "content": content}] if chats else text
    return _text_request(fields, options, prompt, engine)


def _text_request(
    fields: Fields, options: dict[str, Any], prompt: Prompt | None, engine: Engine, tools: Tools = ()
) -> tuple[TextRequest | None, Delivery]:
    tools, structured, binds = choose_tools(fields, engine, tools, None, ollama_format(fields))
    options = options | with_close(fields, structured)
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS)
    if logprobs:
        options["logprobs"] = top or 0
    stream = fields.take("stream")
    if stream not in (None, True, False):
        raise fields.refusal("stream", f"is {stream!r:.40}; it must be true or false")
    decoding = read_decoding(fields)
    decoding["draft"] = options.pop("draft", True) and decoding["draft"]
    is_chat = isinstance(prompt, list)
    variables = read_think(fields, engine) if is_chat else {}
    fields.end()
    delivery = Delivery(stream is not False, logprobs=logprobs)
    if prompt is None:
        return None, delivery
    thinking = is_chat and thinks(engine)
    decoding |= {"tools": tools, "binds_calls": binds, "variables": variables, "thinks": thinking}
    return TextRequest((prompt,), options, **decoding), delivery


def read_options(fields: Fields) -> tuple[dict[str, Any], int | None]:
    """Return the sampling options, and the tokens of the context that the request wants, from ollama's options.

    A negative num_predict counts as absent. A draft_num_predict of 0 becomes the option draft=False; other
    numbers have no effect, as the engine chooses the length of drafts, which never change the text.

    Raises:
        RequestError: An option is malformed, or asks for what can't be done; the message names it.
    """
    values: dict[str, Any] = {option: fields.number(name) for name, option in _NUMBERS.items()}
    values |= {option: fields.whole(name) for name, option in _WHOLE.items()}
    values["stop"], values["seed"] = read_stops(fields, "stop"), read_seed(fields)
    most = fields.whole("num_predict", low=-2)
    values["max_tokens"] = None if most is None or most < 0 else most
    n_ctx = fields.whole("num_ctx", low=1)
    no_drafts = {"draft": False} if fields.whole("draft_num_predict") == 0 else {}
    fields.end()
    return checked(fields, values, _NAMES) | no_drafts, n_ctx


Kind = Literal["chat", "generate"]


class OllamaForm(Dialect):
    """The answers of both addresses. Implements reply.Dialect.

    Args:
        texts: The text that it wants; None where it only wants the model to be loaded.
        delivery: How the answer is sent.
        kind: Which of the two.
    """

    media_type = "application/x-ndjson"

    def __init__(self, job: Job, texts: TextRequest | None, delivery: Delivery, kind: Kind) -> None:
        super().__init__(job, texts, delivery)
        self._kind, self._load_s = kind, job.reference.load_s

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return nothing, as NDJSON has no comments."""
        return ()

    def quiet(self) -> bytes:
        """Return a part that adds nothing to the text: clients fail on an empty line."""
        return json_line(self._document(Parts(), done=False))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to the text."""
        logprobs = self._logprobs([piece.output])
        parts = self.splitter.feed(piece.index, piece.output)
        if parts or logprobs:
            yield json_line(self._document(parts, done=False) | logprobs)

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield the rest of the text with the counts and times."""
        rest = self.splitter.finish(finished.index)
        yield json_line(self._document(rest, done=True) | self._report(finished.generation, queued_s))

    def failed(self, error: BaseException) -> bytes:
        """Return an error as the last line."""
        return json_line(problem_of(error).ollama())

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece; without a text that the model is loaded."""
        if not generations:
            return empty_answer(self._kind, self._model, "load")
        (generation,) = generations
        document = self._document(self.splitter.whole(0, generation), done=True)
        return document | self._logprobs(generation.outputs) | self._report(generation, queued_s)

    def _document(self, parts: Parts, *, done: bool) -> dict[str, Any]:
        return _document(self._kind, self._model, parts, done=done)

    def _report(self, generation: Generation, queued_s: float) -> dict[str, Any]:
        stats = generation.stats
        return {
            "done_reason": finish_reason(generation),
            "total_duration": _ns(self._load_s + queued_s + stats.total_s),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": stats.n_prompt_tokens,
            "prompt_eval_duration": _ns(stats.prefill_s),
            "eval_count": stats.n_generated_tokens,
            "eval_duration": _ns(decoding_s(stats)),
        } | report([generation], queued_s)

    def _logprobs(self, outputs: Sequence[TokenOutput]) -> dict[str, Any]:
        if not self.delivery.logprobs:
            return {}
        entries = chat_entries(outputs, self._tokenizer)
        return {"logprobs": entries} if entries else {}


def empty_answer(kind: Kind, model: str, reason: str) -> dict[str, Any]:
    """Return the answer to a request without a text, whose `reason` is that the model was loaded or unloaded."""
    return _document(kind, model, Parts(), done=True) | {"done_reason": reason}


def _document(kind: Kind, model: str, parts: Parts, *, done: bool) -> dict[str, Any]:
    head = {"model": model, "created_at": timestamp(time.time()), "done": done}
    thinking = {"thinking": parts.thinking} if parts.thinking else {}
    if kind == "generate":
        return head | {"response": parts.text} | thinking
    message: dict[str, Any] = {"role": "assistant", "content": parts.text} | thinking
    if parts.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments, parse_float=exact_float)}}
            for call in parts.calls
        ]
    return head | {"message": message}


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the form that ollama uses."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


_TEXTS = {"chat": ("messages",), "generate": ("prompt", "suffix")}


async def chat(request: Request, service: Service) -> ASGIApp:
    """Answer a chat."""
    return await _answer(request, service, "chat")


async def generate(request: Request, service: Service) -> ASGIApp:
    """Answer a prompt, or continue it."""
    return await _answer(request, service, "generate")


async def push(request: Request, service: Service) -> Response:
    """Raise ApiError: models are not published from here."""
    raise ApiError("/api/push is not supported: edgedec publishes no models", status=501, code="not_supported")


async def _answer(request: Request, service: Service, kind: Kind) -> ASGIApp:
    fields: Fields = await read_fields(request, service.settings)
    served = await service.find(str(fields.required("model")))
    options, n_ctx = read_options(fields.object("options"))
    keep_s = asked_seconds(fields.take("keep_alive"))
    if keep_s == 0 and not any(fields.has(name) for name in _TEXTS[kind]):
        await service.registry.unload(lambda entry: entry.recipe == served.recipe)
        return JSONResponse(empty_answer(kind, served.name, "unload"))

    def read(job: Job) -> OllamaForm:
        reader = read_chat if kind == "chat" else read_generate
        return OllamaForm(job, *reader(fields, options, job.engine), kind)

    return written(service, served.asked(keep_s, n_ctx), fields, read)
