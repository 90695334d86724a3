"""Measure where the time of a forward goes on the cpu runtime: milliseconds by stage, waiting for threads included.

    python benchmarks/forwards/cpu_stages.py smollm2-135m qwen2.5-coder-1.5b --json stages.json
    EDGEDEC_CPU_LIBRARY=other/libedgedec_cpu.so python benchmarks/forwards/cpu_stages.py smollm2-135m

A row is one forward of n tokens on a context of cached ones, which returns n rows of logits; `prefill` is one call with
512 tokens that returns the last row, on the same contexts. The stages are the native library's own account of its
forwards (`CpuModel.operation_seconds`). `python` is what the call takes beyond them. `argmax` is finding the greatest
logit of a row, which is not part of `total`. Figures are those of the fastest of the runs. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Forward
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.cpu_count import usable_cores

BATCHES = (1, 4, 8, 16)
N_PREFILL = 512


def stages(model: CpuModel, act: Callable[[], Forward], n_runs: int) -> dict[str, float]:
    """Return the milliseconds of each stage of `act`, of all of it, and of finding one row's greatest logit."""
    runs: list[dict[str, float]] = []
    act()
    for _ in range(n_runs):
        before = model.operation_seconds()
        start = time.perf_counter()
        forward = act()
        total = time.perf_counter() - start
        run = {name: seconds - before[name] for name, seconds in model.operation_seconds().items()}
        run |= {"python": total - sum(run.values()), "total": total}
        start = time.perf_counter()
        forward.ops.argmax(forward.logits[-1])
        run["argmax"] = time.perf_counter() - start
        runs.append(run)
    fastest = min(runs, key=lambda run: run["total"])
    return {name: 1000 * seconds for name, seconds in fastest.items()}


def measure(name: str, n_threads: int, contexts: Sequence[int], batches: Sequence[int], n_runs: int) -> dict[str, Any]:
    """Return the stages of each forward of one model."""
    root = cache_folder()
    n_ctx = max(contexts) + max(N_PREFILL, *batches)
    options = LoadOptions(n_ctx=n_ctx, n_threads=n_threads, cache_dir=root)
    rows: list[dict[str, Any]] = []
    model = Cpu().load(resolve(name, ResolveOptions(root, offline=True)), options)
    assert isinstance(model, CpuModel)
    with model:
        ids = np.random.default_rng(0).integers(0, min(model.card.n_vocab, 20_000), n_ctx).astype(np.int32)
        session = model.session(n_ctx)
        for n_past in sorted(contexts):
            session.forward(ids[:n_past], n_past=0)

            def act(n: int, wanted: Any, n_past: int = n_past) -> Callable[[], Forward]:
                return lambda: session.forward(ids[n_past : n_past + n], n_past=n_past, rows=wanted)

            for n in batches:
                rows.append({"n": n, "n_past": n_past, **stages(model, act(n, "all"), n_runs)})
            found = stages(model, act(N_PREFILL, "last"), min(3, n_runs))
            rows.append({"n": "prefill", "n_past": n_past, **found})
        return {"model": name, "threads": n_threads, "set": model.instruction_set, "rows": rows}


def table(figures: dict[str, Any]) -> Table:
    """Return the figures for a person."""
    out = Table(title=f"{figures['model']}, {figures['threads']} threads, {figures['set']}: milliseconds")
    for heading in figures["rows"][0]:
        out.add_column({"n_past": "context"}.get(heading, heading), justify="right")
    for row in figures["rows"]:
        out.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return out


def main() -> None:
    """Measure every model given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names or paths")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--context", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = [measure(name, args.threads, args.context, args.batches, args.runs) for name in args.models]
    for figures in found:
        Console(stderr=True, width=150).print(table(figures))
    document = json.dumps({**provenance(), "models": found})
    if args.json:
        args.json.write_text(document + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
