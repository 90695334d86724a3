"""Measure what several texts of one prompt, and searches, do to answers that a checker can judge.

    python benchmarks/answers/better_answers.py sample qwen2.5-coder-1.5b --kind arithmetic --out runs.jsonl
    python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind arithmetic --method beam4 \
        --scorer likely --out searches.jsonl
    python benchmarks/answers/better_answers.py all qwen2.5-coder-1.5b --scorer likely --tasks 40 --out runs.jsonl
    python benchmarks/answers/better_answers.py table runs.jsonl searches.jsonl --json-out FILE --plot FILE

`sample` writes, for each task, texts with the seeds 0, 1, ... and keeps what choosing needs of each: its answer,
whether it is right, its tokens, its log-probability, and its judged chance to be right. `search` runs a search on each
task; `all` does both, for all searches and kinds of tasks. All add a line a task to their file and skip what it has, so
they can be interrupted; --seconds ends them in time. `table` chooses among the texts in every way, for n = 1, 4, 8 and
16, and prints accuracy with 95 % intervals, tokens, and the cost in plain steps (made_table.py says how that is
computed). A search is compared, task by task, with the best of as many drawn texts as its cost pays for. The table also
has what bounds the choice by tests: the texts that pass the public tests and fail the hidden ones.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from time import monotonic, process_time
from typing import Any

from made_pairs import at_budget, auroc_of, compared, passing
from made_runs import add_line, figures, lines_of, load, open_tasks, question, texts_of
from made_searches import COMPARED, COMPARED_BY_KIND, SEARCHES, UNSCORED, Setting
from made_table import CURVE, draw, measures_of, of_search, of_texts
from made_tasks import KINDS

import edgedec
from edgedec_apps.bench.provenance import provenance
from edgedec_methods.judgement import judged
from edgedec_methods.sampled_steps import forks, seeds_from, write_steps

REFERENCES = {"arithmetic": "likely", "dates": "vote", "functions": "public tests"}
"""The way of choosing that searches are compared with, task by task."""


def sample(args: argparse.Namespace, engine: edgedec.Engine) -> None:
    """Write the texts of each task, judge them, and keep what choosing needs."""
    key = {"model": args.model, "kind": args.kind, "texts": args.texts, "temperature": args.temperature}
    params, asked = engine.requests.sampling(temperature=args.temperature, top_p=0.95), question(engine)
    for task in open_tasks(args, key):
        with texts_of(engine, task, args.max_tokens) as texts:
            live = forks(texts, texts.begin(), args.texts)
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


def search(args: argparse.Namespace, engine: edgedec.Engine) -> None:
    """Run a search on each task, and keep its answer and what it cost."""
    scored_by = "" if args.method in UNSCORED else args.scorer
    key = {"model": args.model, "kind": args.kind, "method": args.method, "temperature": args.temperature}
    key |= {"scorer": "probe" if scored_by.startswith("probe:") else scored_by}
    params = engine.requests.sampling(temperature=args.temperature, top_p=0.95)
    with load(args, args.small) if args.small else nullcontext() as small:
        for task in open_tasks(args, key):
            setting = Setting(engine, small, task, params, args.seed, args.max_tokens, scored_by or "likely")
            began = process_time()
            with texts_of(engine, task, args.max_tokens) as texts:
                text, more = SEARCHES[args.method](setting, texts)
                found = figures(task, text) | {"forwards": dict(texts.forwards), "text": text} | more
            add_line(args.out, key | {"task": task.id, "seconds": process_time() - began} | found)
            print(f"{task.id}: {args.method} is {'right' if found['right'] else 'wrong'}", flush=True)


def everything(args: argparse.Namespace, engine: edgedec.Engine) -> None:
    """Write the texts, and run the searches that are compared, for each kind of tasks."""
    ends = monotonic() + args.seconds
    for kind in KINDS if args.kind == "all" else [args.kind]:
        for method in ("", *COMPARED_BY_KIND.get(kind, COMPARED)):
            left = {"kind": kind, "method": method, "seconds": ends - monotonic()}
            each = argparse.Namespace(**vars(args) | left)
            print(f"{kind}, {method or 'texts'}:", flush=True)
            search(each, engine) if method else sample(each, engine)


def run(args: argparse.Namespace) -> None:
    """Load the model, and do with it what the command names."""
    with load(args, args.model) as engine:
        args.work(args, engine)


def table(args: argparse.Namespace) -> None:
    """Print the table of the runs in some files, and write it and its picture."""
    lines = [line for path in args.files for line in lines_of(path) if line["model"] == args.model]
    length = Tokens(args.model)
    tables, judges, pairs = dict[str, list[dict[str, Any]]](), dict[str, Any](), dict[str, Any]()
    for kind in sorted({line["kind"] for line in lines}):
        texts = list({line["task"]: line for line in lines if line["kind"] == kind and "rows" in line}.values())
        rows = list(of_texts(texts)) if texts else []
        judges[kind] = {name: auroc_of(groups) for name, groups in measures_of(texts).items()}
        pairs[kind] = {}
        methods = dict.fromkeys(_way(line) for line in lines if line["kind"] == kind and "method" in line)
        for method in methods:
            found = list(
                {line["task"]: line for line in lines if line["kind"] == kind and _way(line) == method}.values()
            )
            rows.append(of_search(method, found, length.count) | {"seconds": _mean_seconds(found)})
            pairs[kind][f"{method} against {REFERENCES[kind]}"] = at_budget(found, texts, REFERENCES[kind])
            greedy = {line["task"]: line["right"] for line in lines if line["kind"] == kind and _way(line) == "greedy"}
            mine = {line["task"]: line["right"] for line in found}
            pairs[kind][f"{method} against greedy"] = compared(mine, greedy)
        if kind == "functions" and texts:
            pairs[kind]["what passes the public tests"] = passing(texts)
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


def _way(line: dict[str, Any]) -> str:
    """Return a search with its scorer, as one way; nothing of a line of texts."""
    method = line.get("method", "")
    return f"{method} by {line['scorer']}" if line.get("scorer") else method


def _mean_seconds(lines: list[dict[str, Any]]) -> float | None:
    """Return the mean CPU seconds of a search; None where its lines don't have them."""
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    return fmean(seconds) if seconds else None


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
    runs.add_argument("--kind", default="all", choices=("all", *KINDS))
    runs.add_argument("--tasks", type=int, default=60)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--seconds", type=float, default=220.0, help="begin no task after so many seconds")
    runs.add_argument("--max-tokens", type=int, default=160)
    runs.add_argument("--temperature", type=float, default=0.7)
    runs.add_argument("--threads", type=int, default=2)
    sampling = commands.add_parser("sample", parents=[runs])
    sampling.add_argument("--texts", type=int, default=16)
    sampling.set_defaults(run=run, work=sample)
    searching = commands.add_parser("search", parents=[runs])
    searching.add_argument("--method", required=True, choices=SEARCHES)
    searching.add_argument("--scorer", default="likely", help="of steps: likely, likely:last, judge, probe:FILE")
    searching.add_argument("--small", help="the small model of specreason")
    searching.set_defaults(run=run, work=search)
    comparing = commands.add_parser("all", parents=[runs])
    comparing.add_argument("--texts", type=int, default=16)
    comparing.add_argument("--scorer", default="likely", help="as of search")
    comparing.set_defaults(run=run, work=everything, small=None)
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
