"""Requests of Anthropic's /v1/messages as TextRequests."""

from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.server.anthropic.messages import read_messages, read_system
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.structured import text_format, with_close
from edgedec_apps.server.core.thinking import effort_variables, read_thinking, switch, thinks
from edgedec_apps.server.core.tools import Tools, choose_tools, read_tools
from edgedec_apps.server.openai.requests import read_max_tokens, read_reuse, read_sampling, read_speculative


def read_message(fields: Fields, engine: Engine) -> tuple[TextRequest, bool]:
    """Read the fields of /v1/messages except `model`; return the texts that are wanted, and whether as a stream.

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    messages = [*read_system(fields), *read_messages(fields)]
    fields.rename("stop_sequences", "stop")
    options = read_sampling(fields, engine) | read_max_tokens(fields, "max_tokens")
    tools, calling, one_call = _read_tools(fields, engine)
    config = fields.object("output_config")
    structured = text_format(config.object("format"))
    variables = effort_variables(config, "effort", engine, config.text("effort"))
    config.end()
    if calling and structured:
        raise fields.refusal("tool_choice", "and output_config.format exclude each other; leave one out")
    options |= with_close(fields, structured | calling)
    variables |= _read_thinking(fields.object("thinking"), engine) | read_thinking(fields, engine)
    stream = fields.flag("stream")
    draft, verify = read_speculative(fields)
    reuse = read_reuse(fields)
    fields.end()
    thinking = thinks(engine, options)
    request = TextRequest((messages,), options, 1, reuse, draft, verify, tools, one_call, variables, thinking)
    return request, stream


def _read_tools(fields: Fields, engine: Engine) -> tuple[Tools, dict[str, Any], bool]:
    """Return the tools, the options that make the model call one, and whether it may call only one."""
    found = read_tools(fields, ("name", "description", "parameters"), "custom")
    given = fields.object("tool_choice")
    kind, name, one_call = given.text("type"), given.text("name"), given.flag("disable_parallel_tool_use")
    given.end()
    if kind not in (None, "auto", "any", "tool", "none"):
        raise given.refusal("type", f"is {kind!r:.40}; it must be auto, any, tool or none")
    choice = {"type": "function", "name": name} if kind == "tool" else kind
    return *choose_tools(fields, engine, found, choice), one_call


def _read_thinking(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of `thinking`; the field is ignored by name where the template can't do it."""
    kind = fields.text("type")
    fields.end()
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise fields.refusal("type", f"is {kind!r:.40}; it must be enabled, disabled or adaptive")
    return dict(switch(fields, "type", engine, kind == "enabled"))
