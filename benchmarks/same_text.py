"""One seed, one text: every drafter, merges of them and random draft lengths against plain decoding, compared with ==.

    python benchmarks/same_text.py smollm2-135m --prompts prompts.jsonl --per-task 4 --max-tokens 60
    python benchmarks/same_text.py qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b

Greedy and at a temperature, on the cpu runtime. Ends with one line of JSON; the exit code is 1 where a text differs.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import edgedec
from edgedec_apps.bench_prompts import DEFAULT_PROMPTS, prepare, read_prompts

WAYS = ("suffix", "common", "recycling", "trigram", "stand", "suffix+recycling+stand", "auto")
WITH_MODEL = ("model", "cascade", "suffix+model")


def texts(engine: edgedec.Engine, requests: Any, args: argparse.Namespace, *, draft: bool) -> list[tuple[int, ...]]:
    """Return the tokens of every prompt, greedy and sampled."""
    found = []
    for request in requests:
        for temperature in (0.0, 0.8):
            options = {"temperature": temperature, "seed": request.seed, "max_tokens": args.max_tokens}
            found.append(engine.generate(request.token_ids, draft=draft, **options).token_ids)
    return found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--draft-model")
    args = parser.parse_args()
    lengths = random.Random(0)
    prompts = read_prompts(args.prompts, args.per_task)
    with edgedec.load(args.model, draft="off", runtime="cpu", offline=True) as engine:
        requests = prepare(engine, prompts, args.max_tokens)
        plain = texts(engine, requests, args, draft=False)
    results = {}
    for way in WAYS + (WITH_MODEL if args.draft_model else ()):
        n_max = lengths.randint(1, 15)
        model = args.draft_model if way in (*WITH_MODEL, "auto") else None
        with edgedec.load(
            args.model, draft=way, draft_model=model, n_draft_max=n_max, runtime="cpu", offline=True
        ) as engine:
            found = texts(engine, requests, args, draft=True)
        n_different = sum(a != b for a, b in zip(found, plain, strict=True))
        results[way] = {"n_draft_max": n_max, "texts": len(found), "different": n_different}
        print(f"{way:24} at most {n_max:2} nodes: {n_different} of {len(found)} texts differ", flush=True)
    print(json.dumps({"benchmark": "same_text", "model": args.model, "results": results}))
    sys.exit(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    main()
