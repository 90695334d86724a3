"""Count the tokens a step that trained drafters bring, by the kind of prompt: what a quantization costs.

    python benchmarks/heads/head_acceptance.py MODEL HEAD [HEAD ...] --per-task 2 -n 64
    python benchmarks/heads/head_acceptance.py MODEL DRAFT.gguf --kind model --per-task 2 -n 64

The prompts are those of `edgedec bench`. Decoding is greedy on the cpu runtime, and the head or the draft model alone
drafts (at most 4 tokens). The texts are the same for all drafters, so only the number of steps differs.
"""

import argparse
from typing import Any

import edgedec
from edgedec_apps.bench.prompts import read_prompts

_N_CTX = 2048


def tokens_a_step(model: str, drafter: dict[str, Any], per_task: int, n_tokens: int) -> dict[str, float]:
    """Return the tokens a step by task, and over all prompts under "all"."""
    counts: dict[str, tuple[int, int]] = {}
    with edgedec.load(model, runtime="cpu", n_draft_max=4, n_ctx=_N_CTX, **drafter) as engine:
        for prompt in read_prompts(per_task=per_task):
            token_ids = engine.chat_ids([{"role": "user", "content": prompt.text}])
            if len(token_ids) + n_tokens > _N_CTX:
                continue
            result = engine.generate(token_ids, max_tokens=n_tokens, temperature=0)
            for kind in (prompt.task, "all"):
                tokens, steps = counts.get(kind, (0, 0))
                # The first token comes from the prompt's forward, which is no step.
                counts[kind] = (tokens + len(result.token_ids) - 1, steps + result.stats.n_steps)
    return {kind: tokens / steps for kind, (tokens, steps) in counts.items() if steps}


def main() -> None:
    """Print a line for each head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target: a path or a name")
    parser.add_argument("heads", nargs="+", help="heads, or draft models: paths or names")
    parser.add_argument("--kind", choices=["head", "model"], default="head", help="what they are (default: head)")
    parser.add_argument("--per-task", type=int, default=2, help="prompts of each task (default: 2)")
    parser.add_argument("-n", "--n-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    options = parser.parse_args()
    for head in options.heads:
        drafter = {"draft": options.kind, f"draft_{options.kind}": head}
        found = tokens_a_step(options.model, drafter, options.per_task, options.n_tokens)
        print(head, " ".join(f"{kind} {value:.3f}" for kind, value in sorted(found.items())), flush=True)


if __name__ == "__main__":
    main()
