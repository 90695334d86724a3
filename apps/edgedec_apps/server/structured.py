"""Structured output: `response_format` and ollama's `format`, as options of Engine.stream."""

from typing import Any

from edgedec.grammar import Grammar
from edgedec_apps.server.fields import Fields

CLOSE = "json_close"
_ANY_OBJECT = {"type": "object"}


def structured_options(fields: Fields) -> dict[str, Any]:
    """Return the options of a request's `response_format`.

    Its types are OpenAI's text, json_object and json_schema, and {"type": "regex", "pattern": ...} and
    {"type": "lark", "grammar": ...}.

    Raises:
        RequestError: The field is malformed.
    """
    given = fields.object("response_format")
    kind = given.text("type")
    options: dict[str, Any] = {}
    if kind == "json_object":
        options["json_schema"] = _ANY_OBJECT
    elif kind == "json_schema":
        options["json_schema"] = read_schema(given.object("json_schema"))
    elif kind == "regex":
        options["grammar"] = Grammar.regex(_text(given, "pattern"))
    elif kind == "lark":
        options["grammar"] = Grammar.lark(_text(given, "grammar"))
    elif kind not in (None, "text"):
        raise given.refusal("type", f"is {kind!r:.40}; it must be text, json_object, json_schema, regex or lark")
    given.end()
    return options


def read_schema(fields: Fields) -> dict[str, Any]:
    """Return the JSON schema of an object with `schema`, and maybe `name`, `description` and `strict`."""
    schema = fields.required("schema")
    if not isinstance(schema, dict):
        raise fields.refusal("schema", f"is {schema!r:.100}; it must be an object")
    fields.skip("name", "description", "strict")
    fields.end()
    return schema


def text_format(fields: Fields) -> dict[str, Any]:
    """Return the options of `format` in the field `text` of /v1/responses; all its fields stand side by side."""
    kind = fields.text("type")
    if kind == "json_schema":
        return {"json_schema": read_schema(fields)}
    if kind not in (None, "text", "json_object"):
        raise fields.refusal("type", f"is {kind!r:.40}; it must be text, json_object or json_schema")
    fields.end()
    return {"json_schema": _ANY_OBJECT} if kind == "json_object" else {}


def ollama_format(fields: Fields) -> dict[str, Any]:
    """Return the options of ollama's `format`, which is "json" or a JSON schema."""
    given = fields.take("format")
    if given is None or given == "":
        return {}
    if given == "json":
        return {"json_schema": _ANY_OBJECT}
    if not isinstance(given, dict):
        raise fields.refusal("format", f"is {given!r:.100}; it must be 'json' or a JSON schema")
    return {"json_schema": given}


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


def _text(fields: Fields, name: str) -> str:
    """Return a string field that must be there."""
    text = fields.text(name)
    if text is None:
        raise fields.refusal(name, "is missing; give it")
    return text
