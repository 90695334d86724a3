"""Measure what several texts, checks and `refine` do to answers, by kind of task: the table of better-answers.md.

    python benchmarks/answers/refining.py run qwen2.5-coder-1.5b --kind functions --tasks 40 --out FILE.jsonl
    python benchmarks/answers/refining.py table FILE.jsonl [FILE.jsonl ...] --json-out FILE

`run` solves each task in turn greedily (JSON also by a schema that knows keys and types), by 8 texts (the likeliest of
the first 4, the vote of 8 and the best of 8 by a check are chosen among them), and by `refine:CHECK,n=4`, where
there is a check. The checks know no answer: the public tests of functions, and the keys, types and words of JSON. `run`
adds a line a task and way and skips what FILE has, so it can be interrupted; --seconds ends it in time. `table` looks
at `refine` after 5 texts, too, as they begin alike. The time is CPU seconds of the process's one
thread, which other work on the machine changes little.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

from function_runner import n_passed, wrong_calls
from made_json import OBJECT, is_right_object, json_tasks, said_wrong, schema_of
from made_pairs import rows_of_ways
from made_runs import STOPS, add_line, lines_of, load
from made_table import lockstep
from made_tasks import KINDS, MadeTask, given_answer, is_right, made_tasks

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.choosers import mean_logprob, most_likely
from edgedec.choosing.vote import answer_of, voted
from edgedec.grammar import Grammar
from edgedec.sequence import Generation
from edgedec_apps.bench.provenance import report
from edgedec_apps.refine import RefineBy, Verdict, refined

JSON_KINDS = ("extraction", "tools")
CHECKED = ("functions", *JSON_KINDS)
WAYS = ("greedy", "8 texts")
WAYS_OF = {"functions": (*WAYS, "refine 4"), **dict.fromkeys(JSON_KINDS, ("greedy", "schema", "8 texts", "refine 4"))}
BUDGETS = (5, 9)
"""Texts of `refine 4` after which it is looked at."""


def _tasks(kind: str, n: int, seed: int) -> list[MadeTask]:
    return (json_tasks if kind in JSON_KINDS else made_tasks)(kind, n, seed)


def _verdict(task: MadeTask, text: str) -> Verdict:
    """Return what the check says that knows no answer; every complaint about JSON costs a quarter."""
    if task.kind == "functions":
        return Verdict(n_passed(text, task.public) / len(task.public), "\n".join(wrong_calls(text, task.public)))
    wrong = said_wrong(task, text)
    return Verdict(max(0.0, 1 - len(wrong) / 4), "\n".join(wrong))


def _is_right(task: MadeTask, text: str, score: float) -> bool:
    if task.kind == "functions":
        return score == 1 and n_passed(text, task.hidden) == len(task.hidden)
    return (is_right_object if task.kind in JSON_KINDS else is_right)(task, text)


def _answer(task: MadeTask, text: str) -> str | None:
    """Return what a vote counts of a text."""
    return answer_of(text, OBJECT) if task.kind in JSON_KINDS else given_answer(text)


def _solved(engine: edgedec.Engine, task: MadeTask, way: str) -> dict[str, Any]:
    """Return the texts of a task in the order of their writing, what each is worth, and when each was checked."""
    began, stamps = time.process_time(), list[float]()

    def check(prefix: str, text: str) -> Verdict:
        stamps.append(time.process_time() - began)
        return _verdict(task, text)

    messages = [{"role": "user", "content": task.prompt}]
    options: dict[str, Any] = {"seed": 0, "temperature": 0.8, "top_p": 0.95, "max_tokens": 160}
    options["stop"] = STOPS.get(task.kind, ())
    texts: tuple[Generation, ...]
    rounds = [0] * 8
    if way == "refine 4":
        found = refined(engine, messages, RefineBy(check=check, n=4, texts=max(BUDGETS)), **options)
        texts, rounds = found.texts, list(found.rounds)
    elif way in ("greedy", "schema"):
        if way == "schema":
            options["grammar"] = Grammar.json_schema(schema_of(task.kind))
        texts, rounds = (engine.chat(messages, **options | {"temperature": 0}, logprobs=0),), [0]
    else:
        texts = best(engine, messages, BestOf(8, "likely"), **options).texts
    seconds = time.process_time() - began
    scores = [_verdict(task, text.text).score if task.kind in CHECKED else 0.0 for text in texts]
    line: dict[str, Any] = {"scores": scores, "rounds": rounds, "stamps": stamps, "seconds": seconds}
    line["rights"] = [_is_right(task, text.text, score) for text, score in zip(texts, scores, strict=True)]
    line["tokens"] = [len(text.token_ids) for text in texts]
    line["means"] = [None if text.logprob_sum is None else mean_logprob(text) for text in texts]
    return line | {"answers": [_answer(task, text.text) for text in texts], "texts": [text.text for text in texts]}


def run(args: argparse.Namespace) -> None:
    """Solve the tasks in every way."""
    ends = time.monotonic() + args.seconds
    done = {(line["task"], line["model"], line["way"]) for line in lines_of(args.out)}
    with load(args, args.model) as engine:
        for task in _tasks(args.kind, args.tasks, args.seed):
            for way in WAYS_OF.get(args.kind, WAYS):
                if (task.id, args.model, way) in done or time.monotonic() > ends:
                    continue
                engine.generate("x", max_tokens=1, draft=False)  # so that no way finds the prompt read
                line = {"task": task.id, "kind": args.kind, "model": args.model, "way": way}
                line |= _solved(engine, task, way)
                add_line(args.out, line)
                print(task.id, way, line["scores"], line["rights"], f"{line['seconds']:.1f} s", flush=True)


def _chosen(line: dict[str, Any], place: int, n: int, seconds: float | None) -> dict[str, Any]:
    """Return what a way has and has spent after the first n texts of a line; its steps are those of made_table.py."""
    tokens, rounds = line["tokens"][:n], line["rounds"][:n]
    steps = sum(lockstep([k for k, at in zip(tokens, rounds, strict=True) if at == turn]) for turn in {*rounds})
    return {"right": line["rights"][place], "texts": n, "tokens": sum(tokens), "steps": steps, "seconds": seconds}


def _refined(line: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return what `refine 4` has after its first texts."""
    scores = line["scores"][:budget]
    n, texts = len(scores), list(zip(line["rounds"], line["texts"], strict=True))
    n_checked = len(set(texts[:n]))  # equal texts of a round are checked once
    seconds = line["seconds"] if n == len(texts) else line["stamps"][n_checked - 1]
    return _chosen(line, scores.index(max(scores)), n, seconds)


