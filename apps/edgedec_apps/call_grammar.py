"""The grammar of answers that may call tools: free text until a call begins, then the call of a tool, always valid.

A call is written as the model's chat template writes it (edgedec_apps.call_forms), and its arguments are JSON of the
tool's schema. Grammar.tagged leaves everything else free.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import arguments_schema
from edgedec.exact_json import dumps
from edgedec.grammar import Grammar, JsonSchema
from edgedec.tokenizer import Tokenizer
from edgedec_apps.call_forms import CallForm
from edgedec_apps.reply_marks import call_form
from edgedec_runtimes.grammar.compiler import json_in_lark

_LEADS = ("", "```json\n", "```\n", "<|python_tag|>")  # before the object that an answer may be
_OPENS = ('{"name": "', '{\n  "name": "', '{\n    "name": "')
_GAP = r"/[ \n]{0,20}/"


def bound_calls(engine: Engine, tools: Sequence[Mapping[str, Any]], answer: JsonSchema | None = None) -> Grammar | None:
    """Return the grammar of a model's answers that may call some tools.

    A call is bound behind the model's mark, where its arguments are JSON, and where an answer begins with an object
    that names a tool, as many models write calls. A schema that can't be compiled binds its tool's arguments as that of
    any object; `uniqueItems` binds nothing.

    Args:
        engine: The model.
        tools: The tools, in OpenAI's form.
        answer: The JSON schema of an answer without calls; None for free text around calls.

    Returns:
        The grammar; None for answers of a schema where the model has no mark for calls.
    """
    form = None if engine.template is None else call_form(engine.template.source, engine.tokenizer)
    functions = [tool["function"] for tool in tools]
    if answer is not None:
        if form is None:
            return None
        rules = _marked(form, functions, engine.tokenizer)
        rules |= {"answer": json_in_lark(Grammar.json_schema(answer).source)}
        return _lark(rules, f"{_literal(form.opens, engine.tokenizer)} body | answer")
    bodies = {} if form is None else {form.opens: _lark(_marked(form, functions, engine.tokenizer), "body")}
    plain = {function["name"]: _lark(_plain(function["name"], functions), "call") for function in functions}
    starts = {f"{lead}{opens}{name}": body for lead in _LEADS for opens in _OPENS for name, body in plain.items()}
    return Grammar.tagged(bodies, at_start=starts)


def _marked(form: CallForm, functions: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the rules of what stands behind the mark of a call, in the rule "body"."""
    texts = {f"text_{i}": text for i, text in enumerate((form.before_arguments, form.closes, form.again, form.ends))}
    head = form.before_name.lstrip()
    space = form.before_name[: len(form.before_name) - len(head)]
    rules = {name: _literal(text, tokenizer) for name, text in texts.items() if text}
    before, closes, again, ends = (name if name in rules else "" for name in texts)
    for i, function in enumerate(functions):
        rules[f"arguments_{i}"] = json_in_lark(dumps(arguments_schema(function)))
        rules[f"call_{i}"] = f"{_literal(function['name'], tokenizer)} {before} arguments_{i} {closes}"
    rules["call"] = " | ".join(f"call_{i}" for i in range(len(functions)))
    more = f"({again} call)* {ends}" if ends else ""
    # A token may hold the white space together with the mark before it.
    rules["body"] = f"{dumps(space) + '?' if space else ''} {_literal(head, tokenizer)} call {more}"
    return rules


def _plain(begun: str, functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the rules of an object that calls a tool whose name begins so, from behind that beginning of the name."""
    rules = {"gap": _GAP}
    for i, function in enumerate(functions):
        if function["name"].startswith(begun):
            rest = dumps(function["name"][len(begun) :] + '",', ensure_ascii=False)
            rules[f"arguments_{i}"] = json_in_lark(dumps(arguments_schema(function)), flexible=True)
            rules[f"call_{i}"] = f'{rest} gap ("\\"arguments\\":" | "\\"parameters\\":") gap arguments_{i} gap "}}"'
    return rules | {"call": " | ".join(name for name in rules if name.startswith("call_"))}


def _lark(rules: Mapping[str, str], start: str) -> Grammar:
    """Return a grammar of some rules, with the rule of a whole text."""
    return Grammar.lark("\n".join(f"{name}: {rule}" for name, rule in (*rules.items(), ("start", start))))


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as an expression of Lark, in which control tokens are named by their ids."""
    controls = sorted({each for each in tokenizer.control_texts if each and each in text}, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, controls))})", text) if controls else [text]
    ids = {each: tokenizer.encode(each, add_special=False, parse_special=True)[0] for each in controls}
    return " ".join(f"<[{ids[part]}]>" if part in ids else dumps(part, ensure_ascii=False) for part in parts if part)
