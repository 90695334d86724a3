"""The grammar of answers that may call tools: free text until a call begins, then the call of a tool, always valid.

A call is written as the model's chat template writes it (edgedec_apps.call_forms), and its arguments are JSON of the
tool's schema. Grammar.tagged leaves everything else free.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import NO_ARGUMENTS, arguments_schema
from edgedec.errors import RequestError
from edgedec.exact_json import dumps
from edgedec.grammar import Grammar, JsonSchema
from edgedec.tokenizer import Tokenizer
from edgedec_apps.call_bodies import types_of
from edgedec_apps.call_forms import CallForm
from edgedec_apps.reply_marks import call_form
from edgedec_runtimes.grammar.compiler import json_in_lark
from edgedec_runtimes.grammar.keywords import is_well_formed
from edgedec_runtimes.grammar.references import moved

_GAP = r"/[ \n]{0,20}/"
_BINDS = r"\s*(?:```(?:json)?\s*)?\{{1,2}\s*\"name\":\s*\"(?:%s)\""  # an object that names a tool

_Function = tuple[str, Mapping[str, Any]]  # a tool's name, and the JSON schema of its arguments
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_ANY_NAME = r"/[^<>\s\"]+/"


def may_bind(options: Mapping[str, Any]) -> bool:
    """Return whether calls can be bound beside a text's options: not where they say how it ends, or have a grammar."""
    says_end = any(options.get(name) for name in ("grammar", "ignore_end", "stop_unsure"))
    return not says_end and "min_tokens" not in (options.get("methods") or {})


def bound_calls(engine: Engine, tools: Sequence[Mapping[str, Any]], answer: JsonSchema | None = None) -> Grammar | None:
    """Return the grammar of a model's answers that may call some tools.

    A call is bound behind the model's mark, where its form is one of edgedec_apps.call_forms, and where an answer
    begins with an object that names a tool, as many models write calls. A schema that can't be compiled binds its
    tool's arguments as that of any object; `uniqueItems` binds nothing, nor does the length of a text beside JSON.

    Args:
        tools: The tools, in OpenAI's form.
        answer: The JSON schema of an answer without calls; None for free text around calls.

    Returns:
        The grammar; None where the memory for grammars has no room for it, and for answers of a schema where the model
        has no mark for calls.
    """
    form = None if engine.template is None else call_form(engine.template.source, engine.tokenizer)
    schemas = [(tool["function"]["name"], arguments_schema(tool["function"])) for tool in tools]
    sound = [(name, schema if is_well_formed(schema) else _ANY_OBJECT) for name, schema in schemas]
    objects = [(name, _ANY_OBJECT) for name, _ in schemas]
    if answer is not None and form is None:
        return None
    for each in (sound, objects):
        with suppress(RequestError):
            grammar = _of_functions(form, each, engine.tokenizer, answer)
            engine.requests.require_grammar(grammar)
            return grammar
    return None


def _of_functions(
    form: CallForm | None, functions: Sequence[_Function], tokenizer: Tokenizer, answer: JsonSchema | None
) -> Grammar:
    """Return the grammar of answers that may call some functions (RequestError where it is too large)."""
    if form is not None and answer is not None:
        said = json_in_lark(Grammar.json_schema(answer).source, exactly=True)
        rules = _marked(form, functions, tokenizer) | {"answer": said}
        return _lark(rules, f"{_literal(form.opens, tokenizer)} body | answer")
    bodies = {} if form is None else {form.opens: _lark(_marked(form, functions, tokenizer), "body")}
    names = "|".join(re.escape(_said(name)) for name, _ in functions)
    return Grammar.tagged(bodies, start=_plain(functions, tokenizer), binds=_BINDS % names)


