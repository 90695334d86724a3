"""Structured output: what `response_format` and ollama's `format` ask for, as options of Engine.stream."""

from typing import Any

from edgedec.grammar import Grammar
from edgedec_apps.server.fields import Fields

CLOSE = "json_close"
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
        options["grammar"] = Grammar.regex(_text(given, "pattern"))
    elif kind == "lark":
        options["grammar"] = Grammar.lark(_text(given, "grammar"))
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


def close_option(fields: Fields, structured: dict[str, Any]) -> dict[str, Any]:
    """Return the option that `json_close` stands for: the text is made whole in time; `structured` is what it keeps to.

    Raises:
        ApiError: It is no boolean, or the text keeps to nothing.
    """
    if not fields.flag(CLOSE):
        return {}
    if not structured:
        raise fields.refusal(CLOSE, "needs a JSON schema or a grammar beside it (response_format, format)")
    return {CLOSE: True}


def _text(fields: Fields, name: str) -> str:
    """Return a string that must be there."""
    text = fields.text(name)
    if text is None:
        raise fields.refusal(name, "is missing; give it")
    return text
