"""Requests of /v1/responses as TextRequests."""

from dataclasses import dataclass, field
from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.structured import text_format, with_close
from edgedec_apps.server.core.thinking import read_thinking, thinks
from edgedec_apps.server.core.tools import choose_tools, read_tools
from edgedec_apps.server.openai.requests import (
    MOST_LOGPROBS,
    read_max_tokens,
    read_reuse,
    read_sampling,
    read_speculative,
)
from edgedec_apps.server.openai.response_store import ResponseStore
from edgedec_apps.server.openai.responses_items import read_input

_WITH_LOGPROBS = "message.output_text.logprobs"
_SHOWN = tuple(
    """
    instructions metadata previous_response_id prompt_cache_key reasoning safety_identifier text tool_choice user
    """.split()
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer of /v1/responses needs to know of its request.

    Attributes:
        stream: Whether it is a stream.
        keep: Whether later requests may refer to it.
        logprobs: Whether it has log-probabilities.
        messages: The chat without the instructions.
        shown: Fields of the request that the answer repeats.
    """

    stream: bool
    keep: bool
    logprobs: bool
    messages: list[dict[str, Any]]
    shown: dict[str, Any] = field(default_factory=dict)


def read_response(fields: Fields, engine: Engine, kept: ResponseStore) -> tuple[TextRequest, Asked]:
    """Read the fields of /v1/responses except `model`.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    given = fields.peek(*_SHOWN)
    instructions = fields.text("instructions")
    messages = [*_earlier(fields, kept), *read_input(fields)]
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
    tools, calling = choose_tools(fields, engine, tools, fields.take("tool_choice"))
    text = fields.object("text")
    structured = text_format(text.object("format"))
    text.end()
    if calling and structured:
        raise fields.refusal("tool_choice", "and text.format exclude each other; leave one out")
    options |= with_close(fields, structured | calling)
    one_call = fields.optional_flag("parallel_tool_calls") is False
    variables = read_thinking(fields, engine)
    stream, keep = fields.flag("stream"), fields.optional_flag("store") is not False
    fields.object("stream_options").end()
    draft, verify = read_speculative(fields)
    reuse = read_reuse(fields)
    fields.end()
    told = [{"role": "system", "content": instructions}] if instructions else []
    prompt = ([*told, *messages],)
    thinking = thinks(engine, options)
    request = TextRequest(prompt, options, 1, reuse, draft, verify, tools, one_call, variables, thinking)
    shown = given | {
        "max_output_tokens": options.get("max_tokens"),
        "parallel_tool_calls": not one_call,
        "store": keep,
        "tools": [_shown(tool) for tool in tools],
        "top_logprobs": top or 0,
    }
    sampling = engine.requests.sampling(**{name: options[name] for name in ("temperature", "top_p") if name in options})
    shown |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return request, Asked(stream, keep, with_logprobs, messages, shown)


def _earlier(fields: Fields, kept: ResponseStore) -> list[dict[str, Any]]:
    """Return the chat up to the response that the request goes on from; no messages where it names none."""
    previous = fields.text("previous_response_id")
    if not previous:
        return []
    found = kept.get(previous)
    if found is None:
        raise ApiError(
            f"previous_response_id is {previous!r:.100}, which is not kept here: responses are kept in memory, the "
            "latest ones, unless store is false; send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return {"type": "function", "description": None, "parameters": None, "strict": None} | function
