"""Which JSON schemas are taken, what compiling and masks cost, and whether masks keep to the standard; without a text.

    python benchmarks/grammars/json_coverage.py data --json-out FILE
    python benchmarks/grammars/json_coverage.py data --walk 20 --suite JSON-Schema-Test-Suite/tests/draft2020-12

The folder has one of files for each set of schemas, as `data` of JSONSchemaBench (Geng et al. 2025, arXiv:2501.10868).
Every schema is compiled. With --walk N, random tokens are drawn under every N-th schema that is taken: that times the
masks, and the texts that come to their end must be valid to the package jsonschema. With --suite, each instance of the
official JSON Schema Test Suite is read token by token: of the invalid ones none may be taken. Ends with one line of
JSON; exit code 1 where a text is not valid, or an invalid instance is taken.
"""

import argparse
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from json_schemas import _judge

import edgedec
from edgedec.constraint import Constraint, DrawPlace
from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.sampling import Noise, SamplingParams
from edgedec.tokenizer import Tokenizer
from edgedec_apps.bench.provenance import provenance

_PARAMS = SamplingParams(temperature=1, top_p=1)


def reason(error: RequestError) -> str:
    """Return why a schema is refused, without its own names and numbers."""
    text = str(error)
    for word, meaning in (
        ("oneOf", "oneOf whose cases may overlap"),
        ("Unknown format", "unknown format"),
        ("unsatisfiable", "llguidance finds no text"),
        ("Unsatisfiable", "llguidance finds no text"),
        ("circular", "circular references beside other keys"),
        ("too large", "too large"),
        ("too big", "too large"),
        ("larger", "too large"),
        ("make it", "too large"),
        ("lookaround", "look-around in a pattern"),
        ("external", "references to other files"),
        ("maxProperties", "minProperties or maxProperties"),
    ):
        if word in text:
            return meaning
    if keys := re.search(r"Unimplemented keys: (\[.*?\])", text):
        return ", ".join(json.loads(keys[1]))
    return text.removeprefix("the JSON schema can't be used: ")[:60]


class Walk:
    """Draws random tokens under a constraint, closing what is open more likely the longer the text is."""

    def __init__(self, tokenizer: Tokenizer, n_most: int = 250) -> None:
        self.tokenizer = tokenizer
        self.n_most = n_most
        pieces = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
        self._closing = np.array([bool(piece) and not piece.strip(b'"]}') for piece in pieces])
        self._end = np.array([tokenizer.is_end(i) for i in range(tokenizer.n_vocab)])
        self._base = np.array([-0.3 * len(piece) for piece in pieces], np.float32)

    def __call__(self, constraint: Constraint, seed: int) -> tuple[str | None, list[float]]:
        """Return a text (None where it did not end), and the seconds of the processor for each mask."""
        data, seconds = b"", list[float]()
        for position in range(self.n_most):
            if constraint.is_over:
                return data.decode(errors="replace"), seconds
            row = (self._base + 0.1 * position * self._closing + 4 * self._end).astype(np.float32)
            began = process_time()
            constraint.allowed()
            seconds.append(process_time() - began)
            token = constraint.choose(DrawPlace(row, _PARAMS, (), Noise(seed), position), ())
            constraint.commit(token)
            if self._end[token]:
                return data.decode(errors="replace"), seconds
            data += self.tokenizer.piece(token)
        return None, seconds


