"""One seed, one text: every drafter, merges of them and random draft lengths against plain decoding, compared with ==.

    python benchmarks/same_text.py smollm2-135m --prompts prompts.jsonl --per-task 4 --max-tokens 60
    python benchmarks/same_text.py qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b
    python benchmarks/same_text.py smollm2-135m --ways skip exit --tasks chat qa math_reasoning code_edit

Greedy and at a temperature, on the cpu runtime. Ends with one line of JSON; the exit code is 1 where a text differs.
exit, which declines where no exit promises more than plain decoding, drafts here all the same.
"""

import argparse
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.progress import track

import edgedec
import edgedec.drafters.exit as exit_drafter
from edgedec_apps.bench_prompts import DEFAULT_PROMPTS, BenchRequest, prepare, read_prompts

WAYS = ("suffix", "common", "recycling", "trigram", "stand", "suffix+recycling+stand", "auto")
WITH_MODEL = ("model", "cascade", "suffix+model")


def texts(engine: edgedec.Engine, request: BenchRequest, n_tokens: int, *, draft: bool) -> list[Any]:
    """Return the answers to a prompt, greedy and sampled."""
    options: dict[str, Any] = {"seed": request.seed, "max_tokens": n_tokens, "draft": draft}
    return [engine.generate(request.token_ids, temperature=t, **options) for t in (0.0, 0.8)]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--draft-model")
    parser.add_argument("--ways", nargs="+", help="drafters (default: all but those of the target's own layers)")
    parser.add_argument("--tasks", nargs="+", help="prompts of these only")
    args = parser.parse_args()
    ways = args.ways or WAYS + (WITH_MODEL if args.draft_model else ())
    exit_drafter._LEAST_GAIN = 0.0
    load: dict[str, Any] = {"runtime": "cpu", "offline": True}
    lengths = random.Random(0)
    results = {}
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()), "prompt")
        plain = stack.enter_context(edgedec.load(args.model, draft="off", **load))
        engines = {}
        for way in ways:
            n_max = lengths.randint(1, 15)
            model = args.draft_model if way in (*WITH_MODEL, "auto") else None
            engine = edgedec.load(args.model, draft=way, draft_model=model, n_draft_max=n_max, **load)
            engines[way] = stack.enter_context(engine)
            results[way] = {"n_draft_max": n_max, "texts": 0, "different": 0, "accepted": 0}
        prompts = read_prompts(args.prompts, args.per_task)
        prompts = [prompt for prompt in prompts if args.tasks is None or prompt.task in args.tasks]
        requests = prepare(plain, prompts, args.max_tokens)
        for request in track(requests, "prompts", console=Console(stderr=True)):
            expected = texts(plain, request, args.max_tokens, draft=False)
            plain.save_prompt_cache(cache)  # read once: that any chunks give the same bits is tested elsewhere
            for way, engine in engines.items():
                engine.load_prompt_cache(cache)
                found = texts(engine, request, args.max_tokens, draft=True)
                results[way]["texts"] += len(found)
                results[way]["different"] += sum(
                    a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True)
                )
                results[way]["accepted"] += sum(answer.stats.n_accepted_tokens for answer in found)
    for way, result in results.items():
        print(
            f"{way:24} at most {result['n_draft_max']:2} nodes, {result['accepted']:6} tokens accepted: "
            f"{result['different']} of {result['texts']} texts differ"
        )
    print(json.dumps({"benchmark": "same_text", "model": args.model, "results": results} | provenance()))
    sys.exit(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    main()
