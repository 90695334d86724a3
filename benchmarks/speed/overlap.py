"""Compare a draft model that drafts while the target verifies with one that waits: texts, and drafts that were ready.

    edgedec export smollm2-135m --to onnx --target npu --out smollm2-npu
    python benchmarks/speed/overlap.py smollm2-npu --runtime npu --draft-model smollm2-135m --max-tokens 48

The draft model is on the cpu runtime. Each way generates the same number of tokens, with the drafter pinned; a text
that differs ends the script with exit code 1. Where the target computes on the same cores (an emulator does, and a
GGUF without a GPU), the times are no speeds: each of the two models slows the other down. Ends with one line of JSON.
"""

import argparse
import json
import sys
from typing import Any

import edgedec
from edgedec.api.options import DraftOptions
from edgedec_apps.bench.provenance import provenance

PROMPT = "Once upon a time there was a small river that wanted to see the sea. One morning it asked the old mountain:"


def measure(args: argparse.Namespace, way: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the text of one way to decode, and its figures."""
    drafting: dict[str, Any] = {"draft": "off"}
    if way != "plain":
        overlap = DraftOptions(overlap=way == "overlapped")
        drafting = {"draft": "model", "draft_model": args.draft_model, "drafting": overlap}
    with edgedec.load(
        args.model,
        runtime=args.runtime,
        device=args.device,
        n_ctx=args.context,
        n_draft_max=args.draft_max,
        n_threads=args.threads,
        offline=True,
        **drafting,
    ) as engine:
        found = engine.generate(
            args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, ignore_end=True
        )
    stats = found.stats
    counts = stats.drafters.get("model", {})
    figures = {
        "steps": stats.n_steps,
        "tokens_per_step": round((stats.n_generated_tokens - 1) / max(1, stats.n_steps), 2),
        "forward_s": round(stats.forward_s, 2),
        "draft_s": round(stats.draft_s, 2),
        "total_s": round(stats.total_s, 2),
        "drafted": {name: int(counts[name]) for name in ("nodes", "ahead", "used") if name in counts},
        "reasons": stats.reasons,
    }
    return found.token_ids, figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target")
    parser.add_argument("--draft-model", required=True, help="a GGUF with the target's tokenizer")
    parser.add_argument("--runtime", default="auto", help="of the target (default: auto)")
    parser.add_argument("--device", help="of the target")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--draft-max", type=int, default=6, help="most tokens of a draft (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each model (default: the cores)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--plain", action="store_true", help="decode without drafts, too")
    args = parser.parse_args()
    texts: dict[str, tuple[int, ...]] = {}
    results: dict[str, dict[str, Any]] = {}
    for way in ("waiting", "overlapped", *(["plain"] if args.plain else [])):
        texts[way], results[way] = measure(args, way)
        print(f"{way:10} {results[way]}", flush=True)
    equal = len(set(texts.values())) == 1
    options = {name: getattr(args, name) for name in ("runtime", "device", "draft_max", "max_tokens", "temperature")}
    document = {"benchmark": "overlap", "model": args.model, "draft_model": args.draft_model, **options}
    print(json.dumps({**document, "equal_texts": equal, "ways": results, **provenance()}))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
