"""Measure what drafting brings and costs on the synthetic mixture of experts of benchmarks/speed/moe.py (cpu runtime).

    python benchmarks/speed/moe.py --prepare
    python benchmarks/speed/moe_drafts.py

Every prompt of `edgedec bench` is continued by 96 tokens without drafts, with `draft="auto"`, and without drafts once
more, in changing order; the last is noise. In the first pass all texts are new: random weights hardly repeat
themselves, so that drafts can only lose. In the second pass every text comes again, and the suffix drafter knows it: as
much as a text can repeat. Texts must be equal. A step's time is told in parts: drafting and learning, the forward,
verification, and the rest. The last line is JSON.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe import model_path

import edgedec
from edgedec.stats import DecodeStats
from edgedec_apps.bench.prompts import read_prompts
from edgedec_apps.bench.provenance import report

N_TOKENS = 96
VARIANTS = {"off": "off", "auto": "auto", "off again": "off"}


def of_steps(found: Sequence[DecodeStats]) -> dict[str, float]:
    """Return what the steps after the first token did and took, over all texts."""
    n_steps = sum(stats.n_steps for stats in found)
    n_tokens = sum(stats.n_generated_tokens for stats in found)
    seconds = {
        "draft": sum(stats.draft_s for stats in found),
        "forward": sum(stats.forward_s for stats in found),
        "verify": sum(stats.verify_s for stats in found),
    }
    total = sum(stats.total_s - stats.first_token_s for stats in found)
    seconds |= {"rest": total - sum(seconds.values())}
    return {
        "tokens": n_tokens,
        "steps": n_steps,
        "drafts": sum(stats.n_drafts for stats in found),
        "draft_tokens": sum(stats.n_draft_tokens for stats in found),
        "accepted": sum(stats.n_accepted_tokens for stats in found),
        "ms_per_token": 1000 * total / n_tokens,
    } | {f"{name}_ms_per_step": 1000 * spent / n_steps for name, spent in seconds.items()}


def measure(n_prompts: int) -> dict[str, Any]:
    """Return the figures of both passes."""
    prompts = read_prompts()[:n_prompts]
    engines = {
        name: edgedec.load(str(model_path()), runtime="cpu", n_ctx=2048, draft=draft)
        for name, draft in VARIANTS.items()
    }
    figures: dict[str, Any] = {"prompts": len(prompts)}
    for part in ("new texts", "the same texts again"):
        found: dict[str, list[DecodeStats]] = {name: [] for name in VARIANTS}
        for i, prompt in enumerate(prompts):
            texts = set()
            for name in list(VARIANTS)[:: 1 if i % 2 else -1]:
                result = engines[name].generate(prompt.text, max_tokens=N_TOKENS, temperature=0.0)
                texts.add(result.text)
                found[name].append(result.stats)
            if len(texts) > 1:
                raise SystemExit(f"the texts of prompt {i} differ")
        figures[part] = {name: of_steps(each) for name, each in found.items()}
        times = {name: each["ms_per_token"] for name, each in figures[part].items()}
        figures[part]["speed of auto"] = times["off"] / times["auto"]
        figures[part]["speed of off again"] = times["off"] / times["off again"]
    for engine in engines.values():
        engine.close()
    return figures


def main() -> int:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20, help="at most so many (default: 20)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    report({"benchmark": "moe_drafts"} | measure(arguments.prompts), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
