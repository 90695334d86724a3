"""Requests of OpenAI's interfaces as TextRequests: what each field does is read here, the others are in a table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from edgedec.api.engine import Engine
from edgedec.api.requests import Reuse, adapter_scales, require_rule
from edgedec.errors import RequestError
from edgedec.sequence import COUPLED
from edgedec_apps import refine
from edgedec_apps.infill import Gap, require_infill
from edgedec_apps.server.core.chat_options import (
    Tools,
    choose_tools,
    read_thinking,
    read_tools,
    structured_options,
    thinks,
    with_close,
)
from edgedec_apps.server.core.fields import Fields, checked, logit_bias, read_seed, read_stops
from edgedec_apps.server.core.generation import Prompt, TextRequest
from edgedec_apps.server.core.messages import read_messages
from edgedec_apps.server.core.reply import Delivery

MOST_TOGETHER = 16


def read_refine(fields: Fields, checks: Mapping[str, Sequence[str]]) -> refine.RefineBy | None:
    """Return how the field `refine` wants an answer to be refined; None where it is absent.

    Raises:
        ApiError: The check is unknown, or a number is out of range.
    """
    if not fields.has("refine"):
        return None
    document = fields.object("refine")
    name = document.required_text("check")
    if name not in checks:
        expected = (
            f"it must be one of {', '.join(checks)}" if checks else "the server was started without checks (--check)"
        )
        raise document.refusal("check", f"is {name!r:.60}; {expected}")
    n = document.whole("n", low=1, high=MOST_TOGETHER) or 4
    texts, tokens = (
        document.whole("texts", low=1, high=refine.MOST_TEXTS),
        document.whole("tokens", low=1, high=refine.MOST_TOKENS),
    )
    seconds = document.number("seconds")
    if seconds is not None and not 0 < seconds <= 1e6:
        raise document.refusal("seconds", f"is {seconds:g}; it must be above 0")
    document.end()
    return refine.RefineBy(check=checks[name], n=n, texts=texts, tokens=tokens, seconds=seconds)


def with_refine(fields: Fields, request: TextRequest, how: refine.RefineBy | None, *, streams: bool) -> TextRequest:
    """Return a chat's request with how it is refined (ApiError where another field of it excludes that)."""
    if how is None:
        return request
    (messages,) = request.prompts
    assert isinstance(messages, list)
    others = {
        "stream": streams,
        "n": request.n > 1,
        "tools": request.tools,
        "chat_template_kwargs or reasoning_effort": request.variables,
        "a last message of the assistant": messages[-1]["role"] == "assistant",
    }
    for name, value in others.items():
        if value:
            raise fields.refusal("refine", f"and {name} exclude each other; leave one out")
    return replace(request, refine=how)


MOST_TEXTS = 16
LLAMA_NAMES = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", "ignore_eos": "ignore_end"}
"""What llama-server calls options of sampling, and what edgedec calls them."""
MOST_PROMPTS = 64
MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # the default of OpenAI's reference
_NUMBERS = "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty momentum stop_unsure".split()
_NONE = -1  # with which llama-server's clients say that they give no number
_WHOLE = ("top_k", "penalty_last_n")


