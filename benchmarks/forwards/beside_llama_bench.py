"""Time plain steps beside those of llama.cpp's program llama-bench, or of a program that takes its options, in turn.

    python benchmarks/forwards/beside_llama_bench.py qwen2.5-coder-1.5b --program ik/bin/llama-bench --options -rtr 1

The program writes 24 tokens from an empty text on (its test `tg24`); so do we, of the same file, without choosing
tokens on either side. Each round has one run of the program and one of ours, which is loaded all the time. The medians
and the least milliseconds of a token are printed. `--gguf` names the file for the program where edgedec keeps the model
as tiles (`edgedec pull MODEL --keep-file` makes the file again). On a busy machine, `chrt -f 5` before the command
keeps other processes away from both. Ends with one line of JSON.
"""

import argparse
import json
import subprocess
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.runtime import Cpu

N_TOKENS = 24


def ours(session: Session) -> float:
    """Return the milliseconds of one of N_TOKENS forwards of a token each."""
    ids = np.random.default_rng(0).integers(0, 1000, N_TOKENS).astype(np.int32)
    began = time.perf_counter()
    for i in range(N_TOKENS):
        session.forward(ids[i : i + 1], n_past=i)
    return 1000 * (time.perf_counter() - began) / N_TOKENS


def theirs(program: Path, gguf: Path, n_threads: int, options: list[str]) -> float:
    """Return the milliseconds that the program takes for a token."""
    command = [program, "-m", gguf, "-t", n_threads, "-p", 0, "-n", N_TOKENS, "-r", 1, "-o", "json", *options]
    run = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    (test,) = json.loads(run.stdout)
    return float(test["avg_ns"]) / 1e6 / N_TOKENS


def measured(path: Path, args: argparse.Namespace, n_threads: int) -> dict[str, Any]:
    """Return the median and the least milliseconds of a token on both sides."""
    options = LoadOptions(n_ctx=512, n_threads=n_threads, cache_dir=cache_folder())
    with closing(Cpu().load(path, options)) as model, closing(model.session(512)) as session:
        ours(session)
        rounds = [
            (ours(session), theirs(args.program, args.gguf or path, n_threads, args.options)) for _ in range(args.runs)
        ]
    both = {"ours": [own for own, _ in rounds], "theirs": [other for _, other in rounds]}
    return {"n_threads": n_threads} | {side: [median(times), min(times)] for side, times in both.items()}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the model's GGUF (default: the model's file)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for the program; the last option here")
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    found = [measured(path, args, n_threads) for n_threads in args.threads]
    for each in found:
        cells = "  ".join(f"{side} {each[side][0]:.1f} ({each[side][1]:.1f}) ms" for side in ("ours", "theirs"))
        print(f"{each['n_threads']} threads  {cells}  {each['theirs'][0] / each['ours'][0]:.2f} times as fast")
    program = {"program": str(args.program), "options": args.options}
    line = json.dumps(
        {"benchmark": "beside_llama_bench", "model": path.stem, **program, "found": found, **provenance()}
    )
    print(line)
    if args.json_out is not None:
        args.json_out.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
