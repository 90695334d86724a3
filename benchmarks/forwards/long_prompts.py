"""Time how long prompts are read, beside llama.cpp with and without its flash attention, 512 tokens in turn.

    python benchmarks/forwards/long_prompts.py qwen2.5-coder-1.5b --length 16384 --threads 1 --json-out prompts.json
    python benchmarks/forwards/long_prompts.py smollm2-135m --length 8192 --program ik/bin/llama-bench --options -rtr 1

All sides read one prompt of random tokens: 512 of them on one side, the same 512 on the next one, and so on, so what
else runs on the machine slows down all of them. The sums at 512 tokens, 2,048 and so on are printed: seconds by the
clock, seconds of the processor, and how many times as fast as llama.cpp's better form edgedec is by the latter. Beyond
`--length` they are fitted: the seconds of 512 tokens grow evenly with what is before them. `--program`, which takes
llama-bench's options, then reads each length by itself, with flash attention. `--gguf` names the file for the others
where edgedec keeps the model as tiles. Ends with one line of JSON.

    python benchmarks/forwards/long_prompts.py smollm2-135m --length 8192 --cuts 3

reads the prompt with edgedec alone: in pieces of 256 tokens on one thread, and then as often as `--cuts` says in random
pieces of 1 to 256 tokens, on one and on two threads in turn. Every row's logits must have the same bits each time.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

PIECE = 512  # tokens; llama.cpp evaluates as many at a time
PAUSE = 0.03  # seconds; OpenMP's threads wait actively for some milliseconds after a forward of llama.cpp
LENGTHS = (512, 2048, 8192, 16384)


def opened(
    stack: ExitStack, path: Path, gguf: Path, length: int, n_threads: int, sides: list[str]
) -> dict[str, Session]:
    """Return a session of each side, which `stack` closes."""
    sessions: dict[str, Session] = {}
    for side in sides:
        own = {} if side == "edgedec" else {"flash_attention": side == "llama.cpp, flash"}
        options = LoadOptions(n_ctx=length, n_threads=n_threads, cache_dir=cache_folder(), runtime_options=own)
        runtime, file = (Cpu(), path) if side == "edgedec" else (LlamaCpp(), gguf)
        model = stack.enter_context(runtime.load(file, options))
        sessions[side] = model.session(length)
    return sessions


def prompt(length: int) -> NDArray[np.int32]:
    """Return random tokens."""
    return np.random.default_rng(0).integers(0, 20_000, length).astype(np.int32)


def read(sessions: dict[str, Session], length: int) -> dict[str, list[tuple[float, float]]]:
    """Let each session read the prompt in turn; return the seconds and processor seconds of each side's pieces."""
    ids = prompt(length)
    pieces: dict[str, list[tuple[float, float]]] = {side: [] for side in sessions}
    for begin in range(0, length, PIECE):
        for side, session in sessions.items():
            time.sleep(PAUSE)
            clock, used = time.perf_counter(), time.process_time()
            session.forward(ids[begin : begin + PIECE], n_past=begin, rows="last")
            pieces[side].append((round(time.perf_counter() - clock, 3), round(time.process_time() - used, 3)))
        if begin + PIECE in LENGTHS:
            say(begin + PIECE, {side: np.sum(both, axis=0).tolist() for side, both in pieces.items()})
    return pieces


def fitted(pieces: dict[str, list[tuple[float, float]]], n: int) -> dict[str, list[float]]:
    """Return the seconds of n tokens on each side where a piece's seconds grow evenly with what is before it."""
    found: dict[str, list[float]] = {}
    for side, both in pieces.items():
        lines = [np.polyfit(np.arange(len(both)), values, 1) for values in np.transpose(both)]
        found[side] = [round(float(np.polyval(line, np.arange(n // PIECE)).sum()), 3) for line in lines]
    return found


def say(n: int, sums: dict[str, list[float]], how: str = "") -> None:
    """Print the seconds of one length."""
    cells = [f"{side} {seconds:.1f} s (cpu {used:.1f})" for side, (seconds, used) in sums.items()]
    others = [used for side, (_, used) in sums.items() if side != "edgedec"]
    if "edgedec" in sums and others:
        cells.append(f"{min(others) / sums['edgedec'][1]:.2f} times as fast")
    print(f"{n:>6} tokens  {'  '.join(cells)}{how}", flush=True)


def digests(path: Path, length: int, n_threads: int, sizes: Sequence[int]) -> list[bytes]:
    """Read the prompt in pieces of these sizes; return the SHA-1 of each row's logits."""
    ids = prompt(length)
    found: list[bytes] = []
    with ExitStack() as stack:
        (session,) = opened(stack, path, path, length, n_threads, ["edgedec"]).values()
        for size in sizes:
            piece = ids[len(found) : len(found) + size]
            logits = session.forward(piece, n_past=len(found), rows="all").logits
            found += [sha1(row.tobytes()).digest() for row in logits]
    return found


def compare(path: Path, length: int, n_cuts: int) -> list[dict[str, Any]]:
    """Return how many rows have other bits in each way to read the prompt than in pieces of 256 tokens."""
    random = np.random.default_rng(1)
    expected = digests(path, length, 1, [256] * (length // 256))
    rows: list[dict[str, Any]] = []
    for cut in range(n_cuts):
        sizes = random.integers(1, 257, length).tolist()
        found = digests(path, length, 1 + cut % 2, sizes[: int(np.searchsorted(np.cumsum(sizes), length)) + 1])
        others = sum(a != b for a, b in zip(found, expected, strict=True))
        rows.append({"n_threads": 1 + cut % 2, "first pieces": sizes[:5], "n": length, "n_other_bits": others})
        print(rows[-1], flush=True)
    return rows


def by_program(program: Path, gguf: Path, n: int, n_threads: int, options: list[str]) -> float:
    """Return the seconds in which the program reads n tokens."""
    command = [program, "-m", gguf, "-t", n_threads, "-p", n, "-n", 0, "-r", 1, "-fa", 1, "-o", "json", *options]
    run = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    (test,) = json.loads(run.stdout)
    return float(test["avg_ns"]) / 1e9


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf", type=Path, help="the model's GGUF (default: the model's file)")
    parser.add_argument("--length", type=int, default=8192, help="of the prompt, a multiple of 512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    sides = ["edgedec", "llama.cpp, flash", "llama.cpp"]
    parser.add_argument("--sides", nargs="+", choices=sides, default=sides)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for the program; the last option here")
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    if args.cuts:
        cuts = compare(path, args.length, args.cuts)
        report({"benchmark": "long_prompts", "model": path.stem, "cuts": cuts}, args.json_out)
        return
    gguf = args.gguf or path
    found: list[dict[str, Any]] = []
    for _ in range(args.runs):
        with ExitStack() as stack:
            pieces = read(opened(stack, path, gguf, args.length, args.threads, args.sides), args.length)
        longer = {n: fitted(pieces, n) for n in LENGTHS if n > args.length >= 4 * PIECE}
        for n, sums in longer.items():
            say(n, sums, "; fitted")
        found.append({"pieces": pieces, "fitted": longer})
    program = {}
    if args.program is not None:
        lengths = [n for n in LENGTHS if n <= args.length]
        program = {n: by_program(args.program, gguf, n, args.threads, args.options) for n in lengths}
        print({n: f"{seconds:.1f} s" for n, seconds in program.items()})
    figures = {"benchmark": "long_prompts", "model": path.stem, "n_threads": args.threads, "runs": found}
    report(figures | {"program": {"options": args.options, "seconds": program}}, args.json_out)


if __name__ == "__main__":
    main()
