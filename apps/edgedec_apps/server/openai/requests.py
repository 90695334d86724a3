"""Requests of OpenAI's interfaces as TextRequests: what each field does is read here, the others are in a table."""

from dataclasses import dataclass
from typing import Any, get_args

from edgedec.api.engine import Engine
from edgedec.api.requests import Reuse, require_rule
from edgedec.errors import RequestError
from edgedec.sequence import COUPLED
from edgedec_apps.infill import Gap, require_infill
from edgedec_apps.server.core.fields import Fields, checked, logit_bias, read_seed, read_stops
from edgedec_apps.server.core.generation import Prompt, TextRequest
from edgedec_apps.server.core.messages import read_messages
from edgedec_apps.server.core.structured import structured_options, with_close
from edgedec_apps.server.core.thinking import read_thinking, thinks
from edgedec_apps.server.core.tools import choose_tools, read_tools
from edgedec_apps.server.llama.fields import LLAMA_NAMES, read_lora

MOST_TEXTS = 16
MOST_PROMPTS = 64
MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # the default of OpenAI's reference
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "momentum",
    "stop_unsure",
)
_NONE = -1  # with which llama-server's clients say that they give no number
_WHOLE = ("top_k", "penalty_last_n")


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is sent.

    Attributes:
        stream: As a stream; else in one piece.
        usage: With the token counts at the end of the stream.
        live: With the counts so far in every part of the stream.
        logprobs: With log-probabilities.
        echo: With the prompt before the text.
        progress: With how far the prompt is read, where it is a stream.
    """

    stream: bool = False
    usage: bool = False
    live: bool = False
    logprobs: bool = False
    echo: bool = False
    progress: bool = False


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
    tools, calling = choose_tools(fields, engine, read_tools(fields), fields.take("tool_choice"))
    structured = structured_options(fields)
    if calling and structured:
        raise fields.refusal("tool_choice", "and response_format exclude each other; leave one out")
    options |= with_close(fields, structured | calling)
    one_call = fields.optional_flag("parallel_tool_calls") is False
    variables = read_thinking(fields, engine)
    options |= _read_prediction(fields)
    n, (draft, verify), reuse, delivery = _common(fields, logprobs=logprobs)
    thinking = thinks(engine, options)
    return TextRequest((messages,), options, n, reuse, draft, verify, tools, one_call, variables, thinking), delivery


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
    n, (draft, verify), reuse, delivery = _common(fields, logprobs=logprobs is not None, echo=echo)
    best_of = best_of or n
    if best_of < n:
        raise fields.refusal("best_of", f"is {best_of}; it must be at least n = {n}, as many texts as are returned")
    if best_of > n and delivery.stream:
        raise fields.refusal("best_of", f"is {best_of}, more than n = {n}, which can't be streamed; leave out stream")
    return TextRequest(prompts, options, n, reuse, draft, verify, best_of=best_of), delivery


def _common(fields: Fields, *, logprobs: bool, echo: bool = False) -> tuple[int, tuple[bool, str], Reuse, Delivery]:
    """Read the fields that both interfaces have, and end the reading."""
    n, stream = fields.whole("n", low=1, high=MOST_TEXTS) or 1, fields.flag("stream")
    if not stream:
        fields.ignore("stream_options")
    stream_options = fields.object("stream_options")
    usage = stream_options.flag("include_usage")
    stream_options.end()
    live, progress = fields.flag("timings_per_token"), fields.flag("return_progress")
    speculative, reuse = read_speculative(fields), read_reuse(fields)
    fields.end()
    return n, speculative, reuse, Delivery(stream, usage, live, logprobs, echo, progress)


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
    given: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    given |= {name: fields.whole(name) for name in _WHOLE}
    if given["top_k"] == _NONE:
        given["top_k"] = 0
    given["seed"], given["stop"] = read_seed(fields), read_stops(fields, "stop")
    given["logit_bias"] = logit_bias(fields, "logit_bias", engine.tokenizer)
    given["ignore_end"] = fields.flag("ignore_end") or None
    scales = read_lora(fields, engine)
    least = fields.whole("min_tokens", low=0)
    methods = {"methods": {"min_tokens": least}} if least else {}
    return checked(fields, given) | ({} if scales is None else {"lora": scales}) | methods


def read_max_tokens(fields: Fields, *names: str) -> dict[str, int | None]:
    """Return the option max_tokens from the fields that may hold it; None is no limit, {} no such field.

    llama-server's n_predict stands for the last of these fields.
    """
    fields.rename("n_predict", names[-1])
    values = set[int | None]()
    for name in names:
        given = fields.has(name)
        value = fields.whole(name, low=1, none=_NONE)
        if given or value is not None:
            values.add(value)
    if len(values) > 1:
        raise fields.refusal(names[1], f"and {names[0]} differ; give one of them")
    return {"max_tokens": values.pop()} if values else {}


def _read_prediction(fields: Fields) -> dict[str, str]:
    """Return the option prediction: the text that OpenAI's field of this name holds, as one string or in parts."""
    if not fields.has("prediction"):
        return {}
    given = fields.object("prediction")
    given.only("type", "content")
    content = given.take("content")
    given.end()
    if isinstance(content, str):
        return {"prediction": content}
    return {"prediction": "".join(part.required_text("text") for part in given.parts("content", content))}


def read_speculative(fields: Fields) -> tuple[bool, str]:
    """Return whether drafts are allowed, and the rule that verifies them, from `speculative`: {"draft", "verify"}."""
    given = fields.object("speculative")
    draft = given.take("draft")
    if draft is not None and draft not in ("auto", "off", True, False):
        raise given.refusal("draft", f"is {draft!r:.40}; it must be 'auto' (as the server was started) or 'off'")
    verify = given.text("verify") or COUPLED
    try:
        require_rule(verify)
    except RequestError as error:
        raise given.refused(error, "verify", "verify") from error
    given.end()
    return draft not in ("off", False), verify


def read_reuse(fields: Fields) -> Reuse:
    """Return how the KV cache of earlier requests may be reused, from `reuse`."""
    value = fields.text("reuse") or "exact"
    known: tuple[Reuse, ...] = get_args(Reuse)
    for reuse in known:
        if value == reuse:
            return reuse
    raise fields.refusal("reuse", f"is {value!r:.40}; it must be {' or '.join(known)}")


def read_prompts(fields: Fields, n_vocab: int) -> tuple[Prompt, ...]:
    """Return the prompts of /v1/completions: a text or token ids below `n_vocab`, or a list of these."""
    given = fields.required("prompt")
    several = given if isinstance(given, list) and not are_ids(given) else [given]
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
