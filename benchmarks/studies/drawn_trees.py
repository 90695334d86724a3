"""Compare the rules of verification and the shapes of drafted trees with `coupled`, at equal rows.

    python benchmarks/studies/drawn_trees.py qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b --rows 6
    python benchmarks/studies/drawn_trees.py qwen2.5-coder-1.5b --draft-head HEAD --rows 6 --per-task 1 --max-tokens 24
    python benchmarks/studies/drawn_trees.py qwen2.5-coder-1.5b --draft-head HEAD --rows 6 \
        --ways coupled:chain recursive:beam:2

The drafter is pinned, and each step verifies as many nodes as `--rows` says, or fewer where a shape drafts fewer. All
ways take turns on every prompt. For each way and temperature the script prints the tokens accepted a step, the time of
a step and the tokens a second after the first token; it ends with one line of JSON.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import edgedec
from edgedec.drafters.drawn_trees import parse_shape
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance

PLAIN = "plain"
WAYS = (
    PLAIN,
    "coupled:chain",
    "coupled:grow",
    "tokenwise:chain",
    "block:chain",
    "recursive:siblings:2",
    "recursive:siblings:3",
    "recursive:beam:2",
    "recursive:beam:3",
    "recursive:grow",
    "kseq:paths:2",
    "multipath:paths:2",
)


def count(total: dict[str, float], stats: edgedec.DecodeStats) -> None:
    """Add the steps of a text, the first token's left out."""
    total["tokens"] += stats.n_generated_tokens - 1
    total["steps"] += stats.n_steps
    total["rows"] += stats.n_draft_tokens
    total["accepted"] += stats.n_accepted_tokens
    total["draft_s"] += stats.draft_s
    total["forward_s"] += stats.forward_s
    total["seconds"] += stats.total_s - stats.first_token_s


def figures(total: dict[str, float]) -> dict[str, float]:
    """Return the figures of a way: what it made, and the means of its steps."""
    steps = total["steps"]
    return {
        "accepted_a_step": round(total["accepted"] / steps, 3),
        "rows_a_step": round(total["rows"] / steps, 2),
        "step_ms": round(1000 * total["seconds"] / steps, 2),
        "draft_ms": round(1000 * total["draft_s"] / steps, 2),
        "forward_ms": round(1000 * total["forward_s"] / steps, 2),
        "tokens_per_s": round(total["tokens"] / total["seconds"], 2),
        "steps": int(steps),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-head", default="off")
    parser.add_argument("--rows", type=int, default=6, help="nodes of a draft")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--tasks", nargs="+", help="prompts of these only")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="RULE:SHAPE, or plain")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    made_by, drafter = provenance(), "model" if args.draft_model else "head"
    totals: dict[tuple[float, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    load: dict[str, Any] = {"draft": drafter, "draft_model": args.draft_model, "draft_head": args.draft_head}
    with edgedec.load(args.model, runtime="cpu", offline=True, n_draft_max=args.rows, **load) as engine:
        prompts = read_prompts(args.prompts, args.per_task)
        prompts = [prompt for prompt in prompts if args.tasks is None or prompt.task in args.tasks]
        requests = prepare(engine, prompts, args.max_tokens)
        for request in track(requests, "prompts", console=Console(stderr=True)):
            for temperature in args.temperatures:
                for way in args.ways:
                    rule, _, shape = way.partition(":")
                    drafting = engine.pool.slots[0].drafting
                    assert drafting is not None, "a drafter is pinned"
                    drafting.tree = parse_shape(shape) if shape else None
                    made = engine.generate(
                        request.token_ids,
                        temperature=temperature,
                        seed=request.seed,
                        max_tokens=args.max_tokens,
                        ignore_end=True,
                        draft=way != PLAIN,
                        verify="coupled" if way == PLAIN else rule,
                    )
                    count(totals[temperature, way], made.stats)
    results = {f"{temperature:g} {way}": figures(total) for (temperature, way), total in totals.items()}
    for name, found in sorted(results.items()):
        print(f"{name:28}", *(f"{key} {value:8}" for key, value in found.items()))
    settings = {
        "drafter": args.draft_model or Path(args.draft_head).name,
        "rows": args.rows,
        "n_prompts": len(requests),
    }
    line = {"benchmark": "drawn_trees", "model": args.model, "max_tokens": args.max_tokens} | settings
    text = json.dumps(line | {"results": results} | made_by)
    print(text)
    if args.json_out is not None:
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
