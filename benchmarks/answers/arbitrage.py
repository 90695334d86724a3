"""Fit and try the router of Arbitrage: when is the large model's step worth asking for?

    python benchmarks/answers/arbitrage.py measure smollm2-135m qwen2.5-coder-1.5b --kind arithmetic --out steps.jsonl
    python benchmarks/answers/arbitrage.py fit steps.jsonl --json-out router.json
    python benchmarks/answers/arbitrage.py try smollm2-135m qwen2.5-coder-1.5b --kind arithmetic --router router.json \
        --out tried.jsonl

`measure` writes each task greedily with the small model, a line a step, and lets the large model end the text from the
beginning of every step, all in one batch. A step of the large model is better where the large model is right from the
step's beginning, and no more so behind the small model's step. `fit` fits the router to the first two thirds of the
tasks and says how well it ranks the steps of the others (AUROC). `try` writes further tasks (another --seed) with the
router. The models may have different vocabularies. `measure` and `try` go on where they stopped.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from made_pairs import auroc_of
from made_runs import add_line, figures, lines_of, load, open_tasks, texts_of

import edgedec
from edgedec.sampling import SamplingParams
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.evaluation.made_tasks import MadeTask
from edgedec_methods.arbitrage import Router, arbitrated, fitted_router, step_features, translation
from edgedec_methods.sampled_steps import Steps, write_steps

STEPS = Steps(SamplingParams(temperature=0.0), 0, "\n", 64)
MOST_STEPS = 16


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
    }
    print(json.dumps(found, indent=1))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(found | provenance(), indent=1) + "\n", encoding="utf-8")


def attempt(args: argparse.Namespace) -> None:
    """Write tasks with the router at several thresholds; 0 is the large model alone, more than any chance the small."""
    router = Router(**json.loads(args.router.read_text(encoding="utf-8"))["router"])
    with load(args, args.small) as small, load(args, args.large) as large:
        over = translation(small.tokenizer, large.tokenizer)
        for threshold in args.thresholds:
            key = {"small": args.small, "large": args.large, "kind": args.kind, "threshold": threshold}
            for task in open_tasks(args, key):
                with (
                    texts_of(small, task, args.max_tokens) as quick,
                    texts_of(large, task, 2 * args.max_tokens) as sure,
                ):
                    found = arbitrated(quick, sure, STEPS, router, threshold=threshold, between=over)
                    line = figures(task, quick.text(found.text)) | {"large": found.n_large}
                    line |= {"tokens": len(found.text.token_ids), "kept": fmean(found.kept)}
                add_line(args.out, key | {"task": task.id} | line)
            lines = [line for line in lines_of(args.out) if line["threshold"] == threshold]
            if lines:
                means = {name: round(fmean(line[name] for line in lines), 2) for name in ("tokens", "large", "kept")}
                print(threshold, f"{sum(line['right'] for line in lines)} of {len(lines)} right", means, flush=True)


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
    trying.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 0.2, 1.0])
    trying.set_defaults(run=attempt)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
