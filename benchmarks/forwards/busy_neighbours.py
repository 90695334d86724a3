"""Measure what other busy processes cost a forward, on the cpu runtime and on llama.cpp.

    python benchmarks/forwards/busy_neighbours.py qwen2.5-coder-1.5b \
        --json benchmarks/results/busy_neighbours-MODEL.json
    python benchmarks/forwards/busy_neighbours.py smollm2-135m --library before=OLD/libedgedec_cpu.so \
        --settings 1 1-pinned

T(n) is one forward of n new tokens on 256 cached ones that returns n rows of logits. A neighbour is a process that does
nothing but count, at normal priority. A setting is a number of neighbours: with `-pinned` all of them may use the first
processor only, which then has half its speed or less, like a slow core beside fast ones. Every library measured is a
process of its own that holds the model; in each round they take turns. The figures are milliseconds: the median of the
rounds, and the tenth and the ninetieth percentile.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.runtime import Runtime
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.shared.cpu_count import usable_cores

N_PAST = 256
LLAMACPP = "llama.cpp"
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Setting:
    """How many neighbours there are, and whether they are pinned to the first processor."""

    n_neighbours: int
    pinned: bool

    def __str__(self) -> str:
        return f"{self.n_neighbours}{'-pinned' if self.pinned else ''}"


def setting(text: str) -> Setting:
    """Return the setting that the command line names; ValueError where it is none."""
    return Setting(int(text.removesuffix("-pinned")), text.endswith("-pinned"))


def count(pinned: bool) -> None:
    """Keep one processor busy until the process is ended."""
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True:
        pass


@contextmanager
def neighbours(setting: Setting) -> Iterator[None]:
    """Have other processes busy within the block."""
    processes = [_SPAWN.Process(target=count, args=(setting.pinned,), daemon=True) for _ in range(setting.n_neighbours)]
    try:
        for process in processes:
            process.start()
        time.sleep(0.3 if processes else 0)  # until they have started, and the scheduler has spread them
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def serve(pipe: Connection, path: Path, library: str, n_threads: int) -> None:
    """Load a model, then answer each n with the seconds of one T(n), until the other end closes."""
    runtime: Runtime = LlamaCpp() if library == LLAMACPP else Cpu()
    if library not in (LLAMACPP, ""):
        os.environ["EDGEDEC_CPU_LIBRARY"] = library
    options = LoadOptions(n_ctx=N_PAST + 32, n_threads=n_threads, cache_dir=cache_folder())
    with runtime.load(path, options) as model:
        session = model.session(N_PAST + 32)
        tokens = np.random.default_rng(0).integers(0, min(model.card.n_vocab, 20_000), N_PAST + 32).astype(np.int32)
        session.forward(tokens[:N_PAST], n_past=0)
        pipe.send(0.0)
        while True:
            try:
                n = pipe.recv()
            except EOFError:
                return
            start = time.perf_counter()
            session.forward(tokens[N_PAST : N_PAST + n], n_past=N_PAST, rows="all")
            pipe.send(time.perf_counter() - start)


def measure(
    libraries: dict[str, str], path: Path, n_threads: int, batches: Sequence[int], settings: Sequence[Setting], n: int
) -> list[dict[str, Any]]:
    """Return a row for each setting, library and T(n), from n rounds in which the libraries take turns."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        pipes: dict[str, Connection] = {}
        for name, library in libraries.items():
            ours, theirs = _SPAWN.Pipe()
            _SPAWN.Process(target=serve, args=(theirs, path, library, n_threads), daemon=True).start()
            theirs.close()
            pipes[name] = stack.enter_context(ours)
            ours.recv()
        for chosen in settings:
            with neighbours(chosen):
                seconds: dict[tuple[str, int], list[float]] = {}
                for _ in range(n):
                    for name, pipe in pipes.items():
                        for batch in batches:
                            pipe.send(batch)
                            seconds.setdefault((name, batch), []).append(pipe.recv())
            for (name, batch), found in seconds.items():
                low, *_, high = statistics.quantiles(found, n=10)
                figures = {"median_ms": statistics.median(found) * 1e3, "p10_ms": low * 1e3, "p90_ms": high * 1e3}
                rows.append({"neighbours": str(chosen), "library": name, "n": batch, **figures})
    return rows


def table(rows: Sequence[dict[str, Any]], batches: Sequence[int]) -> Iterator[str]:
    """Return the lines of a table: medians, and in brackets as multiples of the same library's without neighbours."""
    yield f"{'neighbours':<12}{'library':<12}" + "".join(f"{f'T({n})':>24}" for n in batches)
    found = {(row["neighbours"], row["library"], row["n"]): row for row in rows}
    for neighbours, library in dict.fromkeys((row["neighbours"], row["library"]) for row in rows):
        line = f"{neighbours:<12}{library:<12}"
        for n in batches:
            row, alone = found[neighbours, library, n], found.get(("0", library, n))
            times = f" ({row['median_ms'] / alone['median_ms']:.2f})" if alone else ""
            line += f"{row['median_ms']:8.1f}{times:7}{row['p90_ms']:9.1f}"
        yield line


def main() -> None:
    """Measure, print the table, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or path")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--settings", nargs="+", type=setting, default=[*map(setting, ("0", "1", "2", "1-pinned"))])
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH", help="another build of ours")
    parser.add_argument("--no-llamacpp", action="store_true", help=f"leave {LLAMACPP} out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    libraries = dict(text.split("=", 1) for text in args.library) | {"this": ""}
    if not args.no_llamacpp:
        libraries[LLAMACPP] = LLAMACPP
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    rows = measure(libraries, path, args.threads, args.batches, args.settings, args.rounds)
    print(f"{path.name}, {args.threads} threads: median ms (of the time alone), ninetieth percentile")
    print(*table(rows, args.batches), sep="\n")
    if args.json:
        document = {**provenance(), "model": path.name, "threads": args.threads, "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
