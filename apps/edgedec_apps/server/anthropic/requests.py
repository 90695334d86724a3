"""Requests of Anthropic's /v1/messages as TextRequests."""

from typing import Any

from edgedec.api.engine import Engine
from edgedec.errors import RequestError
from edgedec_apps.server.anthropic.messages import read_messages, read_system
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields, checked
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.structured import text_format, with_close
from edgedec_apps.server.core.thinking import effort_variables, read_template_variables, switch, thinks
from edgedec_apps.server.core.tools import Tools, choose_tools
from edgedec_apps.server.openai.requests import ignore_the_services, read_max_tokens, read_reuse, read_speculative

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_message(fields: Fields, engine: Engine) -> tuple[TextRequest, bool]:
    """Read the fields of /v1/messages except `model`; return the texts that are wanted, and whether as a stream.

    Raises:
        RequestError: A field is unknown, malformed or not supported; the message names it.
    """
    messages = [*read_system(fields), *read_messages(fields)]
    options = checked(
        fields,
        {
            "temperature": fields.number("temperature"),
            "top_p": fields.number("top_p"),
            "top_k": fields.whole("top_k"),
            "stop": fields.texts("stop_sequences") or None,
            "seed": fields.whole("seed", low=0),
        },
        {"stop": "stop_sequences"},
    )
    options |= read_max_tokens(fields, "max_tokens")
    tools, calling, one_call = _read_tools(fields, engine)
    config = fields.object("output_config")
    structured = text_format(config.object("format"))
    variables = effort_variables(config, "effort", engine, config.text("effort"))
    config.ignore("task_budget")
    config.end()
    if calling and structured:
        raise fields.refusal("tool_choice", "and output_config.format exclude each other; leave one out")
    options |= with_close(fields, structured | calling)
    variables |= _read_thinking(fields.object("thinking"), engine) | read_template_variables(fields)
    stream = fields.flag("stream")
    draft, verify = read_speculative(fields)
    reuse = read_reuse(fields)
    fields.ignore("container", "mcp_servers", "context_management", "diagnostics", "inference_geo", "speed", "betas")
    fields.skip("cache_control", "user_profile_id", "workspace_id")
    if fields.take("service_tier") not in (None, "auto", "standard_only"):
        fields.note_ignored("service_tier")
    ignore_the_services(fields)
    fields.end()
    thinking = thinks(engine, options)
    request = TextRequest((messages,), options, 1, reuse, draft, verify, tools, one_call, variables, thinking)
    return request, stream


def _read_tools(fields: Fields, engine: Engine) -> tuple[Tools, dict[str, Any], bool]:
    """Return the tools, the options that make the model call one, and whether it may call only one.

    Tools of Anthropic's own service are ignored by name.
    """
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(fields.objects("tools")):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind not in (None, "custom"):
            fields.note_ignored(where, str(kind))
            continue
        name, schema, about = tool.get("name"), tool.get("input_schema"), tool.get("description")
        if not isinstance(name, str) or not name:
            raise ApiError(f"{where}.name must be a string", param=f"{where}.name")
        if not isinstance(schema, dict):
            raise ApiError(f"{where}.input_schema must be a JSON schema, an object", param=f"{where}.input_schema")
        function = {"name": name, **({"description": about} if isinstance(about, str) else {}), "parameters": schema}
        found.append({"type": "function", "function": function})
    given = fields.object("tool_choice")
    kind, name, one_call = given.text("type"), given.text("name"), given.flag("disable_parallel_tool_use")
    given.end()
    choice: Any = _CHOICES.get(kind or "auto")
    if kind == "tool":
        choice = {"type": "function", "function": {"name": name}}
    elif choice is None:
        raise given.refusal("type", f"is {kind!r:.40}; it must be auto, any, tool or none")
    if not found and choice not in ("auto", "none"):
        raise fields.refusal("tool_choice", "needs tools too")
    return *choose_tools(fields, engine, tuple(found), choice), one_call


def _read_thinking(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of `thinking`; the field is ignored where the template can't do it."""
    kind = fields.text("type")
    fields.ignore("budget_tokens")
    fields.skip("display")
    fields.end()
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise fields.refusal("type", f"is {kind!r:.40}; it must be enabled, disabled or adaptive")
    try:
        return dict(switch(fields, "type", engine, kind == "enabled"))
    except RequestError:
        fields.note_ignored("type", kind)
        return {}
