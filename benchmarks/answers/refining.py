"""Measure `--refine` against the best of several texts, with the same checker: the public tests of made functions.

    python benchmarks/answers/refining.py run qwen2.5-coder-1.5b --out FILE.jsonl
    python benchmarks/answers/refining.py table FILE.jsonl --json-out FILE

`run` solves each task in both ways, in turn, and adds a line a task and way; it skips what FILE has, so it can be
interrupted, and --seconds ends it in time. `table` looks at `--refine` after 1, 5, 9 ... texts, which begin alike. A
text is right where it passes the hidden tests, too. The time is CPU seconds of the process's one thread, which other
work on the machine changes little.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from made_pairs import compared
from made_runs import STOPS, add_line, lines_of, load
from made_table import interval

import edgedec
from edgedec.api.best_text import BestOf
from edgedec.choosing.choice import ChosenText
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.evaluation.function_runner import n_passed, wrong_calls
from edgedec_apps.evaluation.made_tasks import MadeTask, made_tasks
from edgedec_apps.refine import RefineBy, Refined, Verdict, refined

WAYS = ("best of 8", "refine 4")
BUDGETS = (1, 5, 9, 13, 17)
"""Texts of `refine 4` after which it is compared; the first is greedy decoding."""


def _messages(task: MadeTask) -> list[dict[str, str]]:
    return [{"role": "user", "content": task.prompt}]


def _verdict(task: MadeTask, text: str) -> Verdict:
    wrong = wrong_calls(text, task.public)
    return Verdict(n_passed(text, task.public) / len(task.public), "\n".join(wrong))


def _solved(engine: edgedec.Engine, task: MadeTask, way: str) -> dict[str, Any]:
    """Return the texts of a task in the order of their writing, what each is worth, and when each was checked."""
    began, stamps = time.process_time(), list[float]()

    def check(prefix: str, text: str) -> Verdict:
        stamps.append(time.process_time() - began)
        return _verdict(task, text)

    options: dict[str, Any] = {"seed": 0, "temperature": 0.8, "top_p": 0.95, "max_tokens": 160}
    options["stop"] = STOPS["functions"]
    if way == "refine 4":
        found: ChosenText = refined(engine, _messages(task), RefineBy(check=check, n=4, texts=max(BUDGETS)), **options)
    else:
        how = BestOf(8, "score", scorer=lambda prefix, texts: [check(prefix, text).score for text in texts])
        found = engine.best(_messages(task), how, **options)
    seconds = time.process_time() - began
    rights = [
        score == 1 and n_passed(text.text, task.hidden) == len(task.hidden)
        for score, text in zip(found.scores, found.texts, strict=True)
    ]
    rounds = list(found.rounds) if isinstance(found, Refined) else [0] * len(rights)
    tokens = [len(text.token_ids) for text in found.texts]
    texts = [text.text for text in found.texts]
    return {"scores": found.scores, "rights": rights, "rounds": rounds, "tokens": tokens, "texts": texts} | {
        "stamps": stamps,
        "seconds": seconds,
    }


def run(args: argparse.Namespace) -> None:
    """Solve the tasks in every way."""
    ends = time.monotonic() + args.seconds
    done = {(line["task"], line["way"]) for line in lines_of(args.out)}
    with load(args, args.model) as engine:
        for task in made_tasks("functions", args.tasks, args.seed):
            for way in WAYS:
                if (task.id, way) in done or time.monotonic() > ends:
                    continue
                engine.generate("x", max_tokens=1, draft=False)  # so that no way finds the prompt read
                line = {"task": task.id, "model": args.model, "way": way} | _solved(engine, task, way)
                add_line(args.out, line)
                print(task.id, way, line["scores"], line["rights"], f"{line['seconds']:.1f} s", flush=True)


def _after(line: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return what a way has after its first texts: whether its best text is right, and what was spent."""
    scores = line["scores"][:budget]
    n = len(scores)
    place = scores.index(max(scores))
    over = n == len(line["scores"])
    later = [stamp for stamp, at in zip(line["stamps"], line["rounds"], strict=False) if at > line["rounds"][n - 1]]
    seconds = line["seconds"] if over or not later else line["stamps"][n - 1]
    return {"right": line["rights"][place], "texts": n, "tokens": sum(line["tokens"][:n]), "seconds": seconds}


def table(args: argparse.Namespace) -> None:
    """Print accuracy, tokens and seconds of each way, and McNemar's test against the best of 8."""
    lines = lines_of(args.file)
    by_way = {way: {line["task"]: line for line in lines if line["way"] == way} for way in WAYS}
    tasks = [task for task in by_way["best of 8"] if task in by_way["refine 4"]]
    best = {task: _after(by_way["best of 8"][task], 8) for task in tasks}
    rows = [_row("best of 8", best, best)]
    rows += [
        _row(f"refine 4, {n} texts", {task: _after(by_way["refine 4"][task], n) for task in tasks}, best)
        for n in BUDGETS
    ]
    for row in rows:
        print(row)
    if args.json_out is not None:
        document = {"benchmark": "refining", "model": lines[0]["model"], "rows": rows} | provenance()
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(way: str, found: dict[str, dict[str, Any]], best: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a way, by task compared with the best of 8."""
    n_right = sum(each["right"] for each in found.values())
    low, high = interval(n_right, len(found))
    means = {name: fmean(each[name] for each in found.values()) for name in ("texts", "tokens", "seconds")}
    rights = [{task: each["right"] for task, each in way.items()} for way in (found, best)]
    return (
        {"way": way, "tasks": len(found), "right": n_right, "low": low, "high": high}
        | means
        | {"against": compared(*rights)}
    )


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("model")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--tasks", type=int, default=40)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--seconds", type=float, default=3600.0, help="begin no task after so many seconds")
    running.add_argument("--threads", type=int, default=1)
    running.set_defaults(run=run)
    tabling = commands.add_parser("table")
    tabling.add_argument("file", type=Path)
    tabling.add_argument("--json-out", type=Path)
    tabling.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