def read_chat(fields: Fields, engine: Engine) -> tuple[TextRequest, Delivery]:
    """Read the fields of /v1/chat/completions except `model`.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    messages = read_messages(fields.each("messages"))
    options = read_sampling(fields, engine)
    options |= read_max_tokens(fields, "max_completion_tokens", "max_tokens")
    n_probs = fields.whole("n_probs", low=0, high=MOST_LOGPROBS)
    logprobs = fields.flag("logprobs") or bool(n_probs)
    top = fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS) or n_probs
    if top and not logprobs:
        fields.note_ignored("top_logprobs")
    if logprobs:
        options["logprobs"] = top or 0
    if fields.has("tools"):  # in place of which there were these
        fields.ignore("functions", "function_call")
    structured, choice = structured_options(fields), fields.take("tool_choice")
    tools, structured, binds = choose_tools(fields, engine, read_tools(fields), choice, structured)
    options |= with_close(fields, structured)
    one_call = fields.optional_flag("parallel_tool_calls") is False
    variables = read_thinking(fields, engine)
    options |= _read_prediction(fields)
    common, delivery = _common(fields, logprobs=logprobs)
    return chat_request(
        engine, messages, options, tools, variables, one_call=one_call, binds_calls=binds, **common
    ), delivery


def chat_request(
    engine: Engine, messages: Prompt, options: dict[str, Any], tools: Tools, variables: dict[str, Any], **more: Any
) -> TextRequest:
    """Return the request for the answer to a chat, with `more` fields of a TextRequest."""
    return TextRequest((messages,), options, tools=tools, variables=variables, thinks=thinks(engine), **more)


def read_completion(fields: Fields, engine: Engine) -> tuple[TextRequest, Delivery]:
    """Read the fields of /v1/completions except `model` (RequestError as read_chat)."""
    prompts = read_prompts(fields, engine.card.n_vocab)
    options = read_sampling(fields, engine)
    options |= read_max_tokens(fields, "max_tokens") or {"max_tokens": _COMPLETION_TOKENS}
    if not fields.is_zero("n_probs"):
        fields.rename("n_probs", "logprobs")
    if fields.peek("logprobs").get("logprobs") is False:  # chats have a switch of this name
        fields.take("logprobs")
    logprobs = fields.whole("logprobs", low=0, high=MOST_LOGPROBS)
    if logprobs is not None:
        options["logprobs"] = logprobs
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        raise fields.refusal("echo", "and logprobs exclude each other, as the prompt has no log-probabilities")
    if suffix := fields.text("suffix"):
        if echo or not all(isinstance(prompt, str) for prompt in prompts):
            raise fields.refusal("suffix", "needs prompts that are texts, and echo: false")
        require_gaps(fields, "suffix", engine)
        prompts = tuple(Gap(str(prompt), suffix) for prompt in prompts)
    options |= with_close(fields, structured_options(fields))
    best_of = fields.whole("best_of", low=1, high=MOST_TEXTS)
    common, delivery = _common(fields, logprobs=logprobs is not None, echo=echo)
    n = common["n"]
    best_of = best_of or n
    if best_of < n:
        raise fields.refusal("best_of", f"is {best_of}; it must be at least n = {n}, as many texts as are returned")
    if best_of > n and delivery.stream:
        raise fields.refusal("best_of", f"is {best_of}, more than n = {n}, which can't be streamed; leave out stream")
    return TextRequest(prompts, options, best_of=best_of, **common), delivery


def _common(fields: Fields, *, logprobs: bool, echo: bool = False) -> tuple[dict[str, Any], Delivery]:
    """Read the fields that both interfaces have, some as fields of a TextRequest, and end the reading."""
    n, stream = fields.whole("n", low=1, high=MOST_TEXTS) or 1, fields.flag("stream")
    if not stream:
        fields.ignore("stream_options")
    stream_options = fields.object("stream_options")
    usage = stream_options.flag("include_usage")
    stream_options.end()
    live, progress = fields.flag("timings_per_token"), fields.flag("return_progress")
    common = {"n": n} | read_decoding(fields)
    fields.end()
    return common, Delivery(stream, usage, live, logprobs, echo, progress)


def require_gaps(fields: Fields, name: str, engine: Engine) -> None:
    """Raise ApiError about the field `name` where the model can't fill in the middle."""
    try:
        require_infill(engine.tokenizer)
    except RequestError as error:
        raise fields.refusal(name, f"can't be used: {error}") from error


