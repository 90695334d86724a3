"""Measure what several texts of one prompt, and searches, do to answers that a checker can judge.

    python benchmarks/answers/better_answers.py sample qwen2.5-coder-1.5b --kind arithmetic --out runs.jsonl
    python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind arithmetic --method beam4 \
        --out searches.jsonl
    python benchmarks/answers/better_answers.py table runs.jsonl searches.jsonl --json-out FILE --plot FILE

`sample` writes, for each task, texts with the seeds 0, 1, ... and keeps what choosing needs of each: its answer,
whether it is right, its tokens, its log-probability, and its judged chance to be right. `search` runs a search on each
task. Both add a line a task to their file and skip what it has, so they can be interrupted; --seconds ends them in
time. `table` chooses among the texts in every way, for n = 1, 4, 8 and 16, and prints accuracy with 95 % intervals,
tokens, and the cost in plain steps (made_table.py says how that is computed).
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from made_pairs import auroc_of, by_difficulty, compared, rights_of
from made_runs import add_line, figures, lines_of, load, open_tasks, question, texts_of
from made_searches import SEARCHES, Setting
from made_table import CURVE, draw, measures_of, of_search, of_texts

import edgedec
from edgedec_apps.bench.provenance import provenance
from edgedec_methods.judgement import judged
from edgedec_methods.sampled_steps import seeds_from, write_steps

REFERENCES = {
    "arithmetic": [("likely", 8), ("likely", 4)],
    "dates": [("vote", 8)],
    "functions": [("public tests", 8), ("public tests", 4)],
}
"""The ways of choosing that searches are compared with, task by task."""


def sample(args: argparse.Namespace) -> None:
    """Write the texts of each task, judge them, and keep what choosing needs."""
    key = {"model": args.model, "kind": args.kind, "texts": args.texts, "temperature": args.temperature}
    with load(args, args.model) as engine:
        params, asked = engine.requests.sampling(temperature=args.temperature, top_p=0.95), question(engine)
        for task in open_tasks(args, key):
            with texts_of(engine, task, args.max_tokens) as texts:
                root = texts.begin()
                live = [root, *(texts.fork(root) for _ in range(args.texts - 1))]
                written = write_steps(texts, live, params, seeds_from(args.seed, args.texts), separator=None)
                chances = judged(texts, written, asked)
                rows = [
                    figures(task, texts.text(text))
                    | {"tokens": text.n_scored, "mean_logprob": text.mean_logprob}
                    | {"ended": text.ended == "stop", "chance": chance}
                    for text, chance in zip(written, chances, strict=True)
                ]
            add_line(args.out, key | {"task": task.id, "judge_rows": len(asked.token_ids), "rows": rows})
            print(f"{task.id}: {sum(row['right'] for row in rows)} of {args.texts} right", flush=True)


def search(args: argparse.Namespace) -> None:
    """Run a search on each task, and keep its answer and what it cost."""
    key = {"model": args.model, "kind": args.kind, "method": args.method, "temperature": args.temperature}
    with ExitStack() as opened:
        engine = opened.enter_context(load(args, args.model))
        small = opened.enter_context(load(args, args.small)) if args.small else None
        params = engine.requests.sampling(temperature=args.temperature, top_p=0.95)
        for task in open_tasks(args, key):
            setting = Setting(engine, small, task, params, args.seed, args.max_tokens)
            with texts_of(engine, task, args.max_tokens) as texts:
                text, more = SEARCHES[args.method](setting, texts)
                found = figures(task, text) | {"forwards": dict(texts.forwards), "text": text} | more
            add_line(args.out, key | {"task": task.id} | found)
            print(f"{task.id}: {args.method} is {'right' if found['right'] else 'wrong'}", flush=True)


def table(args: argparse.Namespace) -> None:
    """Print the table of the runs in some files, and write it and its picture."""
    lines = [line for path in args.files for line in lines_of(path) if line["model"] == args.model]
    length = Tokens(args.model)
    tables, judges, pairs = dict[str, list[dict[str, Any]]](), dict[str, Any](), dict[str, Any]()
    for kind in sorted({line["kind"] for line in lines}):
        texts = list({line["task"]: line for line in lines if line["kind"] == kind and "rows" in line}.values())
        rows = [*of_texts(texts), by_difficulty(texts)] if texts else []
        judges[kind] = {name: auroc_of(groups) for name, groups in measures_of(texts).items()}
        pairs[kind] = {}
        methods = dict.fromkeys(line["method"] for line in lines if line["kind"] == kind and "method" in line)
        for method in methods:
            found = {line["task"]: line for line in lines if line.get("method") == method and line["kind"] == kind}
            rows.append(of_search(method, list(found.values()), length.count))
            for way, n in REFERENCES[kind]:
                mine = {task: line["right"] for task, line in found.items()}
                pairs[kind][f"{method} against {way} {n}"] = compared(mine, rights_of(texts, way, n))
            if halfway := [line for line in found.values() if "chances" in line]:
                groups = [list(zip(line["chances"], line["rights"], strict=True)) for line in halfway]
                judges[kind]["judge, midway"] = auroc_of(groups) | {"tasks": len(groups)}
        tables[kind] = rows
        print(f"\n{kind}:", *(f"{name}: {found}" for name, found in (judges[kind] | pairs[kind]).items()), sep="\n  ")
        for row in sorted(rows, key=lambda row: row["steps"]):
            span = f"{100 * row['low']:.0f} to {100 * row['high']:.0f}"
            print(
                f"{row['way']:14} n={row['n']!s:4} {100 * row['accuracy']:5.1f} % ({span}) of {row['tasks']}; "
                f"{row['tokens']:6.0f} tokens, {row['steps']:6.1f} steps, speed {row['speed']:.2f}"
            )
    document = {
        "benchmark": "better_answers",
        "model": args.model,
        "curve": CURVE,
        "tables": tables,
        "auroc": judges,
        "pairs": pairs,
    }
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document | provenance(), indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(args.plot, tables)


class Tokens:
    """Counts the tokens of texts with a model's tokenizer, which is loaded when it is first needed."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._engine: edgedec.Engine | None = None

    def count(self, text: str) -> int:
        """Return the tokens of a text, its end token included."""
        if self._engine is None:
            self._engine = edgedec.load(self._model, runtime="cpu", offline=True, draft="off", n_ctx=64)
        return 1 + len(self._engine.tokenizer.encode(text, add_special=False))


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("model")
    runs.add_argument("--kind", required=True)
    runs.add_argument("--tasks", type=int, default=60)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--seconds", type=float, default=220.0, help="begin no task after so many seconds")
    runs.add_argument("--max-tokens", type=int, default=160)
    runs.add_argument("--temperature", type=float, default=0.7)
    runs.add_argument("--threads", type=int, default=2)
    sampling = commands.add_parser("sample", parents=[runs])
    sampling.add_argument("--texts", type=int, default=16)
    sampling.set_defaults(run=sample)
    searching = commands.add_parser("search", parents=[runs])
    searching.add_argument("--method", required=True, choices=SEARCHES)
    searching.add_argument("--small", help="the small model of specreason")
    searching.set_defaults(run=search)
    tabling = commands.add_parser("table")
    tabling.add_argument("files", type=Path, nargs="+")
    tabling.add_argument("--model", default="qwen2.5-coder-1.5b")
    tabling.add_argument("--json-out", type=Path)
    tabling.add_argument("--plot", type=Path)
    tabling.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
