"""Requests of ollama's interface as TextRequests.

Options of loading a model have no effect but for num_ctx, which is read before the model is there.
"""

from dataclasses import dataclass
from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.infill import Gap
from edgedec_apps.server.core.fields import Fields, checked, read_seed, read_stops
from edgedec_apps.server.core.generation import Prompt, TextRequest
from edgedec_apps.server.core.messages import read_messages
from edgedec_apps.server.core.pictures import picture_of_base64
from edgedec_apps.server.core.structured import ollama_format, with_close
from edgedec_apps.server.core.thinking import read_think, thinks
from edgedec_apps.server.core.tools import Tools, choose_tools, read_tools
from edgedec_apps.server.openai.requests import MOST_LOGPROBS, read_reuse, read_speculative, require_gaps

_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "momentum": "momentum",
    "stop_unsure": "stop_unsure",
}
_WHOLE = {"top_k": "top_k", "repeat_last_n": "penalty_last_n"}
_NAMES = {option: name for name, option in (_NUMBERS | _WHOLE | {"num_predict": "max_tokens"}).items()}


@dataclass(frozen=True, slots=True)
class OllamaDelivery:
    """How an answer is sent: as a stream or in one piece, with log-probabilities or without."""

    stream: bool
    logprobs: bool


def read_chat(fields: Fields, options: dict[str, Any], engine: Engine) -> tuple[TextRequest | None, OllamaDelivery]:
    """Read the fields of /api/chat except `model`. The first result is None for a request without messages.

    Such a request only wants the model to be loaded.

    Args:
        fields: The fields of the request.
        options: The options that read_options returned.
        engine: The model.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    given = fields.each("messages")
    prompt: Prompt | None = read_messages(given) if given else None
    tools, _ = choose_tools(fields, engine, read_tools(fields), None)
    return _text_request(fields, options, prompt, engine, tools)


def read_generate(fields: Fields, options: dict[str, Any], engine: Engine) -> tuple[TextRequest | None, OllamaDelivery]:
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
) -> tuple[TextRequest | None, OllamaDelivery]:
    options = options | with_close(fields, ollama_format(fields))
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS)
    if logprobs:
        options["logprobs"] = top or 0
    stream = fields.take("stream")
    if stream not in (None, True, False):
        raise fields.refusal("stream", f"is {stream!r:.40}; it must be true or false")
    draft, verify = read_speculative(fields)
    draft = options.pop("draft", True) and draft
    reuse = read_reuse(fields)
    is_chat = isinstance(prompt, list)
    variables = read_think(fields, engine) if is_chat else {}
    fields.end()
    delivery = OllamaDelivery(stream is not False, logprobs)
    if prompt is None:
        return None, delivery
    thinking = is_chat and thinks(engine, options)
    request = TextRequest((prompt,), options, 1, reuse, draft, verify, tools, variables=variables, thinks=thinking)
    return request, delivery


def read_options(fields: Fields) -> tuple[dict[str, Any], int | None]:
    """Return the sampling options, and the tokens of the context that the request wants, from ollama's options.

    A negative num_predict counts as absent. A draft_num_predict of 0 becomes the option draft=False; other
    numbers have no effect, as the engine chooses the length of drafts, which never change the text.

    Raises:
        RequestError: An option is malformed, or asks for what can't be done; the message names it.
    """
    given: dict[str, Any] = {option: fields.number(name) for name, option in _NUMBERS.items()}
    given |= {option: fields.whole(name) for name, option in _WHOLE.items()}
    given["stop"], given["seed"], most = (
        read_stops(fields, "stop"),
        read_seed(fields),
        fields.whole("num_predict", low=-2),
    )
    given["max_tokens"] = None if most is None or most < 0 else most
    n_ctx = fields.whole("num_ctx", low=1)
    no_drafts = {"draft": False} if fields.whole("draft_num_predict") == 0 else {}
    fields.end()
    return checked(fields, given, _NAMES) | no_drafts, n_ctx