def read_sampling(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the sampling options that the request has, by the names here or by llama-server's."""
    for alias, name in LLAMA_NAMES.items():
        fields.rename(alias, name)
    values: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    values |= {name: fields.whole(name) for name in _WHOLE}
    if values["top_k"] == _NONE:
        values["top_k"] = 0
    values["seed"], values["stop"] = read_seed(fields), read_stops(fields, "stop")
    values["logit_bias"] = logit_bias(fields, "logit_bias", engine.tokenizer)
    values["ignore_end"] = fields.flag("ignore_end") or None
    scales = read_lora(fields, engine)
    least = fields.whole("min_tokens", low=0)
    methods = {"methods": {"min_tokens": least}} if least else {}
    return checked(fields, values) | ({} if scales is None else {"lora": scales}) | methods


def read_lora(fields: Fields, engine: Engine, name: str = "lora") -> tuple[float, ...] | None:
    """Return the scales of adapters that a field holds, as [{"id": 0, "scale": 0.5}]; None where it is absent.

    An adapter without an entry has the scale 0.

    Raises:
        ApiError: The field is no such list, or the model has no adapter of an id.
    """
    raw, n = fields.take(name), len(engine.card.adapters)
    if raw is None:
        return None
    scales: list[Any] = [0.0] * n
    for entry in raw if isinstance(raw, list) else [raw]:
        if not isinstance(entry, dict) or entry.keys() != {"id", "scale"} or isinstance(entry["scale"], bool | str):
            raise fields.refusal(name, 'must be a list such as [{"id": 0, "scale": 0.5}]')
        number = entry["id"]
        if type(number) is not int or not 0 <= number < n:
            expected = f"ids from 0 to {n - 1}" if n else "no adapters (edgedec serve --lora FILE loads them)"
            raise fields.refusal(name, f"has the id {number!r:.40}; the model has {expected}")
        scales[number] = entry["scale"]
    try:
        return adapter_scales(scales, n)
    except RequestError as error:
        raise fields.refusal(name, "has a scale that is no finite number") from error


def read_max_tokens(fields: Fields, *names: str) -> dict[str, int | None]:
    """Return the option max_tokens from the fields that may hold it; None is no limit, {} no such field.

    llama-server's n_predict stands for the last of these fields.
    """
    fields.rename("n_predict", names[-1])
    values = set[int | None]()
    for name in names:
        is_set = fields.has(name)
        value = fields.whole(name, low=1, none=_NONE)
        if is_set or value is not None:
            values.add(value)
    if len(values) > 1:
        raise fields.refusal(names[1], f"and {names[0]} differ; give one of them")
    return {"max_tokens": values.pop()} if values else {}


def _read_prediction(fields: Fields) -> dict[str, str]:
    """Return the option prediction: the text that OpenAI's field of this name holds, as one string or in parts."""
    if not fields.has("prediction"):
        return {}
    prediction = fields.object("prediction")
    prediction.only("type", "content")
    content = prediction.take("content")
    prediction.end()
    if isinstance(content, str):
        return {"prediction": content}
    return {"prediction": "".join(part.required_text("text") for part in prediction.parts("content", content))}


def read_decoding(fields: Fields) -> dict[str, Any]:
    """Return how the text is made, which never changes it, as fields of a TextRequest.

    `speculative` says whether drafts are allowed, and the rule that verifies them; `reuse` how the KV cache of earlier
    requests may be reused.
    """
    speculative = fields.object("speculative")
    draft = speculative.take("draft")
    if draft is not None and draft not in ("auto", "off", True, False):
        raise speculative.refusal("draft", f"is {draft!r:.40}; it must be 'auto' (as the server was started) or 'off'")
    verify, reuse = speculative.text("verify") or COUPLED, fields.text("reuse") or "exact"
    try:
        require_rule(verify)
    except RequestError as error:
        raise speculative.refused(error, "verify", "verify") from error
    speculative.end()
    if reuse not in get_args(Reuse):
        raise fields.refusal("reuse", f"is {reuse!r:.40}; it must be {' or '.join(get_args(Reuse))}")
    return {"draft": draft not in ("off", False), "verify": verify, "reuse": reuse}


def read_prompts(fields: Fields, n_vocab: int) -> tuple[Prompt, ...]:
    """Return the prompts of /v1/completions: a text or token ids below `n_vocab`, or a list of these."""
    value = fields.required("prompt")
    several = value if isinstance(value, list) and not are_ids(value) else [value]
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise fields.refusal("prompt", f"holds {len(several)} prompts; it must be 1 to {MOST_PROMPTS}")
    if not all(isinstance(each, str) or are_ids(each) for each in several):
        raise fields.refusal("prompt", "must be a string, a list of token ids, or a list of these")
    if not all(0 <= token_id < n_vocab for each in several if isinstance(each, list) for token_id in each):
        raise fields.refusal("prompt", f"holds a token id outside the vocabulary, 0 to {n_vocab - 1}")
    return tuple(each if isinstance(each, str) else tuple(each) for each in several)


def are_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)
