"""What stands between the marks of a tool call, in the forms of several families of models, as calls.

Each reader takes the head and the body of a call, and the tools by name; it returns the calls, or an empty list for a
body that is no call. No reader raises an error for any text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from secrets import token_hex
from typing import Any, NoReturn

from edgedec.chat import arguments_schema
from edgedec.exact_json import dumps, exact_float
from edgedec_runtimes.grammar.references import combined, moved, property_parts, target

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: The tool's.
        arguments: A JSON object, as text.
        id: By which the tool's answer will name it; no part of a comparison.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}", compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return an entry of OpenAI's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates have it, with the arguments as an object."""
        function = {"name": self.name, "arguments": json.loads(self.arguments, parse_float=exact_float)}
        return {"type": "function", "id": self.id, "function": function}


_BodyReader = Callable[[str, str, Tools], Iterable[ToolCall | None]]
_Reader = Callable[[str, str, Tools], list[ToolCall]]


class _NoCallError(ValueError):
    """A body is not of the form that its reader reads."""


def _whole(read: _BodyReader) -> _Reader:
    """Return a reader that returns the calls of a body where all of it is of the form, else an empty list."""

    @wraps(read)
    def run(head: str, body: str, tools: Tools) -> list[ToolCall]:
        try:
            calls = list(read(head, body, tools))
        except (ValueError, RecursionError):
            return []
        read_calls = [call for call in calls if call is not None]
        return read_calls if len(read_calls) == len(calls) else []

    return run


