"""Tokens per second by task with heads of several kinds, with `auto` and without drafts, in turn on the same prompts.

    python benchmarks/speed/head_kinds.py smollm2-135m --prompts FILE --head eagle3=HEAD --head transfer=GGUF \
        --json-out benchmarks/results/head_kinds-smollm2-135m.json

The ways are: plain decoding; `auto` without a head; with each head `auto`, and that head alone, with drafts of two
tokens whether they pay or not (NAME, and NAME alone). Each round decodes every prompt in all ways, in another order.
Before each run the KV cache and the drafters' stores are emptied; with --warm, for one round of other prompts than the
first one, the stores stay, as they do for users. A speed counts the tokens and the seconds after the
first token. Of each prompt the median of the ratios to plain decoding of the same round counts, of each task the
geometric mean of its prompts, and of all the geometric mean of the tasks. The exit code is 1 where a text differs from
that of plain decoding.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import edgedec
from edgedec.load_options import N_DRAFT_MAX
from edgedec.progress import CancelToken
from edgedec_apps.bench.measure import Run, Runner, RunOptions, engine_runner, order
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, grouped, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance

PLAIN, AUTO = "plain", "auto"


def opened(stack: ExitStack, model: str, heads: dict[str, str], options: RunOptions) -> dict[str, Runner]:
    """Return what decodes in each way."""

    def runner(draft: str, head: str | None) -> Runner:
        most = 2 if draft == "head" else N_DRAFT_MAX
        engine = edgedec.load(model, runtime="cpu", draft=draft, draft_head=head, n_draft_max=most, offline=True)
        return engine_runner(stack.enter_context(engine), options, draft=draft != "off")

    ways = {PLAIN: runner("off", "off"), AUTO: runner("auto", "off")}
    for name, head in heads.items():
        ways |= {name: runner("auto", head), f"{name} alone": runner("head", head)}
    return ways


def summary(runs: dict[str, list[dict[str, Run]]], tasks: dict[str, list[str]], ways: Sequence[str]) -> dict[str, Any]:
    """Return the ratios to plain decoding by way and task, and the tokens per step of each way."""

    def speed(run: Run) -> float:
        return run.n_decoded / run.decode_s

    table: dict[str, Any] = {}
    for way in ways:
        by_task = {
            task: geometric_mean([median(speed(ran[way]) / speed(ran[PLAIN]) for ran in runs[name]) for name in names])
            for task, names in tasks.items()
        }
        steps = [ran[way] for rounds in runs.values() for ran in rounds]
        table[way] = {task: round(ratio, 3) for task, ratio in by_task.items()} | {
            "all": round(geometric_mean(by_task.values()), 3),
            "tokens_per_s": round(median(speed(run) for run in steps), 1),
            "tokens_per_step": round(sum(run.n_decoded for run in steps) / sum(run.n_steps for run in steps), 3),
            "draft_ms": round(1000 * median(run.draft_s for run in steps), 2),
        }
    return table


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--head", action="append", default=[], metavar="NAME=HEAD")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm", action="store_true", help="keep what drafters learn from prompt to prompt")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    origin, options = provenance(), RunOptions(args.max_tokens, args.temperature, warm_store=args.warm)
    rounds = 1 if args.warm else args.rounds
    heads, runs, different = dict(head.split("=", 1) for head in args.head), dict[str, list[dict[str, Run]]](), set()
    with ExitStack() as stack:
        ways = opened(stack, args.model, heads, options)
        with edgedec.load(args.model, runtime="cpu", draft="off", offline=True) as engine:
            requests = prepare(engine, read_prompts(args.prompts, args.per_task), args.max_tokens)
        _ = [runner(requests[0], CancelToken()) for runner in ways.values()]  # reads the weights; not counted
        requests = requests[1:] if args.warm else requests
        for number in range(rounds):
            for place, request in enumerate(requests):
                ran: dict[str, Run] = {}
                for way in order(list(ways), number + place):
                    run = ways[way](request, CancelToken())
                    assert run is not None  # nothing cancels it
                    ran[way] = run
                plain = ran[PLAIN].token_ids
                different |= {f"{request.id}, {way}" for way, run in ran.items() if run.token_ids != plain}
                runs.setdefault(request.id, []).append(ran)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    tasks = {task: [r.id for r in group] for task, group in grouped(requests, lambda request: request.task).items()}
    table = summary(runs, tasks, list(ways))
    for way, row in table.items():
        print(f"{way:16}", *(f"{key} {value:5.3f}" for key, value in row.items()))
    settings = {
        "model": Path(args.model).stem,
        "rounds": rounds,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "warm": args.warm,
    }
    document = {"benchmark": "head_kinds", **settings, **origin, "different": sorted(different), "ways": table}
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
