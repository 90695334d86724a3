"""Measure forwards on the cpu runtime and on llama.cpp, side by side: plain decoding, small batches, prefill, load.

    python benchmarks/forwards/cpu_speed.py qwen2.5-coder-1.5b smollm2-135m

Both run in this process, in turn, on the same file with the same number of threads. The figures are medians; ratios
compare times of the same run. T(n) is one forward of n new tokens on 256 cached ones (T(1) also on 2,048) that returns
all n rows of logits. The machine's read bandwidth is measured between the runs. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.system import resident_bytes
from edgedec.model import ForwardItem, Model, Session
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.cpu.library import instruction_sets, read_bandwidth
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.weights import tile_job
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.shared.cpu_count import usable_cores

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
N_PAST, N_LONG, N_PREFILL = 256, 2048, 512
PAUSE = 0.03  # seconds; OpenMP's threads wait actively for some milliseconds after a forward of llama.cpp


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], n_runs: int) -> tuple[float, float]:
    """Return the medians of two calls' seconds, run in turn; in a pause before each the other threads go to sleep."""

    def paused(act: Callable[[], Any]) -> float:
        time.sleep(PAUSE)
        return timed(act)

    pairs = [(paused(ours), paused(theirs)) for _ in range(n_runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def loads(path: Path, options: LoadOptions) -> tuple[float, float, int]:
    """Return the seconds of a load from warm caches on both, and how much ours adds to the resident size."""

    def load(runtime: Cpu | LlamaCpp) -> None:
        runtime.load(path, options).close()

    load(Cpu())
    load(LlamaCpp())
    ours, theirs = in_turn(lambda: load(Cpu()), lambda: load(LlamaCpp()), 3)
    before = resident_bytes() or 0
    model = Cpu().load(path, options)
    session = model.session(N_PAST + 1)
    session.forward(tokens(model, N_PAST + 1), n_past=0)
    added = (resident_bytes() or 0) - before
    model.close()
    return ours, theirs, added


def tokens(model: Model, n: int) -> Any:
    """Return n tokens, the same for every runtime."""
    return np.random.default_rng(0).integers(0, min(model.card.n_vocab, 20_000), n).astype(np.int32)


def measure(path: Path, options: LoadOptions, n_runs: int) -> dict[str, Any]:
    """Return all figures of one model; times in milliseconds."""
    n_threads = options.n_threads or usable_cores()
    load_ours, load_theirs, added = loads(path, replace(options, n_ctx=N_PAST + 1))
    figures: dict[str, Any] = {"threads": n_threads, "load_s": [load_ours, load_theirs], "resident_mb": added / 1e6}
    with _cpu(path, options) as ours, LlamaCpp().load(path, options) as theirs:
        ids = tokens(ours, N_LONG + 32)
        n_ctx = N_LONG + 32
        mine, other = ours.session(n_ctx), theirs.session(n_ctx)
        figures["instruction_set"] = ours.instruction_set

        def step(session: Session, n: int, n_past: int) -> Callable[[], Any]:
            return lambda: session.forward(ids[n_past : n_past + n], n_past=n_past, rows="all")

        prefill = in_turn(
            lambda: mine.forward(ids[:N_PREFILL], n_past=0), lambda: other.forward(ids[:N_PREFILL], n_past=0), 3
        )
        figures["prefill_tok_s"] = [N_PREFILL / seconds for seconds in prefill]
        figures["bandwidth_gb_s"] = [read_bandwidth(n_threads) / 1e9]
        for n in BATCHES:
            pair = in_turn(step(mine, n, N_PAST), step(other, n, N_PAST), n_runs)
            figures[f"T({n})"] = [1000 * seconds for seconds in pair]
            figures["bandwidth_gb_s"].append(read_bandwidth(n_threads) / 1e9)
        for n in (1, 8):
            figures[f"operations of T({n})"] = operations(ours, step(mine, n, N_PAST), n_runs)
        figures["two sequences"] = 1000 * two_sequences(ours, ids, n_runs)
        for session in (mine, other):
            session.forward(ids[N_PAST:N_LONG], n_past=N_PAST)
        pair = in_turn(step(mine, 1, N_LONG), step(other, 1, N_LONG), n_runs)
        figures["T(1) at 2048"] = [1000 * seconds for seconds in pair]
        figures["row_ms"] = rows(ours, mine)
        figures["avx2"] = forced_avx2(path, options, other, n_runs) if "avx2" in instruction_sets() else {}
    return figures


def rows(model: Model, session: Session) -> dict[str, float]:
    """Return the median milliseconds of choosing the token after a row of real logits."""
    prompt = np.array(model.tokenizer.encode("Speculative decoding makes language models faster, because"), np.int32)
    forward = session.forward(prompt, n_past=0, rows="all")
    ways = {
        "greedy": SamplingParams(temperature=0),
        "top-p": SamplingParams(temperature=0.8, top_p=0.95),
        "top-k": SamplingParams(temperature=0.8, top_k=40, top_p=1),
        "whole": SamplingParams(temperature=1, top_p=1),
    }

    def choose(params: SamplingParams, row: Any) -> float:
        return timed(lambda: draw(row, params, (), Noise(1), 7, forward.ops))

    return {
        name: 1000 * statistics.median(choose(params, row) for _ in range(9) for row in forward.logits)
        for name, params in ways.items()
    }


def forced_avx2(path: Path, options: LoadOptions, other: Session, n_runs: int) -> dict[str, list[float]]:
    """Return T(1), T(8) and the prefill with the AVX2 kernels, in turn with llama.cpp."""
    before = os.environ.get("EDGEDEC_CPU_ISA")
    os.environ["EDGEDEC_CPU_ISA"] = "avx2"
    try:
        model = _cpu(path, options)
    finally:
        if before is None:
            del os.environ["EDGEDEC_CPU_ISA"]
        else:
            os.environ["EDGEDEC_CPU_ISA"] = before
    with model:
        mine, ids = model.session(N_PREFILL + 16), tokens(model, N_PREFILL)

        def step(session: Session, n: int) -> Callable[[], Any]:
            return lambda: session.forward(ids[N_PAST : N_PAST + n], n_past=N_PAST, rows="all")

        for session in (mine, other):
            session.forward(ids[:N_PAST], n_past=0)
        found = {}
        for n in (1, 8):
            pair = in_turn(step(mine, n), step(other, n), n_runs)
            found[f"T({n})"] = [1000 * seconds for seconds in pair]
        pair = in_turn(lambda: mine.forward(ids, n_past=0), lambda: other.forward(ids, n_past=0), 3)
        found["prefill_tok_s"] = [N_PREFILL / seconds for seconds in pair]
    return found


def _cpu(path: Path, options: LoadOptions) -> CpuModel:
    model = Cpu().load(path, options)
    assert isinstance(model, CpuModel)
    return model


def operations(model: CpuModel, act: Callable[[], Any], n_runs: int) -> dict[str, float]:
    """Return the mean milliseconds of each operation of a forward."""
    before = model.operation_seconds()
    for _ in range(n_runs):
        act()
    return {name: 1000 * (s - before[name]) / n_runs for name, s in model.operation_seconds().items()}


def two_sequences(model: Model, ids: Any, n_runs: int) -> float:
    """Return the median seconds of one token each of two sequences in one forward."""
    sessions = [model.session(N_PAST + 1) for _ in range(2)]
    for session in sessions:
        session.forward(ids[:N_PAST], n_past=0)
    items = [ForwardItem(session, N_PAST, ids[:1]) for session in sessions]
    seconds = statistics.median(timed(lambda: model.forward(items)) for _ in range(n_runs))
    for session in sessions:
        session.close()
    return seconds


def table(name: str, figures: dict[str, Any], n_bytes: int) -> Table:
    """Return the figures for a person."""
    out = Table(title=f"{name}, {figures['threads']} threads, {figures['instruction_set']}")
    for heading in ("", "cpu", "llama.cpp", "llama.cpp / cpu", "cpu / llama.cpp's T(1)"):
        out.add_column(heading, justify="right")
    base = figures["T(1)"][1]
    for key in [*(f"T({n})" for n in BATCHES), "T(1) at 2048"]:
        ours, theirs = figures[key]
        out.add_row(key, f"{ours:.2f} ms", f"{theirs:.2f} ms", f"{theirs / ours:.2f}", f"{ours / base:.2f}")
    ours, theirs = figures["prefill_tok_s"]
    out.add_row("prefill 512", f"{ours:.0f} tok/s", f"{theirs:.0f} tok/s", f"{ours / theirs:.2f}", "")
    ours, theirs = figures["load_s"]
    out.add_row("load, warm", f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.2f}", "")
    for key, (ours, theirs) in figures["avx2"].items():
        ratio = ours / theirs if key == "prefill_tok_s" else theirs / ours
        out.add_row(f"AVX2 {key}", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}", "")
    for key, ms in figures["row_ms"].items():
        out.add_row(f"choosing, {key}", f"{ms:.3f} ms", "", "", "")
    for name, one in figures["operations of T(1)"].items():
        out.add_row(name, f"{one:.2f} ms", "", "", f"T(8): {figures['operations of T(8)'][name]:.2f} ms")
    two = figures["two sequences"]
    out.add_row("two sequences", f"{two:.2f} ms", "", f"{two / figures['T(2)'][0]:.2f} of T(2)", "")
    limits = figures["bandwidth_gb_s"]
    read = n_bytes / figures["T(1)"][0] / 1e6
    out.caption = (
        f"memory is read at {statistics.median(limits):.1f} GB/s ({min(limits):.1f} to {max(limits):.1f}), the weights "
        f"at {read:.1f} GB/s: {read / statistics.median(limits):.0%}; resident {figures['resident_mb']:.0f} MB"
    )
    return out


def main() -> None:
    """Measure every model given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names or paths")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    root = cache_folder()
    options = LoadOptions(n_ctx=N_LONG + 32, n_threads=args.threads, cache_dir=root)
    found = {}
    console = Console(stderr=True)
    for name in args.models:
        path = resolve(name, ResolveOptions(root, offline=True))
        found[path.name] = measure(path, options, args.runs)
        console.print(table(path.name, found[path.name], _weight_bytes(path)))
    print(json.dumps(found))


def _weight_bytes(path: Path) -> int:
    """Return the bytes of the tiles that a step reads: all but an embedding that is not the head as well."""
    gguf = read_gguf(path)
    network = read_network(gguf)
    total = tile_job(gguf, network, LoadOptions()).n_bytes
    if "output.weight" in gguf.tensors:
        total -= gguf.tensors["token_embd.weight"].n_bytes
    return total


if __name__ == "__main__":
    main()