def _marked(form: CallForm, functions: Sequence[_Function], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the rules of what stands behind the mark of a call, in the rule "body"."""
    texts = {f"text_{i}": text for i, text in enumerate((form.before_arguments, form.closes, form.again, form.ends))}
    head = form.before_name.lstrip()
    space = form.before_name[: len(form.before_name) - len(head)]
    rules = {name: _literal(text, tokenizer) for name, text in texts.items() if text}
    before, closes, again, ends = (name if name in rules else "" for name in texts)
    for i, (function, schema) in enumerate(functions):
        if form.keyed:
            rules |= _keyed(form.keyed, schema, f"arguments_{i}")
        else:
            rules[f"arguments_{i}"] = json_in_lark(dumps(schema))
        called = _said(function) if form.before_name.endswith('"') else function
        rules[f"call_{i}"] = f"{_literal(called, tokenizer)} {before} arguments_{i} {closes}"
    rules["call"] = " | ".join(f"call_{i}" for i in range(len(functions)))
    more = f"({again} call)* {ends}" if ends else ""
    # A token may hold the white space together with the mark before it.
    rules["body"] = f"{dumps(space) + '?' if space else ''} {_literal(head, tokenizer)} call {more}"
    return rules


def _keyed(around: tuple[str, str, str], schema: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the rules of keys and values in the order of a schema, in the rule `name`; texts have any length."""
    before, between, behind = around
    end = "".join("\\n" if each == "\n" else re.escape(each).replace("/", r"\/") for each in behind)
    rest = rf"/(.|\n)*{end}/"
    rules, parts = {name: '""'}, list[str]()
    if not schema.get("properties") and schema != NO_ARGUMENTS:
        some = f"({dumps(before)} {_ANY_NAME} {dumps(between)} {name}_text)*"
        return {name: some, f"{name}_text[lazy]": rest}
    for i, (key, part) in enumerate((schema.get("properties") or {}).items()):
        value = f"{name}_{i}"
        texts = part.get("enum", [part.get("const")]) if isinstance(part, dict) else []
        if texts and all(isinstance(text, str) for text in texts):
            rules[value] = " | ".join(dumps(text + behind, ensure_ascii=False) for text in texts)
        elif (said := _json_of(schema, key)) is not None:
            rules[value] = f"{said} {dumps(behind)}"
        else:
            rules[f"{value}[lazy]"] = rest
        whole = f"{dumps(before + key + between, ensure_ascii=False)} {value}"
        parts.append(whole if key in schema.get("required", ()) else f"({whole})?")
    return rules | ({name: " ".join(parts)} if parts else {})


def _json_of(schema: Mapping[str, Any], key: str) -> str | None:
    """Return the JSON of a property as an expression of Lark; None where it may be a text, or can't be compiled."""
    types = types_of(schema, key)
    with suppress(RequestError):
        if types and "string" not in types:
            return json_in_lark(_standing_alone(schema, key), exactly=True)
    return None


def _standing_alone(schema: Mapping[str, Any], key: str) -> str:
    """Return the JSON schema of a property of a schema, with what it refers to, as JSON."""
    part = dumps(schema["properties"][key])
    if '"$ref"' not in part:
        return part
    place = key.replace("~", "~0").replace("/", "~1")
    return dumps({"$ref": f"#/$defs/all/properties/{place}", "$defs": {"all": moved(schema, "/$defs/all")}})


def _said(name: str) -> str:
    """Return a name as it stands within quotes in JSON."""
    return dumps(name, ensure_ascii=False)[1:-1]


def _plain(functions: Sequence[_Function], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of an answer that is an object that calls a function, or several, or one in a fence."""
    rules = {"gap": _GAP, "key": r'"\"arguments\":" | "\"parameters\":"'}
    for i, (function, schema) in enumerate(functions):
        rules[f"arguments_{i}"] = json_in_lark(dumps(schema), flexible=True)
        quoted = dumps(_said(function) + '"', ensure_ascii=False)
        rules[f"call_{i}"] = f'{quoted} "," gap key gap arguments_{i}'
    calls = " | ".join(f"call_{i}" for i in range(len(functions)))
    rules["object"] = 'once | "{" once "}"'  # doubled braces: see json_values
    rules["once"] = rf'"{{" gap "\"name\":" gap "\"" ({calls}) gap "}}"'
    fenced = r'"```" "json"? /[ \n]{1,20}/ object "\n```"'
    return _lark(rules, f"({_literal('<|python_tag|>', tokenizer)})? object (/ *; */ object)* | {fenced}")


def _lark(rules: Mapping[str, str], start: str) -> Grammar:
    """Return a grammar of some rules, with the rule of a whole text."""
    return Grammar.lark("\n".join(f"{name}: {rule}" for name, rule in (*rules.items(), ("start", start))))


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as an expression of Lark: control tokens stand as their ids, without those that end a text."""
    controls = sorted({each for each in tokenizer.control_texts if each and each in text}, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, controls))})", text) if controls else [text]
    ids = {each: tokenizer.encode(each, add_special=False, parse_special=True)[0] for each in controls}
    said = (f"<[{ids[part]}]>" if part in ids else dumps(part, ensure_ascii=False) for part in parts)
    return " ".join(
        each for part, each in zip(parts, said, strict=True) if part and not tokenizer.is_end(ids.get(part, -1))
    )
