"""Answer under each of many JSON schemas: which are taken, what answers are worth, and what it costs.

    python benchmarks/json_schemas.py FILE_OR_FOLDER --model qwen2.5-coder-0.5b --first 200

A file holds one schema, a list of them, or one a line; a folder holds such files, read in the order of their names. An
object with the key "json_schema" or "schema" is taken for a record around a schema (JSONSchemaBench, Geng et al. 2025,
arXiv:2501.10868, has the first). Each schema is compiled and answered, with drafts and without (the texts should be
equal); the answer is parsed and, where the package jsonschema is installed, validated. Beside it the same prompt is
continued for as many tokens without a schema. Ends with one line of JSON.
"""

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import edgedec
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.sequence import Generation

_ASKED = "Write one JSON value that is valid under this JSON schema, and nothing else:\n"
_SHOWN = 2000  # characters of a schema that the prompt shows


@dataclass(frozen=True)
class Answer:
    """What one schema led to.

    Attributes:
        compile_s: Seconds from the schema to the first place in its grammar.
        state: "valid", "invalid" (under jsonschema), "parsed" (without it), "cut" by max_tokens, "broken" (no JSON) or
            "stuck" (the grammar came to no end).
        n_tokens: Tokens of the answer.
        with_s, plain_s, free_s: Seconds a token after the first, with drafts, without, and without a schema.
        n_forced: Forced tokens that were drafted.
        equal: Whether the texts with drafts and without are equal.
    """

    compile_s: float
    state: str
    n_tokens: int = 0
    with_s: float = 0.0
    plain_s: float = 0.0
    free_s: float = 0.0
    n_forced: int = 0
    equal: bool = True


def schemas(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the schemas of a file or folder; what is no object is left out."""
    for file in sorted(path.rglob("*.json*")) if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        for value in found if isinstance(found, list) else [found]:
            inner = value.get("json_schema", value.get("schema", value)) if isinstance(value, dict) else value
            inner = json.loads(inner) if isinstance(inner, str) else inner
            if isinstance(inner, dict):
                yield inner


def answer(engine: edgedec.Engine, schema: dict[str, Any], max_tokens: int, validate: Any) -> Answer | str:
    """Answer under one schema; a schema that is not taken is its reason."""
    prompt = _ASKED + json.dumps(schema)[:_SHOWN]
    ids = engine.chat_ids([{"role": "user", "content": prompt}]) if engine.can_chat else engine.tokenizer.encode(prompt)
    started = perf_counter()
    try:
        grammar = Grammar.json_schema(schema)
        engine.stream(ids, grammar=grammar).close()  # compiles it
    except RequestError as error:
        return str(error)
    compile_s = perf_counter() - started
    options: dict[str, Any] = {"grammar": grammar, "temperature": 0.0, "max_tokens": max_tokens, "reuse": "longest"}
    try:
        drafted = engine.generate(ids, **options)
        plain = engine.generate(ids, draft=False, **options)
    except RequestError:
        return Answer(compile_s, "stuck")
    n = len(drafted.token_ids)
    free = engine.generate(ids, draft=False, temperature=0.0, max_tokens=max(2, n), ignore_end=True, reuse="longest")
    return Answer(
        compile_s,
        _state(drafted, schema, validate),
        n,
        _token_s(drafted),
        _token_s(plain),
        _token_s(free),
        int(drafted.stats.drafters.get("forced", {}).get("right", 0)),
        drafted.token_ids == plain.token_ids,
    )


def _token_s(generation: Generation) -> float:
    speed = generation.stats.tokens_per_s
    return 1 / speed if speed else 0.0


def _state(generation: Generation, schema: dict[str, Any], validate: Any) -> str:
    if generation.finish_reason != "stop":
        return "cut"
    try:
        value = json.loads(generation.text)
    except ValueError:
        return "broken"
    if validate is None:
        return "parsed"
    try:
        validate(value, schema)
    except Exception:  # a schema that jsonschema refuses, too
        return "invalid"
    return "valid"


def _validator() -> Any:
    try:
        return importlib.import_module("jsonschema").validate
    except ImportError:
        return None


def main() -> None:
    """Answer, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    validate = _validator()
    taken: list[Answer] = []
    refused: Counter[str] = Counter()
    with edgedec.load(args.model, runtime=args.runtime) as engine:
        started = perf_counter()
        engine.stream("x", json_schema={}).close()
        vocabulary_s = perf_counter() - started
        for number, schema in enumerate(schemas(args.path)):
            if number == args.first:
                break
            found = answer(engine, schema, args.max_tokens, validate)
            if isinstance(found, str):
                refused[found[:100]] += 1
                print(f"{number:5} refused: {found[:100]}")
            else:
                taken.append(found)
                print(f"{number:5} {found.state}, {found.n_tokens} tokens, {found.n_forced} forced and drafted")
    timed = [found for found in taken if found.n_tokens >= 8 and found.with_s and found.plain_s and found.free_s]
    figures = {
        "n_schemas": len(taken) + sum(refused.values()),
        "n_taken": len(taken),
        "states": Counter(found.state for found in taken),
        "n_unequal": sum(not found.equal for found in taken),
        "vocabulary_s": round(vocabulary_s, 3),
        "compile_s": round(median(found.compile_s for found in taken), 4) if taken else None,
        "most_compile_s": round(max((found.compile_s for found in taken), default=0.0), 3),
        "forced": round(sum(f.n_forced for f in taken) / max(1, sum(f.n_tokens for f in taken)), 3),
        "mask_cost": round(median(f.plain_s / f.free_s for f in timed), 3) if timed else None,
        "speedup": round(median(f.plain_s / f.with_s for f in timed), 3) if timed else None,
        "against_free": round(median(f.free_s / f.with_s for f in timed), 3) if timed else None,
        "refused": dict(refused.most_common(10)),
    }
    for name, value in figures.items():
        print(f"{name:16} {value}")
    print(json.dumps({"model": args.model} | figures))


if __name__ == "__main__":
    main()
