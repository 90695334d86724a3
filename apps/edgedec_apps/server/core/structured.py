"""Structured output: `response_format` and ollama's `format`, as options of Engine.stream."""

import re
from typing import Any

from edgedec.grammar import Grammar
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
    found = {
        "response_format": _response_format(fields),
        "json_schema": {} if (schema := _schema(fields, "json_schema")) is None else {"json_schema": schema},
        "grammar": {"grammar": Grammar.gbnf(source)} if (source := fields.text("grammar")) else {},
    }
    found |= {name: _guided(fields, name, name.removeprefix("guided_")) for name in _GUIDED}
    inner = fields.object("structured_outputs")
    found |= {f"structured_outputs.{kind}": _guided(inner, kind, kind) for kind in ("json", "regex", "choice")}
    inner.end()
    names = [name for name, options in found.items() if options]
    if len(names) > 1:
        raise fields.refusal(names[1], f"and {names[0]} exclude each other; leave one out")
    return found[names[0]] if names else {}


def _guided(fields: Fields, name: str, kind: str) -> dict[str, Any]:
    """Return the options of a field of vLLM's: a JSON schema as an object or its text, a pattern, or some texts."""
    if kind == "json":
        schema = fields.string(name) or _schema(fields, name)
        return {} if schema is None else {"json_schema": schema}
    choices = fields.texts(name) if kind == "choice" else None
    pattern = "|".join(map(re.escape, choices)) if choices else fields.text(name)
    return {"grammar": Grammar.regex(pattern)} if pattern else {}


def _response_format(fields: Fields) -> dict[str, Any]:
    given = fields.object("response_format")
    kind = given.text("type")
    options: dict[str, Any] = {}
    if kind == "json_object":
        schema = _schema(given, "schema")
        options["json_schema"] = _ANY_OBJECT if schema is None else schema
    elif kind == "json_schema" and "schema" in given.peek("schema"):
        return {"json_schema": read_schema(given)}
    elif kind == "json_schema":
        options["json_schema"] = read_schema(given.object("json_schema"))
    elif kind == "regex":
        options["grammar"] = Grammar.regex(given.required_text("pattern"))
    elif kind == "lark":
        options["grammar"] = Grammar.lark(given.required_text("grammar"))
    elif kind not in (None, "text"):
        raise given.refusal("type", f"is {kind!r:.40}; it must be text, json_object, json_schema, regex or lark")
    given.end()
    return options


def read_schema(fields: Fields) -> dict[str, Any]:
    """Return the JSON schema of an object with `schema`, and maybe `name`, `description` and `strict`."""
    schema = _schema(fields, "schema")
    if schema is None:
        raise fields.refusal("schema", "is missing; give it")
    fields.skip("name", "description", "strict")
    fields.end()
    return schema


def _schema(fields: Fields, name: str) -> dict[str, Any] | None:
    """Return a field that holds a JSON schema; None where it is absent."""
    schema: dict[str, Any] | None = fields.take(name)
    if not isinstance(schema, dict | None):
        raise fields.refusal(name, f"is {schema!r:.100}; it must be an object")
    return schema


def text_format(fields: Fields) -> dict[str, Any]:
    """Return the options of `format` in the field `text` of /v1/responses; all its fields stand side by side."""
    kind = fields.text("type")
    if kind == "json_schema":
        return {"json_schema": read_schema(fields)}
    if kind not in (None, "text", "json_object"):
        raise fields.refusal("type", f"is {kind!r:.40}; it must be text, json_object or json_schema")
    schema = _schema(fields, "schema") if kind == "json_object" else None
    fields.end()
    return {"json_schema": _ANY_OBJECT if schema is None else schema} if kind == "json_object" else {}


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