@_whole
def read_tagged(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the calls of an object or an array in JSON, or of XML with `<function=NAME>` and `<parameter=NAME>`.

    MiniMax writes `<invoke name="NAME">` and `<parameter name="NAME">`.
    """
    if body.lstrip().startswith("<"):
        return _of_xml(body, tools)
    values = json_values(body)
    return _of_values(values) if len(values) == 1 else ()


@_whole
def read_arg_keys(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the call of a name and `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` in turns (GLM)."""
    begin = re.match(r"\s*([^\s<>{\[]+)\s*(?=<arg_key>|\Z)", body)
    if begin is None:
        return read_tagged(head, body, tools)
    arguments, at = {}, begin.end()
    while (pair := _ARG_PAIR.match(body, at)) is not None:
        key, at = pair[1].strip(), pair.end()
        arguments[key] = _typed(pair[2], tools.get(begin[1], {}), key)
    return [_made(begin[1], arguments)] if at == len(body) else ()


def read_named_by(before: str, behind: str, at_end: str = "") -> _Reader:
    """Return a reader of calls whose arguments are JSON, by what stands around them, with the name as group 1."""
    begin, gap, end = re.compile(before), re.compile(behind), re.compile(at_end + r"\s*\Z")

    @_whole
    def read(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
        at = 0
        while (match := begin.match(body, at)) is not None:
            arguments, at = _DECODER.raw_decode(body, match.end())
            yield _made(match[1], arguments)
            at = _matched(gap, body, at).end()
        _matched(end, body, at)

    return read


def either(first: _Reader, second: _Reader) -> _Reader:
    """Return a reader that reads what the first one does, or else the second."""
    return lambda head, body, tools: first(head, body, tools) or second(head, body, tools)


@_whole
def read_function(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the call of XML behind `<function=`, where its tool is known."""
    calls = list(_of_xml(f"<function={body}", tools))
    return [call for call in calls if call is not None and call.name in tools]


@_whole
def read_named_json(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the calls of `NAME[ARGS]{...}` (Ministral 3), of `NAME{...}`, or of an array in JSON (Mistral)."""
    match = re.match(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)", body)
    values = json_values(body if match is None else body[match.end() :])
    if len(values) != 1:
        return ()
    return _of_values(values) if match is None else [_made(match[1], values[0])]


@_whole
def read_channel(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the call of a message to `functions.NAME`, by its head, with arguments in JSON (gpt-oss)."""
    to = re.search(r"\bto=(?:functions\.)?([^\s<]+)", head)
    values = json_values(body)
    if to is None or len(values) > 1 or (body.strip() and not values):
        return ()
    return [_made(to[1], values[0] if values else {})]


@_whole
def read_braces(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the call of `call:NAME{key:value,...}`, its strings in `<|"|>` (Gemma 4) or `<escape>` (FunctionGemma)."""
    body = body if _QUOTE in body else body.replace("<escape>", _QUOTE)
    match = re.match(r"\s*call:\s*([\w.:-]+)\s*(?=\{)", body)
    if match is None:
        return ()
    value, at = _value(body, match.end())
    return [_made(match[1], value)] if not body[at:].strip() else ()


@_whole
def read_python(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the calls of `[name(key="value", ...), ...]` (LFM2), or of JSON."""
    if re.match(r"\s*\[?\s*\{", body):
        values = json_values(body)
        return _of_values(values) if len(values) == 1 else ()
    calls = []
    text = body.strip()
    text = text.removeprefix("[").removesuffix("]") if text.startswith("[") else text
    at = 0
    while (match := _PYTHON_NAME.match(text, at)) is not None:
        arguments, at = _pairs(text, match.end(), ")", _KEYWORD)
        calls.append(_made(match[1], arguments))
        at = _after_comma(text, at, "")
    return calls if at == len(text) else ()


@_whole
def read_code(head: str, body: str, tools: Tools) -> Iterable[ToolCall | None]:
    """Return the calls of Python as read_python does, where all of the tools are known."""
    calls = read_python(head, body, tools)
    return calls if all(call.name in tools for call in calls) else ()


def tool_call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of one call of one of these tools (OpenAI's `tools`), as split_reply reads it.

    With it as json_schema a model calls a tool, whatever its template's convention (`tool_choice: "required"`).
    """
    functions = [tool["function"] for tool in tools]
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": moved(arguments_schema(function), f"/anyOf/{i}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, function in enumerate(functions)
        ]
    }


def json_values(text: str) -> list[Any]:
    """Return the JSON values of a text, with semicolons or white space between; an empty list for any other text.

    An object may have doubled braces, as Qwen2.5's chat template shows calls.
    """
    values, at = [], _matched(_SPACES, text, 0).end()
    while at < len(text):
        doubled = text.startswith("{{", at)
        try:
            value, at = _DECODER.raw_decode(text, at + doubled)
        except (ValueError, RecursionError):
            return []
        if doubled and not text.startswith("}", at):
            return []
        values.append(value)
        at = _matched(_SPACES, text, at + doubled).end()
    return values


def call_of(value: Any, *, needs_arguments: bool) -> ToolCall | None:
    """Return the call of a JSON value; None for another value.

    Args:
        value: An object with a name and arguments or parameters, maybe as the `function` of another object.
        needs_arguments: Whether an object without arguments is none, as many objects have a name.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None or arguments == "":
        needs = needs_arguments and not {"arguments", "parameters"} & value.keys()
        return None if needs else ToolCall(name, "{}")
    if isinstance(arguments, str):  # JSON within JSON
        inner = json_values(arguments)
        return ToolCall(name, arguments) if len(inner) == 1 and isinstance(inner[0], dict) else None
    return _made(name, arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise _NoCallError(f"{name} is no JSON")


# Line breaks in strings are accepted, as models write them there.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=exact_float)
_SPACES = re.compile(r"[; \t\r\n]*")


def _of_values(values: list[Any]) -> list[ToolCall | None]:
    items = values[0] if isinstance(values[0], list) else values
    return [call_of(value, needs_arguments=False) for value in items]


def _made(name: str, arguments: Any) -> ToolCall | None:
    """Return a call, or None for arguments that are no object of JSON."""
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, dumps(arguments, ensure_ascii=False, allow_nan=False))


_FUNCTION = re.compile(r'\s*<(?:function=|invoke name=)"?([^">\n]+)"?>')
_FUNCTION_END = re.compile(r"\s*(?:</(?:function|invoke)>\s*|\Z)")
_PARAMETER = re.compile(
    r'\s*<parameter(?:=| name=)"?([^">\n]+)"?>(?:\r?\n)?(.*?)(?:\r?\n)?(?:</parameter>|\Z)', re.DOTALL
)
_ARG_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>\s*|\Z)", re.DOTALL)


def _of_xml(body: str, tools: Tools) -> Iterable[ToolCall | None]:
    at = 0
    while at < len(body):
        begin = _matched(_FUNCTION, body, at)
        name, at = begin[1].strip(), begin.end()
        arguments = {}
        while (parameter := _PARAMETER.match(body, at)) is not None:
            key, at = parameter[1].strip(), parameter.end()
            arguments[key] = _typed(parameter[2], tools.get(name, {}), key)
        at = _matched(_FUNCTION_END, body, at).end()
        yield _made(name, arguments)


def _typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return a parameter's value of the type that the tool's schema gives it; a text where it gives none."""
    types = types_of(schema, key)
    if "string" in types and not (text.strip() == "null" and "null" in types):
        return text
    lowered = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    values = json_values(lowered) or (_literal(lowered) if types and lowered.lstrip()[:1] in ("{", "[") else [])
    if len(values) != 1:
        return text
    return values[0] if types or isinstance(values[0], dict | list) else text


def _literal(text: str) -> list[Any]:
    """Return, in a list, what a text says as Python does, as Seed-OSS may; an empty list for another text."""
    try:
        value, at = _value(text, 0)
    except (ValueError, RecursionError):
        return []
    return [] if text[at:].strip() else [value]


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return which of "string", "null" and "other" a property's value may be; an empty set where that is not said."""
    parts = [part for node in combined(schema, schema) for part in property_parts(node, key)]
    return _types({"anyOf": parts}, schema, {})


def _types(schema: Any, root: Mapping[str, Any], seen: dict[str, set[str]]) -> set[str]:
    """Return which of "string", "null" and "other" a part of a JSON schema allows; an empty set where it does not say.

    Args:
        schema: The part.
        root: The whole schema, from which references lead.
        seen: The answers for references that were met.
    """
    if not isinstance(schema, Mapping):
        return set()
    names, values, reference = schema.get("type"), schema.get("enum"), schema.get("$ref")
    kinds = [*names] if isinstance(names, list) else [names] if isinstance(names, str) else []
    values = [schema["const"]] if "const" in schema else values if isinstance(values, list) else []
    sets = [{kind if kind in ("string", "null") else "other" for kind in kinds}]
    sets += [{"string" if isinstance(each, str) else "null" if each is None else "other" for each in values}]
    if isinstance(reference, str):
        if reference not in seen:
            seen[reference] = set()
            seen[reference] = _types(target(root, reference), root, seen)
        sets.append(seen[reference])
    for key in ("allOf", "anyOf", "oneOf"):
        cases = schema.get(key)
        types = [_types(case, root, seen) for case in cases] if isinstance(cases, list) else []
        sets += types if key == "allOf" else [set[str]().union(*types)]
    said = [each for each in sets if each]
    return set.intersection(*said) if said else set()


_QUOTE = '<|"|>'
_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.-]*)\s*\(")
_KEY = re.compile(r"\s*([^\s:{}\[\],\"'<]+)\s*:")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
# A quote that no border of a value follows belongs to the text: models forget to escape it.
_STRING = {q: re.compile(rf"{q}((?:[^{q}\\]|\\.|{q}(?!\s*(?:[,)\]}}:]|\Z)))*){q}", re.DOTALL) for q in "\"'"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_BARE = re.compile(r"[^,}\])]*")
_GAP = re.compile(r"\s*")
_CONSTANTS = {"True": True, "False": False, "None": None}


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a place of a text, and where the value ends."""
    at = _skipped(text, at)
    if text.startswith("{", at):
        return _pairs(text, at + 1, "}", _KEY)
    if text.startswith("[", at):
        values: list[Any] = []
        at = _skipped(text, at + 1)
        while not text.startswith("]", at):
            value, at = _value(text, at)
            values.append(value)
            at = _after_comma(text, at, "]")
        return values, at + 1
    if text.startswith((_QUOTE, '"', "'"), at):
        return _quoted(text, at)
    bare = _matched(_BARE, text, at)
    json_value, word = json_values(bare[0]), bare[0].strip()
    if not word:
        raise _NoCallError("no value")
    return json_value[0] if len(json_value) == 1 else _CONSTANTS.get(word, word), bare.end()


def _pairs(text: str, at: int, closing: str, key_form: re.Pattern[str]) -> tuple[dict[str, Any], int]:
    """Return the keys and values up to a bracket, and the place behind the bracket."""
    pairs: dict[str, Any] = {}
    at = _skipped(text, at)
    while not text.startswith(closing, at):
        if key_form is _KEY and text.startswith((_QUOTE, '"', "'"), at):
            key, at = _quoted(text, at)
            at = _skipped(text, at)
            if not text.startswith(":", at):
                raise _NoCallError("a key without a colon")
            at += 1
        else:
            bare = _matched(key_form, text, at)
            key, at = bare[1], bare.end()
        pairs[key], at = _value(text, at)
        at = _after_comma(text, at, closing)
    return pairs, at + 1


def _quoted(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise _NoCallError("a string without an end")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    match = _matched(_STRING[text[at]], text, at)
    return _ESCAPE.sub(_unescaped, match[1]), match.end()


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    return chr(int(escape[1:], 16)) if len(escape) == 5 else _ESCAPED.get(escape, match[0])


def _after_comma(text: str, at: int, closing: str) -> int:
    """Return the place behind a comma, or before a closing bracket; an empty `closing` stands for the end."""
    at = _skipped(text, at)
    if text.startswith(",", at):
        return _skipped(text, at + 1)
    if not (text.startswith(closing, at) if closing else at == len(text)):
        raise _NoCallError("neither a comma nor a bracket")
    return at


def _skipped(text: str, at: int) -> int:
    return _matched(_GAP, text, at).end()


def _matched(form: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    match = form.match(text, at)
    if match is None:
        raise _NoCallError(f"expected {form.pattern}")
    return match
