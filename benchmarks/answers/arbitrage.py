"""Fit and try the router of Arbitrage: when is the large model's step worth asking for?

    python benchmarks/answers/arbitrage.py measure smollm2-135m qwen2.5-coder-1.5b --kind arithmetic --out steps.jsonl
    python benchmarks/answers/arbitrage.py fit steps.jsonl --json-out router.json
    python benchmarks/answers/arbitrage.py try smollm2-135m qwen2.5-coder-1.5b --kind arithmetic --router router.json \
        --out tried.jsonl --json-out FILE

`measure` writes each task greedily with the small model, a line a step, and lets the large model end the text from the
beginning of every step, all in one batch. A step of the large model is better where the large model is right from the
step's beginning, and no more so behind the small model's step. `fit` fits the router to the first two thirds of the
tasks and says how well it ranks the steps of the others (AUROC). `try` writes further tasks (another --seed) with each
model alone, with the router, whose threshold the share of steps gives that `fit` saw above it, and with chance: steps
drawn at random, as many as the router's. The time is CPU seconds of the process. The models may have different
vocabularies. `measure` and `try` go on where they stopped.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import numpy as np
from made_pairs import auroc_of, rows_of_ways
from made_runs import add_line, figures, lines_of, load, open_tasks, texts_of
from made_tasks import MadeTask
from numpy.typing import NDArray

import edgedec
from edgedec.sampling import SamplingParams
from edgedec_apps.bench.provenance import report
from edgedec_methods.arbitrage import Router, arbitrated, fitted_router, step_features, translation
from edgedec_methods.sampled_steps import Steps, write_steps

STEPS = Steps(SamplingParams(temperature=0.0), 0, "\n", 64)
MOST_STEPS = 16
SHARES = ("0.15", "0.3", "0.5")
"""Shares of steps that are given to the large model."""


def measured(small: edgedec.Engine, large: edgedec.Engine, task: MadeTask, max_tokens: int) -> dict[str, Any]:
    """Return the features of the small model's steps, and whether the large model is right from before each of them."""
    over = translation(small.tokenizer, large.tokenizer)
    features, rights = list[list[float]](), list[bool]()
    with texts_of(small, task, max_tokens) as quick, texts_of(large, task, 2 * max_tokens) as sure:
        text, read = quick.begin(), sure.begin()
        begun = [sure.fork(read)]
        while text.ended is None and len(features) < MOST_STEPS:
            before = quick.fork(text)
            (text,) = write_steps(quick, [text], STEPS.params, [0], separator=STEPS.separator, most=STEPS.most)
            features.append(step_features(before, text, len(features)).tolist())
            read = sure.extend(read, over.to_large(text.token_ids[len(before.token_ids) :]), 0.0)
            quick.drop(before)
            if text.ended is None and len(features) < MOST_STEPS:
                begun.append(sure.fork(read))
        ends = write_steps(sure, begun, STEPS.params, [0] * len(begun), separator=None)
        rights = [figures(task, sure.text(end))["right"] for end in ends]
        rights.append(figures(task, quick.text(text))["right"])
    return {"features": features, "rights": rights}


def measure(args: argparse.Namespace) -> None:
    """Add a line a task to the file."""
    key = {"small": args.small, "large": args.large, "kind": args.kind}
    with load(args, args.small) as small, load(args, args.large) as large:
        for task in open_tasks(args, key):
            line = measured(small, large, task, args.max_tokens)
            add_line(args.out, key | {"task": task.id} | line)
            print(task.id, line["rights"], flush=True)


def fit(args: argparse.Namespace) -> None:
    """Print the router, and how it ranks steps that it has not seen."""
    lines = lines_of(args.file)
    labels = [[a and not b for a, b in zip(line["rights"], line["rights"][1:], strict=False)] for line in lines]
    n = 2 * len(lines) // 3
    features = np.array([step for line in lines[:n] for step in line["features"]])
    router = fitted_router(features, [label for each in labels[:n] for label in each])
    groups = [
        [(router.chance(step), label) for step, label in zip(line["features"], each, strict=True)]
        for line, each in zip(lines[n:], labels[n:], strict=True)
    ]
    chances = [router.chance(step) for line in lines for step in line["features"]]
    found = {
        "benchmark": "arbitrage",
        **{name: lines[0][name] for name in ("small", "large", "kind")},
        "tasks": len(lines),
        "steps": sum(map(len, labels)),
        "better": sum(map(sum, labels)),
        "small right": sum(line["rights"][-1] for line in lines),
        "large right": sum(line["rights"][0] for line in lines),
        "auroc": auroc_of(groups),
        "router": asdict(router),
        "thresholds": {share: float(np.quantile(chances, 1 - float(share))) for share in SHARES},
    }
    report(found, args.json_out)


