"""Compare trained drafters: tokens a step, milliseconds a draft and the speed of texts, by the kind of prompt.

    python benchmarks/heads/head_acceptance.py MODEL HEAD [HEAD ...] --per-task 2 -n 64 --json-out FILE
    python benchmarks/heads/head_acceptance.py MODEL DRAFT.gguf --kind model --per-task 2 -n 64

Decoding is on the cpu runtime, and the head or the draft model alone drafts, with as many tokens as allowed. Every
prompt is answered by plain decoding and with each drafter in turn, in an order that changes. The texts must be equal.
Speeds are times plain decoding, without the prompt's time.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgedec
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_apps.bench.provenance import report

_N_CTX = 2048
_PLAIN = "plain"


@dataclass(slots=True)
class Total:
    """What the answers of one drafter to some prompts took.

    Attributes:
        n_tokens: Tokens that steps wrote. The first token comes from the prompt's forward, which is no step.
        n_steps: Steps.
        n_drafts: Drafts.
        draft_s: Seconds of all drafts.
        seconds: Seconds behind the prompts.
    """

    n_tokens: int = 0
    n_steps: int = 0
    n_drafts: int = 0
    draft_s: float = 0.0
    seconds: float = 0.0

    def add(self, result: edgedec.Generation) -> None:
        """Add an answer."""
        stats = result.stats
        self.n_tokens += len(result.token_ids) - 1
        self.n_steps += stats.n_steps
        self.n_drafts += stats.n_drafts
        self.draft_s += stats.draft_s
        self.seconds += stats.total_s - stats.first_token_s


def totals(engines: dict[str, edgedec.Engine], options: argparse.Namespace) -> dict[tuple[str, str], Total]:
    """Return what each engine took, by the engine's name and the task, or "all".

    Raises:
        SystemExit: A drafter changed a text.
    """
    found: dict[tuple[str, str], Total] = {}
    names = list(engines)
    for i, prompt in enumerate(read_prompts(options.prompts, per_task=options.per_task)):
        token_ids = engines[_PLAIN].chat_ids([{"role": "user", "content": prompt.text}])
        if len(token_ids) + options.n_tokens > _N_CTX:
            continue
        texts = set()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            sampling = {"max_tokens": options.n_tokens, "temperature": options.temperature, "seed": 0}
            result = engines[name].generate(token_ids, **sampling)
            texts.add(tuple(result.token_ids))
            for task in (prompt.task, "all"):
                found.setdefault((name, task), Total()).add(result)
        if len(texts) > 1:
            raise SystemExit(f"{prompt.id}: the texts differ")
    return found


def table(found: dict[tuple[str, str], Total]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each drafter and task the figures that the module's first sentence names."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for (name, task), total in sorted(found.items()):
        plain = found[_PLAIN, task]
        rows.setdefault(name, {})[task] = {
            "tokens_a_step": round(total.n_tokens / max(1, total.n_steps), 3),
            "ms_a_draft": round(1e3 * total.draft_s / total.n_drafts, 3) if total.n_drafts else 0.0,
            "speed": round(total.n_tokens / total.seconds * plain.seconds / plain.n_tokens, 3),
        }
    return rows


def main() -> None:
    """Print a line for each drafter, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target: a path or a name")
    parser.add_argument("heads", nargs="+", help="heads, or draft models: paths or names")
    parser.add_argument("--kind", choices=["head", "model"], default="head", help="what they are (default: head)")
    prompts = "a file of prompts (default: those of `edgedec bench`)"
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help=prompts)
    parser.add_argument("--per-task", type=int, default=2, help="prompts of each task (default: 2)")
    parser.add_argument("--draft-max", type=int, default=4, help="most tokens of a draft (default: 4)")
    parser.add_argument("-n", "--n-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("-t", "--temperature", type=float, default=0.0, help="of sampling (default: 0)")
    parser.add_argument("--json-out", type=Path, help="write the table there")
    options = parser.parse_args()
    drafters: dict[str, dict[str, Any]] = {_PLAIN: {"draft": "off"}}
    for head in options.heads:
        drafters[Path(head).name] = {"draft": options.kind, f"draft_{options.kind}": head}
    engines = {}
    try:
        for name, drafter in drafters.items():
            sizes: dict[str, Any] = {"n_draft_max": options.draft_max, "n_ctx": _N_CTX}
            engines[name] = edgedec.load(options.model, runtime="cpu", **sizes, **drafter)
        rows = table(totals(engines, options))
    finally:
        for engine in engines.values():
            engine.close()
    for name, tasks in rows.items():
        for task, figures in tasks.items():
            print(name, task, " ".join(f"{what} {value:.3f}" for what, value in figures.items()), flush=True)
    report({"model": options.model, "drafters": rows}, options.json_out)


if __name__ == "__main__":
    main()
