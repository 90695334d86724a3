"""Measure drafting from a user's own files: parts of held-out files are continued after learning their neighbours.

    python benchmarks/speed/learned_files.py qwen2.5-coder-1.5b edgedec
    python benchmarks/speed/learned_files.py qwen2.5-coder-1.5b edgedec --draft-head HEAD --prompts 6 --max-tokens 64

Every `--every`-th file of the folder is held out, the others are learned. A prompt is 200 tokens from the middle of a
held-out file. Each is continued greedily in four ways in turn: plain, `auto`, `auto` with the learned files, and the
same without dropping the branches that the head or the draft model rules out. Every store is emptied before every text;
what the policy knows of the drafters stays. The texts must be equal. The script ends with one line of JSON.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track

import edgedec
from edgedec.drafters.suffix.learned import NAME, LearnedDrafter
from edgedec.scheduler.draft_tree import DraftTree
from edgedec_apps.bench.provenance import report
from edgedec_apps.learning import files_of, read_text_file, sort_text

PLAIN, AUTO, LEARNED, UNPRUNED = "plain", "auto", "auto, learned", "auto, learned, no branch dropped"
_PROMPT_TOKENS = 200


def split(engine: edgedec.Engine, folder: Path, every: int) -> tuple[np.ndarray[Any, Any], list[tuple[int, ...]], int]:
    """Return the learned files' tokens, the prompts, and how many files were learned."""
    learned: list[int] = []
    prompts: list[tuple[int, ...]] = []
    n_learned = 0
    for i, path in enumerate(files_of([folder])):
        text = read_text_file(path)
        if not text:
            continue
        tokens = engine.tokenizer.encode(text, add_special=False)
        if i % every:
            learned += [*tokens, -1]
            n_learned += 1
        elif len(tokens) > 3 * _PROMPT_TOKENS:
            middle = len(tokens) // 2
            prompts.append(tuple(tokens[middle - _PROMPT_TOKENS : middle]))
    return np.array(learned, np.int32), prompts, n_learned


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=8, help="one file of so many is held out")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-head", default="off")
    parser.add_argument("--draft-model")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    prunes = DraftTree.drop_improbable
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    ratios: dict[str, list[float]] = defaultdict(list)
    load: dict[str, Any] = {"draft_head": args.draft_head, "draft_model": args.draft_model, "offline": True}
    n_different = 0
    with edgedec.load(args.model, runtime="cpu", n_ctx=1024, **load) as engine:
        tokens, prompts, n_files = split(engine, args.folder, args.every)
        drafting = engine.pool.slots[0].drafting
        assert drafting is not None, "the policy drafts"
        files = sort_text(tokens)
        without = {name: factory for name, factory in drafting.factories.items() if name != NAME}
        prompts = prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]
        for prompt in track(prompts, "prompts", console=Console(stderr=True)):
            seconds: dict[str, float] = {}
            texts = set()
            for way in (PLAIN, AUTO, LEARNED, UNPRUNED):
                drafting.store.clear()
                drafting.factories = without if way == AUTO else {**without, NAME: lambda c: LearnedDrafter(c, files)}
                options: dict[str, Any] = {"max_tokens": args.max_tokens, "ignore_end": True, "draft": way != PLAIN}
                drop = (lambda *_: None) if way == UNPRUNED else prunes
                with patch.object(DraftTree, "drop_improbable", drop):
                    made = engine.generate(prompt, temperature=0, **options)
                stats = made.stats
                texts.add(made.token_ids)
                seconds[way] = stats.total_s - stats.first_token_s
                totals[way]["tokens"] += stats.n_generated_tokens - 1
                totals[way]["steps"] += stats.n_steps
                totals[way]["accepted"] += stats.n_accepted_tokens
                totals[way]["rows"] += stats.n_draft_tokens
                totals[way]["seconds"] += seconds[way]
            n_different += len(texts) > 1
            for way, spent in seconds.items():
                ratios[way].append(seconds[PLAIN] / spent)
    results = {
        way: {
            "speedup": round(totals[PLAIN]["seconds"] / total["seconds"], 3),
            "least_and_most": [round(min(ratios[way]), 2), round(max(ratios[way]), 2)],
            "tokens_per_s": round(total["tokens"] / total["seconds"], 2),
            "accepted_a_step": round(total["accepted"] / total["steps"], 3),
            "rows_a_step": round(total["rows"] / total["steps"], 2),
        }
        for way, total in totals.items()
    }
    for way, found in results.items():
        print(f"{way:34}", found)
    settings = {"folder": args.folder.name, "files_learned": n_files, "tokens_learned": len(tokens) - n_files}
    settings |= {"n_prompts": len(prompts), "max_tokens": args.max_tokens, "every": args.every}
    settings |= {"drafter": args.draft_model or (Path(args.draft_head).name if args.draft_head != "off" else "none")}
    head = {"benchmark": "learned_files", "model": args.model, "different_texts": n_different} | settings
    report(head | {"results": results}, args.json_out)
    sys.exit(n_different > 0)


if __name__ == "__main__":
    main()
