"""Compare texts with == : every drafter, merges of drafters and random draft lengths against plain decoding.

    python benchmarks/texts/same_text.py smollm2-135m --prompts prompts.jsonl --per-task 4 --max-tokens 60
    python benchmarks/texts/same_text.py qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b
    python benchmarks/texts/same_text.py smollm2-135m --ways skip exit --tasks chat qa math_reasoning code_edit
    python benchmarks/texts/same_text.py smollm2-135m --runtime llamacpp --long 20 --ways suffix auto --json-out FILE

Each prompt is decoded greedily and at a temperature. --long adds prompts of 500 to 3,000 tokens, cut from the
documents of this checkout. The script ends with one line of JSON, which says for each drafter in how many texts it
drafted and why not in the others; the exit code is 1 where a text differs. The drafter `exit` drafts here even where
it expects no gain.
"""

import argparse
import json
import random
import sys
import tempfile
import zlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import edgedec
import edgedec_methods.exit as exit_drafter
from edgedec import Generation
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, BenchRequest, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

WAYS = ("suffix", "common", "recycling", "trigram", "stand", "suffix+recycling+stand", "auto")
LONG_TOKENS = (500, 3000)
DOCS = Path(__file__).parents[2] / "docs"
WITH_MODEL = ("model", "cascade", "suffix+model")


def long_prompts(engine: edgedec.Engine, n: int) -> list[BenchRequest]:
    """Return prompts of evenly spaced lengths, each the beginning of another part of the documents."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    least, most = LONG_TOKENS
    requests = []
    for i in range(n):
        n_tokens = least + (most - least) * i // max(n - 1, 1)
        start = len(text) * i // n
        ids = engine.tokenizer.encode((text[start:] + text)[: 8 * n_tokens])[:n_tokens]
        name = f"long-{n_tokens}"
        requests.append(BenchRequest(name, "long", tuple(ids), zlib.crc32(name.encode())))
    return requests


def count(result: dict[str, Any], found: list[Generation], expected: list[Generation]) -> None:
    """Add the texts of a prompt to a drafter's counts."""
    result["texts"] += len(found)
    result["different"] += sum(a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True))
    result["drafted"] += sum(answer.stats.n_drafts > 0 for answer in found)
    result["accepted"] += sum(answer.stats.n_accepted_tokens for answer in found)
    result["reasons"].update({reason for answer in found for reason in answer.stats.reasons if "off" in reason})


def texts(engine: edgedec.Engine, request: BenchRequest, n_tokens: int, *, draft: bool) -> list[Generation]:
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
    parser.add_argument("--runtime", default="cpu", help="cpu (the default), llamacpp or onnx")
    parser.add_argument("--long", type=int, default=0, help="how many long prompts to add (default: none)")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    ways = args.ways or WAYS + (WITH_MODEL if args.draft_model else ())
    exit_drafter._LEAST_GAIN = 0.0
    made_by = provenance()  # before the checkout can change
    load: dict[str, Any] = {"runtime": args.runtime, "offline": True}
    if args.long:
        load["n_ctx"] = LONG_TOKENS[1] + args.max_tokens + 1
    lengths = random.Random(0)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()), "prompt")
        plain = stack.enter_context(edgedec.load(args.model, draft="off", **load))
        engines = {}
        for way in ways:
            n_max = lengths.randint(1, 15)
            model = args.draft_model if way in (*WITH_MODEL, "auto") else None
            engine = edgedec.load(args.model, draft=way, draft_model=model, n_draft_max=n_max, **load)
            engines[way] = stack.enter_context(engine)
            results[way] = {"n_draft_max": n_max, "texts": 0, "different": 0, "drafted": 0, "accepted": 0}
            results[way]["reasons"] = Counter()
        prompts = read_prompts(args.prompts, args.per_task)
        prompts = [prompt for prompt in prompts if args.tasks is None or prompt.task in args.tasks]
        requests = prepare(plain, prompts, args.max_tokens) + long_prompts(plain, args.long)
        for request in track(requests, "prompts", console=Console(stderr=True)):
            expected = texts(plain, request, args.max_tokens, draft=False)
            save_prompt_cache(plain, cache)  # read once: that any chunks give the same bits is tested elsewhere
            for way, engine in engines.items():
                load_prompt_cache(engine, cache)
                count(results[way], texts(engine, request, args.max_tokens, draft=True), expected)
    for way, result in results.items():
        print(
            f"{way:24} at most {result['n_draft_max']:2} nodes, {result['drafted']} texts drafted, "
            f"{result['accepted']:6} tokens accepted: {result['different']} of {result['texts']} texts differ"
        )
    settings = {"runtime": args.runtime, "max_tokens": args.max_tokens, "n_prompts": len(requests)}
    line = json.dumps(
        {"benchmark": "same_text", "model": Path(args.model).name} | settings | {"results": results} | made_by
    )
    print(line)
    if args.json_out is not None:
        args.json_out.write_text(line + "\n", encoding="utf-8")
    sys.exit(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    main()
