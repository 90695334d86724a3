"""Schemas that bind what stands behind thoughts, and the arguments of calls: python after_thoughts.py MODEL --json F.

Each of the made schemas is asked for twice, without drafts and with them: as the answer behind thoughts of at most 24
tokens, and as the arguments of a call that the model is free not to make, behind a mark that begins its answer. Counted
are whole texts, those that jsonschema finds valid, and texts that drafts changed.
"""

import argparse
import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import edgedec
from edgedec_apps.bench.provenance import report
from edgedec_apps.call_grammar import bound_calls
from edgedec_apps.replies import split_reply

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
_KEYS = ("name", "city", "count", "tags", "done", "price", "kind", "id")
_MOST_TOKENS = 200


def made_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose texts are short: numbers, texts, lists, enumerations and objects within objects."""
    kinds = ["integer", "boolean", "string", "pattern", "enum", "null", *(["object", "array", "any"] if depth else [])]
    kind = random.choice(kinds)
    if kind == "object":
        names = random.sample(_KEYS, random.randint(1, 3))
        parts = {name: made_schema(random, depth - 1) for name in names}
        needed = random.sample(names, random.randint(0, len(names)))
        return {"type": "object", "properties": parts, "required": needed, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": made_schema(random, depth - 1), "minItems": 1, "maxItems": 3}
    if kind == "any":
        return {"anyOf": [made_schema(random, 0), made_schema(random, depth - 1)]}
    low = random.randint(-9, 99)
    plain: dict[str, dict[str, Any]] = {
        "integer": {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 999)},
        "string": {"type": "string", "minLength": 1, "maxLength": random.randint(1, 12)},
        "pattern": {
            "type": "string",
            "pattern": random.choice(["^[a-z]{2,6}$", "^[0-9]{4}-[0-9]{2}$", "^#[0-9a-f]{6}$"]),
        },
        "enum": {"enum": random.sample(["red", "green", 7, 2.5, None, True, "π"], 3)},
    }
    return plain.get(kind, {"type": kind})


def asked(engine: edgedec.Engine, schema: dict[str, Any], seed: int) -> tuple[dict[str, edgedec.Generation], list[str]]:
    """Return the texts of both ways, and the JSON in each."""
    question = f"Give an example of data that keeps to this schema: {json.dumps(schema)}"
    options: dict[str, Any] = {"max_tokens": _MOST_TOKENS, "temperature": 0.7, "seed": seed}
    thought = engine.chat(question, json_schema=schema, think=24, json_close=True, **options)
    arguments = {"type": "object", "properties": {"data": schema}, "required": ["data"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "save", "description": "Saves data", "parameters": arguments}}]
    prompt = engine.chat_ids([{"role": "user", "content": question}], tools=tools)
    mark = engine.tokenizer.encode("<tool_call>", add_special=False, parse_special=True)
    call = engine.generate(prompt, resume=mark, grammar=bound_calls(engine, tools), **options)
    calls = split_reply(call.text, tools={"save": arguments}).calls
    texts = [
        thought.text.rpartition("</think>")[2],
        json.dumps(json.loads(calls[0].arguments)["data"]) if calls else "",
    ]
    return {"thoughts": thought, "call": call}, texts


def main() -> None:
    """Ask for each schema, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    jsonschema = import_module("jsonschema")  # has no types
    counts = {way: Counter[str]() for way in ("thoughts", "call")}
    engines = [
        edgedec.load(arguments.model, n_ctx=1024, chat_template=TEMPLATE, draft=draft, offline=True)
        for draft in ("off", "auto")
    ]
    for seed in range(arguments.schemas):
        schema = made_schema(Random(seed))
        (plain, texts), (drafted, _) = (asked(engine, schema, seed) for engine in engines)
        for (way, count), text in zip(counts.items(), texts, strict=True):
            count["texts"] += 1
            count["drafts changed"] += plain[way].token_ids != drafted[way].token_ids
            count["accepted drafts"] += drafted[way].stats.n_accepted_tokens
            if plain[way].finish_reason == "length" and not plain[way].is_whole:
                count["cut"] += 1
            else:
                count["valid"] += jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    report({"benchmark": "after_thoughts", "model": arguments.model, "counts": counts}, arguments.json)


if __name__ == "__main__":
    main()
