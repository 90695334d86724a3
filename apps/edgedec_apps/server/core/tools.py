"""Tools that a chat's model may call."""

from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.call_bodies import tool_call_schema
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields

_MOST_TOOLS = 128
Tools = tuple[dict[str, Any], ...]
"""Definitions of tools, in OpenAI's form."""


def read_tools(fields: Fields, engine: Engine) -> tuple[Tools, dict[str, Any]]:
    """Return the tools of a request, and the options of Engine.stream that make the model call one of them.

    Args:
        fields: The fields of the request; `tools` and `tool_choice` are read.
        engine: The model.

    Raises:
        ApiError: A tool or the choice is malformed, or the template does not support tools.
    """
    tools = tuple(_definition(i, tool) for i, tool in enumerate(fields.objects("tools")))
    return choose_tools(fields, engine, tools, fields.take("tool_choice"))


def choose_tools(fields: Fields, engine: Engine, tools: Tools, choice: Any) -> tuple[Tools, dict[str, Any]]:
    """Return tools and options as read_tools does, for tools and a choice that were read.

    Args:
        fields: The fields of the request, for the names in errors.
        engine: The model.
        tools: The definitions.
        choice: "none", "auto", "required", a choice of one tool in OpenAI's form, or None.

    Raises:
        ApiError: As read_tools.
    """
    if len(tools) > _MOST_TOOLS:
        raise fields.refusal("tools", f"holds {len(tools)} tools; at most {_MOST_TOOLS}")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise fields.refusal("tool_choice", "needs tools too")
        return (), {}
    if choice == "none":
        return (), {}
    if not engine.can_chat or "tools" not in engine.template.source:
        raise fields.refusal("tools", "are not supported by the model's chat template; leave them out")
    if choice in (None, "auto"):
        return tools, {}
    return tools, {"json_schema": tool_call_schema(_chosen(fields, choice, tools))}


def _chosen(fields: Fields, choice: Any, tools: Tools) -> Tools:
    """Return the tools of which the model must call one."""
    if choice == "required":
        return tools
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    found = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not found:
        raise fields.refusal("tool_choice", f"is {choice!r:.100}; it must be none, auto, required, or name a tool")
    return found


def _definition(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form (ApiError where it is malformed)."""
    function = tool.get("function")
    where = f"tools[{i}]"
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ApiError(f"{where} must be an object of type 'function' with a function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ApiError(f"{where}.function.name must be a string", param=where)
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(f"{where}.function.parameters must be a JSON schema, an object", param=where)
    return {"type": "function", "function": function}
