"""Structured output: what `response_format` and ollama's `format` ask for, as options of Engine.stream."""

from typing import Any

from edgedec.grammar import Grammar
from edgedec_apps.server.fields import Fields

_ANY_OBJECT = {"type": "object"}


def structured_options(fields: Fields) -> dict[str, Any]:
    """Return the options that `response_format` stands for.

    OpenAI's types are text, json_object and json_schema; besides, {"type": "regex", "pattern": ...} and
    {"type": "lark", "grammar": ...}.

    Raises:
        RequestError: It is malformed.
    """
    given = fields.object("response_format")
    kind = given.text("type")
    options: dict[str, Any] = {}
    if kind == "json_object":
        options["json_schema"] = _ANY_OBJECT
    elif kind == "json_schema":
        inner = given.object("json_schema")
        schema = inner.required("schema")
        if not isinstance(schema, dict):
            raise inner.refusal("schema", f"is {schema!r:.100}; it must be an object")
        inner.skip("name", "description", "strict")
        inner.end()
        options["json_schema"] = schema
    elif kind == "regex":
        options["grammar"] = Grammar.regex(str(given.required("pattern")))
    elif kind == "lark":
        options["grammar"] = Grammar.lark(str(given.required("grammar")))
    elif kind not in (None, "text"):
        raise given.refusal("type", f"is {kind!r:.40}; it must be text, json_object, json_schema, regex or lark")
    given.end()
    return options


def ollama_format(fields: Fields) -> dict[str, Any]:
    """Return the options that ollama's `format` stands for: "json", or a JSON schema."""
    given = fields.take("format")
    if given is None or given == "":
        return {}
    if given == "json":
        return {"json_schema": _ANY_OBJECT}
    if not isinstance(given, dict):
        raise fields.refusal("format", f"is {given!r:.100}; it must be 'json' or a JSON schema")
    return {"json_schema": given}
