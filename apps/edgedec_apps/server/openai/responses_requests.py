"""Requests of /v1/responses as TextRequests."""

from dataclasses import dataclass, field
from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.structured import text_format, with_close
from edgedec_apps.server.core.thinking import effort_variables, read_template_variables, thinks
from edgedec_apps.server.core.tools import Tools, choose_tools
from edgedec_apps.server.openai.requests import (
    MOST_LOGPROBS,
    ignore_the_services,
    read_max_tokens,
    read_reuse,
    read_sampling,
    read_speculative,
)
from edgedec_apps.server.openai.response_store import ResponseStore
from edgedec_apps.server.openai.responses_items import read_input, require_messages

_WITH_LOGPROBS = "message.output_text.logprobs"
_SHOWN = (
    *("instructions", "metadata", "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier"),
    *("text", "tool_choice", "user"),
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
        RequestError: A field is unknown, malformed or not supported; the message names it.
    """
    given = fields.peek(*_SHOWN)
    instructions = fields.text("instructions")
    messages = [*_earlier(fields, kept), *read_input(fields)]
    require_messages(messages)
    options = read_sampling(fields, engine) | read_max_tokens(fields, "max_output_tokens")
    include, top = fields.texts("include") or (), fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS)
    with_logprobs = _WITH_LOGPROBS in include
    for name in include:
        if name != _WITH_LOGPROBS:
            fields.note_ignored("include", name)
    if with_logprobs:
        options["logprobs"] = top or 0
    tools, calling = _read_tools(fields, engine)
    text = fields.object("text")
    structured = text_format(text.object("format"))
    text.ignore("verbosity")
    text.end()
    if calling and structured:
        raise fields.refusal("tool_choice", "and text.format exclude each other; leave one out")
    options |= with_close(fields, structured | calling)
    one_call = fields.optional_flag("parallel_tool_calls") is False
    variables = _read_reasoning(fields.object("reasoning"), engine) | read_template_variables(fields)
    stream, keep = fields.flag("stream"), fields.optional_flag("store") is not False
    fields.object("stream_options").end_except("include_obfuscation")
    _refuse_and_ignore(fields)
    draft, verify = read_speculative(fields)
    reuse = read_reuse(fields)
    ignore_the_services(fields)
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
    sampling = engine.sampling(**{name: options[name] for name in ("temperature", "top_p") if name in options})
    shown |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return request, Asked(stream, keep, with_logprobs, messages, shown)


def _earlier(fields: Fields, kept: ResponseStore) -> list[dict[str, Any]]:
    """Return the chat up to the response that the request goes on from; no messages where it names none."""
    previous = fields.text("previous_response_id")
    if previous is None:
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


def _read_tools(fields: Fields, engine: Engine) -> tuple[Tools, dict[str, Any]]:
    """Return the functions that the model may call; tools of OpenAI's own service are ignored by name."""
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(fields.objects("tools")):
        kind, where = tool.get("type", "function"), f"tools[{i}]"
        if kind != "function":
            fields.note_ignored(where, str(kind))
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise ApiError(f"{where}.name must be a string", param=f"{where}.name")
        if not isinstance(tool.get("parameters"), dict | None):
            raise ApiError(f"{where}.parameters must be a JSON schema, an object", param=f"{where}.parameters")
        wanted = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in wanted if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    choice = fields.take("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = [tool.get("name") for tool in allowed if isinstance(tool, dict)] if isinstance(allowed, list) else []
        found = [tool for tool in found if tool["function"]["name"] in named]
        if not found:
            raise fields.refusal("tool_choice", "allows none of the tools that the request has")
        choice = choice.get("mode", "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if not found and choice == "required":
        raise fields.refusal("tool_choice", "needs a tool of type 'function'")
    return choose_tools(fields, engine, tuple(found), choice)


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return {"type": "function", "description": None, "parameters": None, "strict": None} | function


def _read_reasoning(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of `reasoning`; the thoughts come as they are, so summaries are ignored."""
    variables = effort_variables(fields, "effort", engine, fields.text("effort"))
    fields.ignore("summary", "generate_summary", "context", "mode")
    fields.end()
    return variables


def _refuse_and_ignore(fields: Fields) -> None:
    fields.unsupported("background", "requests are answered at once; leave it out")
    fields.unsupported("conversation", "conversations are not kept by name; give previous_response_id, or all of input")
    fields.unsupported("prompt", "there are no prompts by name; give instructions and input")
    if fields.text("truncation") not in (None, "disabled"):
        fields.note_ignored("truncation")
    fields.ignore("max_tool_calls", "context_management", "background_options", "access_programs", "image")
