"""Measure what momentum does to loops: repeated 4-grams and perplexity of texts by its strength.

    python benchmarks/texts/momentum.py smollm2-135m --prompts prompts.jsonl --count 20 --max-tokens 256

Every prompt is answered with each strength. A text's repeated 4-grams are the share of its 4-grams that stood in it
before. The perplexity is the model's own, of the text that it wrote, before any penalty: it says how far the text is
from what the model finds likely. A text loops where over half of its last 64 tokens' 4-grams are repeated. Drafts
change nothing; the texts with drafts and without are compared. Ends with one line of JSON.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

from prompts import load_prompts

import edgedec
from edgedec.sequence import Generation
from edgedec_apps.bench.provenance import provenance


def repeated_share(ids: tuple[int, ...], n: int = 4, last: int | None = None) -> float:
    """Return the share of the n-grams (of the `last` tokens, or of all) that stood in the text before.

    >>> repeated_share((1, 2, 3, 4, 1, 2, 3, 4), 4)
    0.2
    """
    grams = [ids[i : i + n] for i in range(len(ids) - n + 1)]
    counted = range(max(0, len(grams) - last) if last else 0, len(grams))
    return mean(grams[i] in grams[:i] for i in counted) if counted else 0.0


def figures(texts: list[Generation]) -> dict[str, Any]:
    """Return what the texts of one strength add up to."""
    logprobs = [output.logprob for text in texts for output in text.outputs if output.logprob is not None]
    ids = [text.token_ids for text in texts]
    return {
        "n_tokens": sum(map(len, ids)),
        "repeated_4_grams": round(mean(map(repeated_share, ids)), 4),
        "n_loops": sum(repeated_share(one, last=64) > 0.5 for one in ids),
        "n_ended": sum(text.finish_reason == "stop" for text in texts),
        "perplexity": round(math.exp(-mean(logprobs)), 3),
    }


def main() -> None:
    """Answer, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON object a line: task, turns")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--raw", action="store_true", help="continue the prompts as text, without a chat template")
    parser.add_argument("--compare", action="store_true", help="also write each text without drafts; exit 1 if unequal")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    n_unequal = 0
    with edgedec.load(args.model, runtime="cpu", offline=True) as engine:
        prompts = [
            engine.prompt_ids(text) if args.raw else engine.chat_ids([{"role": "user", "content": text}])
            for text in load_prompts(args.prompts, args.count)
        ]
        for strength in args.strengths:
            options: dict[str, Any] = {"temperature": args.temperature, "seed": 1, "momentum": strength, "logprobs": 0}
            options["max_tokens"] = args.max_tokens
            texts = [engine.generate(ids, **options) for ids in prompts]
            if args.compare:
                plain = [engine.generate(ids, draft=False, **options) for ids in prompts]
                n_unequal += sum(a.token_ids != b.token_ids for a, b in zip(texts, plain, strict=True))
            results[f"{strength:g}"] = figures(texts)
            print(f"{strength:6g}  {results[f'{strength:g}']}", flush=True)
    settings = {name: getattr(args, name) for name in ("model", "count", "max_tokens", "temperature", "raw", "compare")}
    document = {"benchmark": "momentum"} | settings | {"results": results, "n_unequal": n_unequal} | provenance()
    print(json.dumps(document))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(1 if n_unequal else 0)


if __name__ == "__main__":
    main()