def takes(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a constraint takes a text, token by token and as a whole."""
    for token in tokenizer.encode(text, add_special=False):
        if constraint.is_over or not constraint.allows((), token):
            return False
        constraint.commit(token)
    return constraint.may_end


def compiled(grammars: Grammars, folder: Path, args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what compiling every schema of a folder led to, and what the random texts did."""
    sets: dict[str, dict[str, Any]] = {}
    refused: Counter[str] = Counter()
    times, masks, walks, faults = list[float](), list[float](), Counter[str](), list[str]()
    walk, judge = Walk(tokenizer), _judge()
    for kind in sorted(path for path in folder.iterdir() if path.is_dir()):
        counts = sets.setdefault(kind.name, {"n": 0, "taken": 0})
        for number, file in enumerate(sorted(kind.glob("*.json"))):
            source = file.read_text(encoding="utf-8")
            counts["n"] += 1
            began = process_time()
            try:
                constraint = grammars.open(Grammar.json_schema(source))
            except RequestError as error:
                refused[reason(error)] += 1
                continue
            finally:
                times.append(process_time() - began)
            counts["taken"] += 1
            if args.walk and number % args.walk == 0:
                try:
                    text, seconds = walk(constraint, number)
                    masks += seconds
                    state, fault = ("cut", "") if text is None else judge(_value(text), json.loads(source))
                except RequestError as error:
                    state, fault = "stuck", str(error)
                except ArithmeticError as error:  # an exponent that no Decimal holds
                    state, fault = "unchecked", repr(error)
                walks[state] += 1
                if state not in ("valid", "cut", "unchecked"):
                    faults.append(f"{kind.name}/{file.name}: {state}: {fault[:160]}")
                    print(faults[-1], flush=True)
            constraint.close()
        print(kind.name, counts, flush=True)
    n, taken = sum(each["n"] for each in sets.values()), sum(each["taken"] for each in sets.values())
    return {
        "n_schemas": n,
        "n_taken": taken,
        "sets": sets,
        "refused": dict(refused.most_common()),
        "compile_ms": _spread([1000 * each for each in times]),
        "mask_ms": _spread([1000 * each for each in masks]),
        "walks": dict(walks),
        "faults": faults,
    }


def _value(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def _spread(values: list[float]) -> dict[str, float] | None:
    """Return the median, the 99th of a hundred, and the most."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": round(median(ordered), 3),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
        "most": round(ordered[-1], 2),
    }


def suite(grammars: Grammars, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return how the instances of the official suite fared, as counts, and those that went wrong."""
    counts: Counter[str] = Counter()
    by_key: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            counts["groups"] += 1
            schema = group["schema"]
            try:
                if not isinstance(schema, dict):
                    raise RequestError("the JSON schema is no object")
                grammars.open(Grammar.json_schema(schema)).close()
            except RequestError as error:
                counts["refused groups"] += 1
                by_key.setdefault(file.stem, Counter())[reason(error)] += 1
                continue
            for case in group["tests"]:
                constraint = grammars.open(Grammar.json_schema(schema))
                text = json.dumps(case["data"], ensure_ascii=False)
                try:
                    taken = takes(constraint, tokenizer, text)
                except RequestError:
                    taken = False
                constraint.close()
                kind = f"{'valid' if case['valid'] else 'invalid'} {'taken' if taken else 'refused'}"
                counts[kind] += 1
                if kind == "invalid taken":
                    wrong.append(f"{file.stem}: {group['description']}: {case['description']}")
    refused = {name: dict(found) for name, found in by_key.items()}
    return {"folder": folder.name, "counts": dict(counts), "invalid_taken": wrong, "refused_groups": refused}


def main() -> None:
    """Compile, walk, read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokens the masks are for")
    parser.add_argument("--walk", type=int, default=0, metavar="N")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    with edgedec.load(args.model, runtime="cpu", draft="off", offline=True) as engine:
        grammars = Grammars(engine.tokenizer)
        document: dict[str, Any] = {"benchmark": "json_coverage", "model": args.model}
        if args.suite is not None:
            document["suite"] = suite(grammars, args.suite, engine.tokenizer)
            print(json.dumps(document["suite"], indent=1), flush=True)
        document |= compiled(grammars, args.path, args, engine.tokenizer) | provenance()
    print(json.dumps(document))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = document["suite"]["invalid_taken"] if args.suite is not None else []
    raise SystemExit(1 if wrong or set(document["walks"]) & {"invalid", "stuck"} else 0)


if __name__ == "__main__":
    main()
