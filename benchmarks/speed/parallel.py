"""Measure what sharing forwards brings: the same requests one after the other, and several at once.

    python benchmarks/speed/parallel.py qwen2.5-coder-1.5b --parallel 2

With --draft-head HEAD, several at once are compared without a trained head and with it; with --draft-model MODEL,
without any drafts and with a draft model that drafts for each of them.

Both ways answer the same prompts in turn, in one process, with one copy of the weights per way. Every text must equal
the one of the way that is answered first. The script prints the tokens per second of all requests together, prefill
included. Ends with one line of JSON; the exit code is 1 where a text differs.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import edgedec
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_apps.bench.provenance import report


def answers(engine: edgedec.Engine, prompts: Sequence[str], n_at_once: int, n_tokens: int) -> tuple[list[Any], float]:
    """Answer all prompts, so many at once; return the tokens of each and the seconds of all."""
    engine.forget()

    def answer(prompt: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": prompt}]
        return engine.chat(messages, temperature=0, max_tokens=n_tokens, reuse="exact").token_ids

    started = perf_counter()
    with ThreadPoolExecutor(n_at_once) as pool:
        found = list(pool.map(answer, prompts))
    return found, perf_counter() - started


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-head")
    parser.add_argument("--draft-model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = [prompt.text for prompt in read_prompts(args.prompts, args.per_task)]
    load: dict[str, Any] = {"runtime": "cpu", "offline": True, "draft": args.draft, "n_ctx": 2048, "draft_head": "off"}
    many = load | {"n_parallel": args.parallel}
    ways = {"one after the other": (1, load), f"{args.parallel} at once": (args.parallel, many)}
    if args.draft_head is not None:
        ways = {"without the head": (args.parallel, many)}
        ways["with the head"] = args.parallel, many | {"draft_head": args.draft_head and Path(args.draft_head).name}
    if args.draft_model is not None:
        ways = {"without drafts": (args.parallel, many | {"draft": None})}
        ways["with the draft model"] = args.parallel, many | {"draft_model": args.draft_model}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    differ = 0
    with ExitStack() as opened:
        engines = {way: opened.enter_context(edgedec.load(args.model, **options)) for way, (_, options) in ways.items()}
        expected: list[Any] | None = None
        for i in range(args.rounds + 1):
            for way in list(ways)[:: 1 if i % 2 else -1]:
                found, seconds = answers(engines[way], prompts, ways[way][0], args.max_tokens)
                expected = found if expected is None else expected
                differ += sum(a != b for a, b in zip(found, expected, strict=True))
                if i:  # the first round warms both
                    rates[way].append(sum(map(len, found)) / seconds)
                print(f"round {i}, {way}: {sum(map(len, found)) / seconds:.1f} tokens/s", flush=True)
    first, second = (median(found) for found in rates.values())
    plain, other = ways
    print(f"{args.parallel} requests: {other} {second / first:.2f} x {plain}; {differ} texts differ")
    document = {"benchmark": "parallel", "model": args.model, "draft": args.draft, "parallel": args.parallel}
    document |= {"draft_model": args.draft_model, "draft_head": args.draft_head and Path(args.draft_head).name}
    document |= {"ratio": second / first, "tokens_per_s": rates, "different": differ}
    report(document, args.out)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
