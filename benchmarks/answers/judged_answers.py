"""Measure what choosers that write judgements in words do to answers: Archon, DeepSeek-GRM, samples judged together.

    python benchmarks/answers/judged_answers.py qwen2.5-coder-1.5b --kind arithmetic --tasks 40 --out answers.jsonl

Each task is answered greedily, as the likeliest of four texts, and by each chooser, of four or five texts. The command
adds a line a task to its file and skips what the file has, so it can be interrupted; it prints how many answers of each
way are right, the CPU seconds of a task, and the exact sign test against greedy and against likelihood.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

from made_pairs import compared
from made_runs import add_line, figures, lines_of, load, open_tasks
from made_tasks import KINDS, MadeTask

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec_methods.archon import layers_of, through_layers
from edgedec_methods.critiques import critic, meta_judge
from edgedec_methods.multilingual import multilingual

STACK = "\n".join(f"[[layer]]\n{layer}" for layer in ('kind = "generate"\nn = 3', 'kind = "verify"', 'kind = "rank"'))
Way = Callable[[edgedec.Engine, MadeTask, dict[str, Any]], str]


def _best(choose: str) -> Way:
    def answer(engine: edgedec.Engine, task: MadeTask, options: dict[str, Any]) -> str:
        scorer = critic(engine, 3, meta_judge(engine), **options) if choose == "score" else None
        how = BestOf(4, choose, scorer=scorer, scorer_seconds=900.0)
        return best(engine, [{"role": "user", "content": task.prompt}], how, **options).text

    return answer


WAYS: dict[str, Way] = {
    "greedy": lambda engine, task, options: engine.chat(task.prompt, **options | {"temperature": 0}).text,
    "likely": _best("likely"),
    "multilingual": lambda engine, task, options: (
        multilingual(engine, task.prompt, max_tokens=options["max_tokens"]).text
    ),
    "grm": _best("score"),
    "archon": lambda engine, task, options: (
        through_layers(layers_of(STACK), {"model": engine}, task.prompt, **options)[0].text
    ),
}


def main() -> None:
    """Answer the tasks in each way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kind", choices=KINDS, default="arithmetic")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no task of a way after so many seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with load(args, args.model) as engine:
        for way, answer in WAYS.items():
            key = {"model": args.model, "kind": args.kind, "way": way}
            for task in open_tasks(args, key):
                begun = process_time()
                text = answer(engine, task, {"temperature": 0.7, "max_tokens": 200, "seed": 1})
                spent = {"task": task.id, "seconds": process_time() - begun, "text": text}
                add_line(args.out, key | spent | figures(task, text))
    lines = [line for line in lines_of(args.out) if (line["model"], line["kind"]) == (args.model, args.kind)]
    rights = {way: {line["task"]: line["right"] for line in lines if line["way"] == way} for way in WAYS}
    for way, right in rights.items():
        seconds = fmean(line["seconds"] for line in lines if line["way"] == way)
        others = {other: compared(right, rights[other]) for other in ("greedy", "likely") if other != way}
        print(f"{way}: {sum(right.values())} of {len(right)} right, {seconds:.1f} s a task, {others}")


if __name__ == "__main__":
    main()
