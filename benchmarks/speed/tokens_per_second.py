"""Tokens per second by task: edgedec with drafts, edgedec without drafts, and llama.cpp, in turn on the same prompts.

    python benchmarks/speed/tokens_per_second.py qwen2.5-coder-1.5b \
        --json-out benchmarks/results/tokens_per_second-qwen2.5-coder-1.5b.json

Every prompt is decoded greedily in three ways. Before each run the KV cache and the drafters' stores are emptied.
llama.cpp is our llamacpp runtime without drafts, which decodes as fast as a bare loop over llama.cpp (docs/figures.md).
A speed counts the tokens and the seconds after the first token.

On Linux each run notes which part of the processors' time other processes took meanwhile. A run during which they
took more than --quiet is repeated, in up to --rounds rounds; the least disturbed run of each prompt and way counts,
so that no run is chosen for its speed. Elsewhere the last run counts. The exit code is 1 where a text with drafts
differs from the text without. `benchmarks/speed/tokens_per_second_picture.py` draws the result.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import describe
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.measure import Run, Runner, RunOptions, engine_runner, order
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, BenchRequest, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance

DRAFTS, PLAIN, LLAMACPP = "edgedec with drafts", "edgedec without drafts", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt, decoded in one way.

    Attributes:
        run: The tokens and the times.
        others: The part of the processors' time, 0 to 1, that other processes took meanwhile; 0 where the system does
            not say.
    """

    run: Run
    others: float


def busy_seconds() -> float | None:
    """Return the seconds that all processors together have worked since the system started, or None if unknown."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *interrupted_or_stolen = (int(field) for field in fields)
    return (user + nice + system + sum(interrupted_or_stolen)) / os.sysconf("SC_CLK_TCK")


def measure(runner: Runner, request: BenchRequest) -> Measured:
    """Decode a prompt once."""
    wall, own, before = perf_counter(), process_time(), busy_seconds()
    run = runner(request, CancelToken())
    wall, own, after = perf_counter() - wall, process_time() - own, busy_seconds()
    assert run is not None  # nothing cancels it
    others = 0.0 if before is None or after is None else max(0.0, after - before - own)
    return Measured(run, others / (wall * (os.cpu_count() or 1)))


def figures(found: Sequence[dict[str, Measured]]) -> dict[str, Any]:
    """Return each way's tokens per second over some prompts, and what disturbed the most disturbed run."""
    speeds = {}
    for way in (DRAFTS, PLAIN, LLAMACPP):
        runs = [measured[way].run for measured in found]
        speeds[way] = round(sum(run.n_decoded for run in runs) / sum(run.decode_s for run in runs), 2)
    others = max(measured.others for ways in found for measured in ways.values())
    return {"tokens_per_s": speeds, "n_prompts": len(found), "most_taken_by_others": round(others, 3)}


def main() -> None:
    """Measure, print a line for each task, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0.03)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    origin = provenance()
    options = RunOptions(args.max_tokens)
    kept: dict[str, dict[str, Measured]] = {}
    with (
        edgedec.load(args.model, runtime="cpu", offline=True) as ours,
        edgedec.load(args.model, runtime="llamacpp", draft="off", offline=True) as other,
    ):
        requests = prepare(ours, read_prompts(args.prompts, args.per_task), args.max_tokens)
        runners = {
            DRAFTS: engine_runner(ours, options, draft=True),
            PLAIN: engine_runner(ours, options, draft=False),
            LLAMACPP: engine_runner(other, options, draft=False),
        }
        for runner in runners.values():
            measure(runner, requests[0])  # reads the weights; not counted
        for number in range(args.rounds):
            for place, request in enumerate(requests):
                best = kept.setdefault(request.id, {})
                for way in order(list(runners), number + place):
                    if way in best and best[way].others <= args.quiet:
                        continue
                    found = measure(runners[way], request)
                    if way not in best or found.others <= best[way].others:
                        best[way] = found
                    speed = found.run.n_decoded / found.run.decode_s
                    print(f"{request.id}, {way}: {speed:.1f}, others {found.others:.3f}", file=sys.stderr, flush=True)
    different = [name for name, ways in kept.items() if ways[DRAFTS].run.token_ids != ways[PLAIN].run.token_ids]
    tasks = {request.task: [kept[r.id] for r in requests if r.task == request.task] for request in requests}
    document = {
        "benchmark": "tokens_per_second",
        "model": args.model,
        "quantization": describe(
            read_gguf(resolve(args.model, ResolveOptions(cache_folder(), True)))
        ).quantization_label,
        "prompts": "edgedec bench's own" if args.prompts == DEFAULT_PROMPTS else args.prompts.name,
        "max_tokens": args.max_tokens,
        **origin,
        "different": different,
        "tasks": {task: figures(found) for task, found in tasks.items()},
        "all": figures(list(kept.values())),
    }
    for task, measured in (*tasks.items(), ("all", list(kept.values()))):
        print(f"{task:16}", *(f"{way} {speed:6.1f}" for way, speed in figures(measured)["tokens_per_s"].items()))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