def _by_way(kind: str, lines: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by way and task what the way has and has spent; of what is chosen among fewer texts, no seconds."""
    found = dict[str, dict[str, dict[str, Any]]]()
    for line in lines:
        task, scores = line["task"], line["scores"]
        if line["way"] in ("greedy", "schema"):
            found.setdefault(line["way"], {})[task] = _chosen(line, 0, 1, line["seconds"])
        elif line["way"] == "refine 4":
            for budget in BUDGETS:
                found.setdefault(f"refine 4, {budget} texts", {})[task] = _refined(line, budget)
        else:
            found.setdefault("likely 4", {})[task] = _chosen(line, most_likely(line["means"][:4]), 4, None)
            found.setdefault("vote 8", {})[task] = _chosen(line, voted(line["answers"]), 8, line["seconds"])
            found.setdefault("any of 8", {})[task] = _chosen(line, line["rights"].index(max(line["rights"])), 8, None)
            if kind in CHECKED:
                found.setdefault("score 8", {})[task] = _chosen(line, scores.index(max(scores)), 8, line["seconds"])
    if kind == "functions":
        found.pop("vote 8", None)  # two functions that do the same are two answers
    return found


def table(args: argparse.Namespace) -> None:
    """Print a row for each kind and way, with a column for each model, and write all figures."""
    lines, rows = [line for path in args.files for line in lines_of(path)], list[dict[str, Any]]()
    models = list(dict.fromkeys(line["model"] for line in lines))
    for kind, model in product((*KINDS, *JSON_KINDS), models):
        by_way = _by_way(kind, [line for line in lines if (line["kind"], line["model"]) == (kind, model)])
        each = [{"way": way, "task": task} | found[task] for way, found in by_way.items() for task in found]
        found_rows = rows_of_ways(each, ("texts", "tokens", "steps", "seconds"), ("greedy", "score 8"))
        rows += [{"kind": kind, "model": model} | row | _revised(row.get("against greedy")) for row in found_rows]
    cells = {(row["kind"], row["way"], row["model"]): _told(row) for row in rows}
    print(f"| task | way | {' | '.join(models)} |\n|---|---|{'---|' * len(models)}")
    for kind, way in dict.fromkeys((row["kind"], row["way"]) for row in rows):
        print(f"| {kind} | {way} | {' | '.join(cells.get((kind, way, model), '') for model in models)} |")
    report({"benchmark": "refining", "rows": rows}, args.json_out)


def _revised(pair: dict[str, Any] | None) -> dict[str, Any]:
    """Return how often a way keeps what greedy decoding has right, and makes right what it has wrong.

    They are the two scores of "Confidence v.s. Critique: A Decomposition of Self-Correction Capability for LLMs".
    """
    if pair is None:
        return {}
    right, wrong = pair["other right"], pair["tasks"] - pair["other right"]
    kept, made = right - pair["only theirs"], pair["only ours"]
    return {"kept right": f"{kept} of {right}", "made right": f"{made} of {wrong}"}


def _told(row: dict[str, Any]) -> str:
    """Return a cell: percent right with their interval, tokens and CPU seconds; p below 0.05 beside greedy is marked.

    ▲ is better than greedy decoding and ▼ worse; △ is better than the best of 8 by the same check, and ▽ worse.
    """
    marks = ""
    for name, better, worse in (("greedy", "▲", "▼"), ("score 8", "△", "▽")):
        pair = row.get(f"against {name}", {"p": 1.0})
        if pair["p"] < 0.05:
            marks += better if pair["only ours"] > pair["only theirs"] else worse
    right, low, high = (100 * share for share in (row["right"] / row["tasks"], row["low"], row["high"]))
    spent = "" if row["seconds"] is None else f", {row['seconds']:.1f} s"
    return f"{right:.0f}{marks} ({low:.0f}–{high:.0f}) of {row['tasks']}, {row['tokens']:.0f}{spent}"


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("model")
    running.add_argument("--kind", choices=(*KINDS, *JSON_KINDS), required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--tasks", type=int, default=30)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--seconds", type=float, default=3600.0, help="begin no task after so many seconds")
    running.add_argument("--threads", type=int, default=1)
    running.set_defaults(run=run)
    tabling = commands.add_parser("table")
    tabling.add_argument("files", type=Path, nargs="+")
    tabling.add_argument("--json-out", type=Path)
    tabling.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