class Chance(Router):
    """Asks for steps at random; the bias is the seed."""

    def chance(self, features: Sequence[float] | NDArray[np.float64]) -> float:
        """Return a number from 0 to 1 that depends on all of the features, and on nothing that they say."""
        return Random(f"{self.bias} {list(map(float, features))}").random()


def tried(engines: Sequence[edgedec.Engine], task: MadeTask, way: tuple[Router, float], most: int) -> dict[str, Any]:
    """Return what two models write by a router and a threshold; 0 is the large model alone, above 1 the small one."""
    small, large = engines
    router, threshold = way
    began = process_time()
    if 0 < threshold <= 1:
        with texts_of(small, task, most) as quick, texts_of(large, task, 2 * most) as sure:
            over = translation(small.tokenizer, large.tokenizer)
            found = arbitrated(quick, sure, STEPS, router, threshold=threshold, between=over)
            line = figures(task, quick.text(found.text)) | {"steps": len(found.steps_kept)}
            line |= {"asked": len(found.steps_kept) - sum(found.steps_kept), "tokens": len(found.text.token_ids)}
    else:
        with texts_of(large if threshold == 0 else small, task, most) as texts:
            (text,) = write_steps(texts, [texts.begin()], STEPS.params, [0], separator=None)
            line = figures(task, texts.text(text)) | {"steps": 1, "asked": int(threshold == 0)}
            line |= {"tokens": len(text.token_ids)}
    return line | {"seconds": round(process_time() - began, 3)}


def attempt(args: argparse.Namespace) -> None:
    """Write tasks in every way; a line of random steps asks as often as the router did on the tasks before it."""
    document = json.loads(args.router.read_text(encoding="utf-8"))
    router, threshold = Router(**document["router"]), document["thresholds"][args.share]
    ways = {"small alone": (router, 2.0), "large alone": (router, 0.0), f"router {args.share}": (router, threshold)}
    with load(args, args.small) as small, load(args, args.large) as large:
        for way, how in ways.items():
            _write(args, (small, large), way, how)
        routed = [line for line in lines_of(args.out) if line["way"] == f"router {args.share}"]
        share = sum(line["asked"] for line in routed) / sum(line["steps"] for line in routed)
        for seed in range(args.random):
            _write(args, (small, large), f"random {seed}", (Chance((), float(seed)), 1 - share))
    rows = rows_of_ways(lines_of(args.out), ["tokens", "steps", "asked", "seconds"], [*ways])
    report(document | {"ways": rows}, args.json_out)


def _write(args: argparse.Namespace, engines: Sequence[edgedec.Engine], way: str, how: tuple[Router, float]) -> None:
    key = {"small": args.small, "large": args.large, "kind": args.kind, "way": way}
    for task in open_tasks(args, key):
        line = tried(engines, task, how, args.max_tokens)
        add_line(args.out, key | {"task": task.id} | line)
        print(task.id, way, line, flush=True)


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("small")
    runs.add_argument("large")
    runs.add_argument("--kind", required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--tasks", type=int, default=30)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--seconds", type=float, default=3600.0, help="begin no task after so many seconds")
    runs.add_argument("--max-tokens", type=int, default=160)
    runs.add_argument("--threads", type=int, default=1)
    commands.add_parser("measure", parents=[runs]).set_defaults(run=measure)
    fitting = commands.add_parser("fit")
    fitting.add_argument("file", type=Path)
    fitting.add_argument("--json-out", type=Path)
    fitting.set_defaults(run=fit)
    trying = commands.add_parser("try", parents=[runs])
    trying.add_argument("--router", type=Path, required=True)
    trying.add_argument("--share", choices=SHARES, default="0.3", help="of steps that the large model is to write")
    trying.add_argument("--random", type=int, default=2, help="how many times steps are drawn at random")
    trying.add_argument("--json-out", type=Path)
    trying.set_defaults(run=attempt)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
