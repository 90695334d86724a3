"""The fields of a chat's request that become options and variables: structured output, tools, and thinking."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import may_think, thinking_variables
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_apps.call_bodies import tool_call_schema
from edgedec_apps.choices import require_choices
from edgedec_apps.server.core.fields import Fields

CLOSE = "json_close"
_GUIDED = ("guided_json", "guided_regex", "guided_choice")
_ANY_OBJECT = {"type": "object"}


def structured_options(fields: Fields) -> dict[str, Any]:
    """Return the options of a request's `response_format`, or of llama-server's or vLLM's fields in its place.

    llama-server's are `json_schema` and `grammar` (GBNF), vLLM's are `structured_outputs` and its older names.
    The types of a format are OpenAI's text, json_object and json_schema, and {"type": "regex", "pattern": ...} and
    {"type": "lark", "grammar": ...}. As with llama-server, an object of the first two may have the schema itself.

    Raises:
        RequestError: A field is malformed, or several of them are given.
    """
    forms = {
        "response_format": read_format(fields.object("response_format")),
        "json_schema": {} if (schema := _schema(fields, "json_schema")) is None else {"json_schema": schema},
        "grammar": {"grammar": Grammar.gbnf(source)} if (source := fields.text("grammar")) else {},
    }
    forms |= {name: _guided(fields, name, name.removeprefix("guided_")) for name in _GUIDED}
    inner = fields.object("structured_outputs")
    forms |= {f"structured_outputs.{kind}": _guided(inner, kind, kind) for kind in ("json", "regex", "choice")}
    inner.end()
    names = [name for name, options in forms.items() if options]
    if len(names) > 1:
        raise fields.refusal(names[1], f"and {names[0]} exclude each other; leave one out")
    return forms[names[0]] if names else {}


def _guided(fields: Fields, name: str, kind: str) -> dict[str, Any]:
    """Return the options of a field of vLLM's: a JSON schema as an object or its text, a pattern, or some texts."""
    if kind == "json":
        schema = fields.string(name) or _schema(fields, name)
        return {} if schema is None else {"json_schema": schema}
    if kind == "choice" and (choices := fields.texts(name)) is not None:
        try:
            require_choices(choices)
        except RequestError as error:
            raise fields.refused(error, "choices", name) from error
        return {"grammar": Grammar.regex("|".join(map(re.escape, choices))), "choices": choices}
    return {"grammar": Grammar.regex(pattern)} if (pattern := fields.text(name)) else {}


def read_format(form: Fields) -> dict[str, Any]:
    """Return the options of a format: `response_format`, or `format` in what other interfaces of services call so.

    The schema stands in the format itself, as in /v1/responses, or in its field `json_schema`, as in a chat.
    """
    kind = form.text("type")
    options: dict[str, Any] = {}
    if kind == "json_object":
        schema = _schema(form, "schema")
        options["json_schema"] = _ANY_OBJECT if schema is None else schema
    elif kind == "json_schema":
        inner = form.object("json_schema") if form.peek("json_schema") else form
        if (schema := _schema(inner, "schema")) is None:
            raise inner.refusal("schema", "is missing; give it")
        options["json_schema"] = schema
        inner.skip("name", "description", "strict")
        inner.end()
    elif kind == "regex":
        options["grammar"] = Grammar.regex(form.required_text("pattern"))
    elif kind == "lark":
        options["grammar"] = Grammar.lark(form.required_text("grammar"))
    elif kind not in (None, "text"):
        raise form.refusal("type", f"is {kind!r:.40}; it must be text, json_object, json_schema, regex or lark")
    form.end()
    return options


def _schema(fields: Fields, name: str) -> dict[str, Any] | None:
    """Return a field that holds a JSON schema; None where it is absent."""
    schema: dict[str, Any] | None = fields.take(name)
    if not isinstance(schema, dict | None):
        raise fields.refusal(name, f"is {schema!r:.100}; it must be an object")
    return schema


def ollama_format(fields: Fields) -> dict[str, Any]:
    """Return the options of ollama's `format`, which is "json" or a JSON schema."""
    form = fields.take("format")
    if form is None or form == "":
        return {}
    if form == "json":
        return {"json_schema": _ANY_OBJECT}
    if not isinstance(form, dict):
        raise fields.refusal("format", f"is {form!r:.100}; it must be 'json' or a JSON schema")
    return {"json_schema": form}


