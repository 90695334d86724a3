"""Are answers under a JSON schema as often right as free ones? On made tasks, which nobody can have trained on.

    python benchmarks/grammars/schema_accuracy.py qwen2.5-coder-1.5b --tasks 40 --json-out FILE

Four ways to answer the same question, greedily: free text with short steps and a line with the answer; JSON with the
steps and the answer, asked for only; the same under a schema; and a schema that leaves no room for steps. Several
answers are written at the same time, which changes none. JSON counts where it can be parsed. Ends with one line of
JSON, with Wilson's 95 % intervals.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import edgedec
from edgedec_apps.bench.provenance import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "answers"))

from made_tasks import MadeTask, is_right, made_tasks

_STEPS = {"type": "array", "items": {"type": "string", "maxLength": 80}, "maxItems": 8}
_ANSWERS: dict[str, dict[str, Any]] = {
    "arithmetic": {"type": "integer"},
    "dates": {"anyOf": [{"type": "integer"}, {"type": "string", "format": "date"}]},
}
_EXAMPLES = {
    "arithmetic": (
        "Ana has 3 boxes with 14 pens each. Then 2 bags with 5 pens each are added. Then all pens are shared equally "
        "by 4 people, and only one share is kept. Then 7 pens are sold. How many pens does Ana have now?",
        ["Boxes: 3 * 14 = 42", "Added: 2 * 5 = 10, 42 + 10 = 52", "Shared: 52 / 4 = 13", "Sold: 13 - 7 = 6"],
        6,
    ),
    "dates": (
        "Which date is 40 days after 20 January 2024?",
        ["January has 31 days: 31 - 20 = 11 days are left, 40 - 11 = 29", "February has 29 days in 2024: 29 - 29 = 0"],
        "2024-02-29",
    ),
}


@dataclass(frozen=True)
class Way:
    """A way to answer.

    Attributes:
        json: Whether JSON is asked for.
        steps: Whether steps are.
        schema: Whether a schema holds the text.
    """

    json: bool
    steps: bool
    schema: bool


WAYS = {
    "free text": Way(json=False, steps=True, schema=False),
    "JSON asked for": Way(json=True, steps=True, schema=False),
    "JSON schema": Way(json=True, steps=True, schema=True),
    "JSON schema, no steps": Way(json=True, steps=False, schema=True),
}


def asked(task: MadeTask, way: Way) -> str:
    """Return the message of a task."""
    if not way.json:
        return task.prompt
    example, steps, answer = _EXAMPLES[task.kind]
    found = {"steps": steps, "answer": answer} if way.steps else {"answer": answer}
    how = "Work it out in short steps, one string a step." if way.steps else "Give the answer alone."
    question = task.prompt.split("\n\n")[-1]
    how += " Reply with one JSON object and nothing else, as in this example."
    return "\n\n".join([how, f"{example}\n{json.dumps(found)}", question])


def schema_of(kind: str, way: Way) -> dict[str, Any]:
    """Return the schema of an answer."""
    properties = {"steps": _STEPS, "answer": _ANSWERS[kind]} if way.steps else {"answer": _ANSWERS[kind]}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def said(text: str) -> str | None:
    """Return the answer of a JSON reply, within a code block or not; None where there is none."""
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return str(found["answer"])
    except (ValueError, KeyError, TypeError):
        return None


def interval(n_right: int, n: int) -> list[float]:
    """Return Wilson's 95 % interval, in per cent."""
    z, p = 1.96, n_right / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [round(100 * (middle - half) / (1 + z * z / n)), round(100 * (middle + half) / (1 + z * z / n))]


def answered(engine: edgedec.Engine, tasks: Sequence[MadeTask], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answer all tasks in one way, and return how many were right."""
    way = WAYS[name]

    def one(task: MadeTask) -> tuple[bool, bool, int]:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": args.max_tokens}
        if way.schema:
            options["json_schema"] = schema_of(task.kind, way)
        made = engine.chat([{"role": "user", "content": asked(task, way)}], **options)
        answer = said(made.text) if way.json else None
        right = answer == task.answer if way.json else is_right(task, made.text)
        return right, (answer is not None if way.json else True), len(made.token_ids)

    with ThreadPoolExecutor(args.parallel) as pool, Progress(console=Console(stderr=True)) as progress:
        rows = list(progress.track(pool.map(one, tasks), len(tasks), description=name))
    n_right = sum(right for right, _, _ in rows)
    return {
        "n": len(rows),
        "right": n_right,
        "per_cent": round(100 * n_right / len(rows)),
        "interval": interval(n_right, len(rows)),
        "parsed": sum(parsed for _, parsed, _ in rows),
        "tokens": round(sum(n for _, _, n in rows) / len(rows), 1),
    }


def main() -> None:
    """Answer, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kinds", nargs="+", default=["arithmetic", "dates"], choices=list(_ANSWERS))
    parser.add_argument("--tasks", type=int, default=40, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    load: dict[str, Any] = {"runtime": "cpu", "draft": "off", "offline": True, "n_parallel": args.parallel}
    with edgedec.load(args.model, n_ctx=1024, **load) as engine:
        for kind in args.kinds:
            for name in WAYS:
                results[f"{kind}, {name}"] = answered(engine, made_tasks(kind, args.tasks), name, args)
                print(kind, name, results[f"{kind}, {name}"], flush=True)
    line = {"benchmark": "schema_accuracy", "model": args.model, "max_tokens": args.max_tokens, "results": results}
    report(line, args.json_out)


if __name__ == "__main__":
    main()
