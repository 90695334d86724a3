"""Tools that a chat's model may call."""

from collections.abc import Sequence
from typing import Any

from edgedec.api.engine import Engine
from edgedec_apps.call_bodies import tool_call_schema
from edgedec_apps.server.core.fields import Fields

_MOST_TOOLS = 128
_CHOICES = {"": None, "auto": "auto", "none": "none", "required": "required", "any": "required"}  # and Anthropic's word
Tools = tuple[dict[str, Any], ...]
"""Definitions of tools, in OpenAI's form."""


_OF_FUNCTION = ("name", "description", "parameters", "strict", "return")


def read_tools(fields: Fields, names: Sequence[str] = _OF_FUNCTION, kind: str = "function") -> Tools:
    """Return the tools of a request in OpenAI's form. Tools of other kinds, a service's own, are ignored by name.

    Args:
        fields: The fields of the request; `tools` is read.
        names: The fields of a function that the model is told, in their order where they are the tool's own.
        kind: What the interface calls a tool that is a function.

    Raises:
        ApiError: A tool is malformed.
    """
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(fields.each("tools")):
        said = tool.take("type")
        if said not in (None, kind):
            fields.note_ignored(f"tools[{i}]", str(said))
            continue
        nested = tool.has("function")
        inner = tool.object("function") if nested else tool
        inner.rename("input_schema", "parameters")
        function = inner.take_all(names)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise inner.refusal("name", "must be a string")
        if not isinstance(function.get("parameters"), dict | None):
            raise inner.refusal("parameters", "must be a JSON schema, an object")
        for each in (inner, tool):
            each.end()
        if not nested:
            function = {name: function[name] for name in names if function.get(name) is not None}
        found.append({"type": "function", "function": function})
    return tuple(found)


def choose_tools(fields: Fields, engine: Engine, tools: Tools, choice: Any) -> tuple[Tools, dict[str, Any]]:
    """Return the tools that the model is told, and the options of Engine.stream that make it call one of them.

    Args:
        fields: The fields of the request, for the names in errors.
        engine: The model.
        tools: The definitions.
        choice: "none", "auto", "required", a choice of one tool or of allowed tools in OpenAI's forms, or None.

    Raises:
        ApiError: The choice is malformed, or the template does not support tools.
    """
    if len(tools) > _MOST_TOOLS:
        raise fields.refusal("tools", f"holds {len(tools)} tools; at most {_MOST_TOOLS}")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        names = _names(allowed.get("tools")) if isinstance(allowed, dict) else []
        tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
        if not tools:
            raise fields.refusal("tool_choice", "allows none of the tools that the request has")
        choice = allowed.get("mode", "auto")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(kind, str) and kind in _CHOICES:
        choice = _CHOICES[kind]
    if not tools:
        if choice not in (None, "none", "auto"):
            raise fields.refusal("tool_choice", "needs tools too")
        return (), {}
    if choice == "none":
        return (), {}
    if engine.template is None or "tools" not in engine.template.source:
        raise fields.refusal("tools", "are not supported by the model's chat template; leave them out")
    if choice in (None, "auto"):
        return tools, {}
    return tools, {"json_schema": tool_call_schema(_chosen(fields, choice, tools))}


def _chosen(fields: Fields, choice: Any, tools: Tools) -> Tools:
    """Return the tools of which the model must call one."""
    if choice == "required":
        return tools
    named = _names([choice]) if isinstance(choice, dict) and choice.get("type") == "function" else []
    found = tuple(tool for tool in tools if tool["function"]["name"] in named)
    if not found:
        raise fields.refusal("tool_choice", f"is {choice!r:.100}; it must be none, auto, required, or name a tool")
    return found


def _names(choices: Any) -> list[Any]:
    """Return the names of functions that a list says as {"name": ...} or {"function": {"name": ...}}."""
    objects = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    inner = [each.get("function", each) for each in objects]
    return [each.get("name") for each in inner if isinstance(each, dict)]