def with_close(fields: Fields, structured: dict[str, Any]) -> dict[str, Any]:
    """Return options of structured output, and the option json_close where the request has it.

    Raises:
        ApiError: json_close is not a boolean, or there is no structured output that it could complete.
    """
    if not fields.flag(CLOSE):
        return structured
    if not structured:
        raise fields.refusal(CLOSE, "needs a JSON schema or a grammar too (response_format, format)")
    return structured | {CLOSE: True}


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
    tools: list[dict[str, Any]] = []
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
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def choose_tools(
    fields: Fields, engine: Engine, tools: Tools, choice: Any, structured: dict[str, Any]
) -> tuple[Tools, dict[str, Any], bool]:
    """Return the tools that the model is told, the options of structured output, and whether calls are to be bound.

    Args:
        fields: The fields of the request, for the names in errors.
        tools: The definitions.
        choice: "none", "auto", "required", a choice of one tool or of allowed tools in OpenAI's forms, or None.
        structured: The options of structured output, which bind an answer without calls; where a call must come, they
            have nothing to bind.

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
    if not tools and choice not in (None, "none", "auto"):
        raise fields.refusal("tool_choice", "needs tools too")
    if not tools or choice == "none":
        return (), structured, False
    if engine.template is None or "tools" not in engine.template.source:
        raise fields.refusal("tools", "are not supported by the model's chat template; leave them out")
    if choice not in (None, "auto"):
        return tools, {"json_schema": tool_call_schema(_chosen(fields, choice, tools))}, False
    return tools, structured, not structured.keys() - {"json_schema"}


def _chosen(fields: Fields, choice: Any, tools: Tools) -> Tools:
    """Return the tools of which the model must call one."""
    if choice == "required":
        return tools
    names = _names([choice]) if isinstance(choice, dict) and choice.get("type") == "function" else []
    chosen = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if not chosen:
        raise fields.refusal("tool_choice", f"is {choice!r:.100}; it must be none, auto, required, or name a tool")
    return chosen


def _names(choices: Any) -> list[Any]:
    """Return the names of functions that a list says as {"name": ...} or {"function": {"name": ...}}."""
    objects = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    inner = [each.get("function", each) for each in objects]
    return [each.get("name") for each in inner if isinstance(each, dict)]


_EFFORT = "reasoning_effort"
_NO_THINKING = ("none", "minimal")
_TOKENS = {"low": 512, "medium": 2048}  # of thoughts, by effort, where the template knows no efforts
BUDGET = "thinking_budget"
"""The variable that says how many tokens of thoughts there may be; few templates have it (Seed-OSS)."""
_OF_RENDERING = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "cancel", "self")
)


def thinks(engine: Engine) -> bool:
    """Return whether a chat's text may begin with what the model thinks."""
    return engine.template is not None and may_think(engine.template.source)


def budget(fields: Fields, name: str, engine: Engine) -> dict[str, int]:
    """Return the variable for the tokens of thoughts that the field `name` allows; -1 allows any number.

    Where the model does not think, the field is ignored by name.
    """
    tokens = fields.whole(name, low=0, none=-1)
    if tokens is None or thinks(engine):
        return {} if tokens is None else {BUDGET: tokens}
    fields.note_ignored(name)
    return {}


def read_thinking(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of a request; what the template has no variable for is ignored by name.

    They stand in `reasoning_effort`, `reasoning` (with `effort`, `enabled` and `max_tokens`), `enable_thinking`,
    `thinking_token_budget` and `chat_template_kwargs`, as vLLM has them, and llama-server's `thinking_budget_tokens`.

    Raises:
        ApiError: A field is malformed, or `chat_template_kwargs` names what the server itself gives the template.
    """
    reasoning, arguments = fields.object("reasoning"), fields.object("chat_template_kwargs")
    variables = effort_variables(fields, _EFFORT, engine, fields.text(_EFFORT))
    variables |= effort_variables(reasoning, "effort", engine, reasoning.text("effort"))
    for each, name in ((reasoning, "enabled"), (fields, "enable_thinking")):
        variables |= switch(each, name, engine, each.optional_flag(name))
    for each, name in (
        (reasoning, "max_tokens"),
        (fields, "thinking_token_budget"),
        (fields, "thinking_budget_tokens"),
    ):
        variables |= budget(each, name, engine)
    reasoning.end()
    for name, value in arguments.rest().items():
        if name in _OF_RENDERING or not name.isidentifier():
            raise arguments.refusal(
                name[:100], "can't be set; it must be a variable that the chat template has of its own"
            )
        is_budget = name == BUDGET and isinstance(value, int) and thinks(engine)
        if is_budget or engine.template is None or name in engine.template.variables:
            variables[name] = value
        else:
            arguments.note_ignored(name)
    return variables


def switch(fields: Fields, name: str, engine: Engine, think: bool | None) -> dict[str, bool]:
    """Return the variables that make the model think, or not, as the field `name` says; none for None.

    Where the template can't do this, the field is ignored by name.
    """
    if think is None or engine.template is None:
        return {}
    try:
        return thinking_variables(engine.template, think)
    except RequestError:
        fields.note_ignored(name)
        return {}


def effort_variables(fields: Fields, name: str, engine: Engine, effort: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort that stood in the field `name`.

    A template with a variable of that name gets the value. Else "none" and "minimal" switch thinking off, and other
    values switch it on, where the template can do that, and "low" and "medium" limit it. Where nothing of that can be
    done, the field is ignored by name.
    """
    if not effort:
        return {}
    if engine.template is not None:
        if _EFFORT in engine.template.variables:
            return {_EFFORT: effort}
        with suppress(RequestError):
            variables = thinking_variables(engine.template, effort not in _NO_THINKING)
            if variables or (thinks(engine) and effort in _TOKENS):
                return variables | ({BUDGET: _TOKENS[effort]} if effort in _TOKENS else {})
    fields.note_ignored(name)
    return {}


def read_think(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of ollama's `think`: true, false, or an effort such as "high".

    Raises:
        ApiError: The field is something else.
    """
    think = fields.take("think")
    if isinstance(think, str):
        return effort_variables(fields, "think", engine, think)
    if not isinstance(think, bool | None):
        raise fields.refusal("think", f"is {think!r:.40}; it must be true, false, or an effort such as 'low'")
    return dict(switch(fields, "think", engine, think))
