"""Measure what leaving out layers does to answers that can be checked: the final number of arithmetic word problems.

    python benchmarks/answers/lossy_answers.py qwen2.5-coder-0.5b --prompts prompts.jsonl --count 6 --max-tokens 320

Every prompt is answered greedily by the whole model, then with each `layer-skip`. The script counts the answers
whose last number is the whole model's, among those that the whole model finished within the tokens allowed, and the
tokens up to the first that differs. Ends with one line of JSON.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from switching import last_number

import edgedec
from edgedec.api.options import Lossy
from edgedec.sequence import Generation, n_common
from edgedec_apps.bench.prompts import BenchRequest, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance


def answers(args: argparse.Namespace, layer_skip: float | None) -> tuple[list[BenchRequest], list[Generation], str]:
    """Return the prompts, the answers to them, and what was left out."""
    with edgedec.load(
        args.model,
        runtime=args.runtime,
        offline=True,
        draft="off",
        n_threads=args.threads,
        lossy=Lossy(layer_skip=layer_skip, layer_skip_force=True),
    ) as engine:
        prompts = [prompt for prompt in read_prompts(args.prompts) if prompt.task == args.task][: args.count]
        requests = prepare(engine, prompts, args.max_tokens)
        found = [engine.generate(one.token_ids, temperature=0.0, max_tokens=args.max_tokens) for one in requests]
    return requests, found, found[0].stats.lossy if found else ""


def compared(whole: list[Generation], found: list[Generation]) -> dict[str, Any]:
    """Return the figures of one speed-up against the whole model's answers."""
    ended = [(a, b) for a, b in zip(whole, found, strict=True) if a.finish_reason == "stop"]
    numbers = [(last_number(a.text), last_number(b.text)) for a, b in ended]
    given = [(ours, theirs) for ours, theirs in numbers if ours is not None]
    return {
        "n_numbers": len(given),
        "n_agree": sum(ours == theirs for ours, theirs in given),
        "n_finished": sum(one.finish_reason == "stop" for one in found),
        "same_start": mean(
            n_common(a.token_ids, b.token_ids, len(a.token_ids)) for a, b in zip(whole, found, strict=True)
        ),
        "tok_s": mean(one.stats.tokens_per_s for one in found),
    }


def main() -> None:
    """Answer, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON object a line: id, task, turns")
    parser.add_argument("--task", default="math_reasoning")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--layer-skips", type=float, nargs="+", default=[1.05, 1.1, 1.2])
    parser.add_argument("--runtime", default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    requests, whole, _ = answers(args, None)
    if not requests:
        parser.error(f"{args.prompts} has no prompt of the task {args.task}")
    results = {"whole": compared(whole, whole)}
    print(f"{'whole':>6}  {results['whole']}", flush=True)
    texts = {request.id: {"whole": one.text} for request, one in zip(requests, whole, strict=True)}
    for speedup in args.layer_skips:
        _, found, lossy = answers(args, speedup)
        name = f"{speedup:g}"
        results[name] = compared(whole, found) | {"lossy": lossy}
        for request, one in zip(requests, found, strict=True):
            texts[request.id][name] = one.text
        print(f"{name:>6}  {results[name]}", flush=True)
    figures = {"model": args.model, "task": args.task, "max_tokens": args.max_tokens, "results": results}
    print(json.dumps({"benchmark": "lossy_answers", **figures, "texts": texts, **provenance()}))


if __name__ == "__main__":
    main()
