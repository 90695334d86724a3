"""Answer under each of many JSON schemas: count the schemas taken and the valid answers, and measure the cost.

    python benchmarks/grammars/json_schemas.py FOLDER --drafted-only --max-tokens 512 --shown 600 \
        --temperature 1 --close-bias 6
    python benchmarks/grammars/json_schemas.py FOLDER --model qwen2.5-coder-0.5b --first 10

A file holds one schema, a list of them, or one a line. From a folder of folders (`data` of the repository
guidance-ai/jsonschemabench, JSONSchemaBench, Geng et al. 2025, arXiv:2501.10868, has ten) the same number of files is
taken from each, evenly spaced in the order of their names. An object that is no schema and has the key "json_schema"
or "schema" counts as a record around one. Each schema is compiled and answered, with drafts and without (the texts
should be equal); the answer is parsed and, where the package jsonschema is installed, validated, formats included. For
comparison the same prompt is continued for as many tokens without a schema. Small models often go on for ever within a
string or an array: --close-bias leads them to an end, within what the schema allows. --json-out is written after each
answer; answers that it has already are not made again. Ends with one line of JSON; exit code 1 where a whole answer is
not valid, or texts differ.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import edgedec
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.sequence import Generation
from edgedec.tokenizer import Tokenizer
from edgedec_apps.bench.provenance import provenance

_ASKED = "Write one JSON value that is valid under this JSON schema, and nothing else:\n"
_OF_SCHEMAS = ("$schema", "$ref", "type", "properties", "anyOf", "oneOf", "allOf", "enum")
_FAULTS = ("invalid", "broken", "stuck")
Judge = Callable[[Any, dict[str, Any]], tuple[str, str]]
"""From a value and its schema to the state of the answer, and what is wrong with it."""


@dataclass(frozen=True)
class Answer:
    """What one schema led to.

    Attributes:
        name: Where the schema is.
        compile_s: Seconds from the schema to the first place in its grammar.
        state: "valid", "invalid" (under jsonschema), "unchecked" (jsonschema can't judge, or is missing), "cut" by
            max_tokens, "broken" (no JSON) or "stuck" (the grammar came to no end).
        fault: What is wrong with it.
        n_tokens: Tokens of the answer.
        with_s, plain_s, free_s: Seconds a token after the first, with drafts, without, and without a schema.
        n_forced: Forced tokens that were drafted.
        equal: Whether the texts with drafts and without are equal.
    """

    name: str
    compile_s: float
    state: str
    fault: str = ""
    n_tokens: int = 0
    with_s: float = 0.0
    plain_s: float = 0.0
    free_s: float = 0.0
    n_forced: int = 0
    equal: bool = True


def schemas(path: Path, n_most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and schemas of a file or folder; what is no object is left out."""
    n = 0
    for file in _files(path, n_most):
        for schema in _schemas_of(file):
            if n == n_most:
                return
            n += 1
            yield (str(file.relative_to(path)) if path.is_dir() else f"{file.name} {n}"), schema


def _files(path: Path, n_most: int) -> list[Path]:
    """Return the file, or of each folder with files as many, evenly spaced."""
    if not path.is_dir():
        return [path]
    found: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob("*.json*")):
        found.setdefault(file.parent, []).append(file)
    n_each = -(-n_most // max(1, len(found)))
    return [
        files[i * len(files) // n] for files in found.values() for n in (min(n_each, len(files)),) for i in range(n)
    ]


def _schemas_of(file: Path) -> Iterator[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    for value in found if isinstance(found, list) else [found]:
        record = isinstance(value, dict) and not any(key in value for key in _OF_SCHEMAS)
        inner = value.get("json_schema", value.get("schema", value)) if record else value
        inner = json.loads(inner) if isinstance(inner, str) else inner
        if isinstance(inner, dict):
            yield inner


def answer(engine: edgedec.Engine, name: str, schema: dict[str, Any], judge: Judge, args: argparse.Namespace) -> Answer:
    """Answer under one schema.

    Raises:
        RequestError: The schema is not taken.
    """
    prompt = _ASKED + json.dumps(schema)[: args.shown]
    ids = engine.chat_ids([{"role": "user", "content": prompt}]) if engine.can_chat else engine.tokenizer.encode(prompt)
    started = perf_counter()
    grammar = Grammar.json_schema(schema)
    engine.stream(ids, grammar=grammar).close()  # compiles it
    compile_s = perf_counter() - started
    options: dict[str, Any] = {"temperature": args.temperature, "seed": 1, "reuse": "longest"}
    kept: dict[str, Any] = options | {"grammar": grammar, "max_tokens": args.max_tokens}
    if args.close_bias:
        kept["logit_bias"] = dict.fromkeys(args.closing, args.close_bias)
    try:
        drafted, with_s = _timed(engine, ids, args.cpu_time, **kept)
        plain, plain_s = (
            (drafted, 0.0) if args.drafted_only else _timed(engine, ids, args.cpu_time, draft=False, **kept)
        )
    except RequestError as error:
        return Answer(name, compile_s, "stuck", str(error))
    n, free_s = len(drafted.token_ids), 0.0
    if not args.drafted_only:
        free: dict[str, Any] = {"draft": False, "max_tokens": max(2, n), "ignore_end": True}
        free_s = _timed(engine, ids, args.cpu_time, **free, **options)[1]
    return Answer(
        name,
        compile_s,
        *_state(drafted, schema, judge),
        n_tokens=n,
        with_s=with_s,
        plain_s=plain_s,
        free_s=free_s,
        n_forced=int(drafted.stats.drafters.get("forced", {}).get("right", 0)),
        equal=drafted.token_ids == plain.token_ids,
    )


def _closing(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that do nothing but close strings, arrays and objects (some open a string instead)."""
    pieces = ((i, tokenizer.piece(i)) for i in range(tokenizer.n_vocab))
    return tuple(i for i, piece in pieces if piece and not piece.strip(b'"]}'))


def _timed(engine: edgedec.Engine, ids: Sequence[int], cpu_time: bool, **options: Any) -> tuple[Generation, float]:
    """Return a generation and its seconds a token after the first."""
    clock = process_time if cpu_time else perf_counter
    stream = engine.stream(ids, **options)
    begun = 0.0
    for n, _ in enumerate(stream):
        begun = begun if n else clock()
    n_after = len(stream.generation.token_ids) - 1
    return stream.generation, (clock() - begun) / n_after if n_after > 0 else 0.0


def _state(generation: Generation, schema: dict[str, Any], judge: Judge) -> tuple[str, str]:
    if generation.finish_reason != "stop":
        return "cut", ""
    try:
        value = json.loads(generation.text, parse_float=Decimal)  # 10000.89 is a multiple of 0.01, not in binary
    except ValueError as error:
        return "broken", f"{error}: {generation.text[:200]}"
    return judge(value, schema)


def _judge() -> Judge:
    """Return the validation of jsonschema, by each schema's own draft, without fetching what a schema refers to."""
    try:
        jsonschema, registries = import_module("jsonschema"), import_module("jsonschema_specifications")
    except ImportError:
        return lambda _value, _schema: ("unchecked", "jsonschema is not installed")

    def judge(value: Any, schema: dict[str, Any]) -> tuple[str, str]:
        schema = json.loads(json.dumps(schema), parse_float=Decimal)
        kind = jsonschema.validators.validator_for(schema)
        try:
            kind.check_schema(schema)
            kind(schema, registry=registries.REGISTRY, format_checker=kind.FORMAT_CHECKER).validate(value)
        except jsonschema.ValidationError as error:
            return "invalid", f"{error.json_path}: {error.message[:200]} ({error.validator})"
        except Exception as error:  # of a schema that it refuses, or can't resolve
            return "unchecked", f"{type(error).__name__}: {str(error)[:200]}"
        return "valid", ""

    return judge


def figures(taken: list[Answer], refused: Counter[str]) -> dict[str, Any]:
    """Return what the answers add up to."""
    timed = [found for found in taken if found.n_tokens >= 8 and found.with_s and found.plain_s and found.free_s]
    return {
        "n_schemas": len(taken) + sum(refused.values()),
        "n_taken": len(taken),
        "states": dict(Counter(found.state for found in taken)),
        "n_unequal": sum(not found.equal for found in taken),
        "n_tokens": sum(found.n_tokens for found in taken),
        "compile_s": round(median(found.compile_s for found in taken), 4) if taken else None,
        "most_compile_s": round(max((found.compile_s for found in taken), default=0.0), 3),
        "forced": round(sum(f.n_forced for f in taken) / max(1, sum(f.n_tokens for f in taken)), 3),
        "mask_cost": _spread_of([f.plain_s / f.free_s for f in timed]),
        "speedup": _spread_of([f.plain_s / f.with_s for f in timed]),
        "against_free": _spread_of([f.free_s / f.with_s for f in timed]),
        "refused": dict(refused.most_common()),
    }


def _spread_of(ratios: list[float]) -> dict[str, float] | None:
    """Return the median, the least and the most."""
    if not ratios:
        return None
    return {"median": round(median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}


def _known(file: Path | None, settings: dict[str, Any]) -> dict[str, Answer]:
    """Return the answers that the file has already, by the schemas' names."""
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if {name: found.get(name) for name in settings} != settings:
        raise SystemExit(
            f"{file} has answers of other settings, or of another commit; choose another file, or remove it"
        )
    return {entry["name"]: Answer(**entry) for entry in found["answers"]}


def _write(file: Path, document: dict[str, Any], taken: list[Answer]) -> None:
    text = json.dumps(document | {"answers": [asdict(found) for found in taken]}, indent=1)
    part = file.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(file)


def main() -> None:
    """Answer, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--shown", type=int, default=2000, help="characters of a schema that the prompt shows")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--close-bias", type=float, default=0.0, help="on tokens that close what is open")
    parser.add_argument(
        "--drafted-only", action="store_true", help="are answers valid? no comparison of speed or texts"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of the processor, with --threads 1 on a busy machine"
    )
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    names = ("model", "max_tokens", "shown", "temperature", "close_bias", "threads", "cpu_time")
    document = {"benchmark": "json_schemas"} | {name: getattr(args, name) for name in names} | provenance()
    known = _known(args.json_out, {name: document[name] for name in (*names, "commit", "cpu")})
    taken: list[Answer] = []
    refused: Counter[str] = Counter()
    judge = _judge()
    with edgedec.load(args.model, runtime=args.runtime, n_threads=args.threads) as engine:
        started = perf_counter()
        engine.stream("x", json_schema={}).close()
        document["vocabulary_s"] = round(perf_counter() - started, 3)
        args.closing = _closing(engine.tokenizer)
        for number, (name, schema) in enumerate(schemas(args.path, args.first)):
            try:
                found = known.get(name) or answer(engine, name, schema, judge, args)
            except RequestError as error:
                refused[str(error)[:100]] += 1
                print(f"{number:5} {name} refused: {str(error)[:200]}", flush=True)
                continue
            taken.append(found)
            counts = f"{found.n_tokens} tokens, {found.n_forced} forced and drafted"
            print(f"{number:5} {name} {found.state}, {counts} {found.fault}", flush=True)
            if args.json_out is not None and name not in known:
                _write(args.json_out, document | figures(taken, refused), taken)
    result = figures(taken, refused)
    for key, value in result.items():
        print(f"{key:16} {value}")
    print(json.dumps(document | result))
    if args.json_out is not None:
        _write(args.json_out, document | result, taken)
    raise SystemExit(1 if any(found.state in _FAULTS or not found.equal for found in taken) else 0)


if __name__ == "__main__":
    main()
