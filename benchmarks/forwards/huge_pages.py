"""Measure what huge pages bring to forwards of the cpu runtime, and what they cost at a start (Linux).

    python benchmarks/forwards/huge_pages.py qwen2.5-coder-1.5b --folder DIR --json-out FILE

DIR gets two copies of the model's tiles and is kept, so that a second run needs not make them; give it a file system
whose cache has large pages (ext4 of Linux 6.16, XFS). Forwards: the weights mapped from a file that the cache holds in
small pages, mapped from one that it holds in huge pages, and copied to huge pages of private memory, in turn in one
process, medians. Starts: each in a fresh process, in turn, from a warm cache, medians of loading and the first token.
Logits are first checked to have the same bits. Ends with one line of JSON; a FILE that is there gets the new figures.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgedec.errors import counted
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles import huge_pages
from edgedec_runtimes.shared.pages import forget

N_PAST, ROWS = 256, (1, 2, 4, 8, 16)
WAYS = {"file, small pages": ("small", "off"), "file, huge pages": ("huge", "auto"), "copied": ("small", "on")}
STARTS = WAYS | {"file, small pages, auto": ("small", "auto")}

START = """
import sys, time
from pathlib import Path
import numpy as np
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles import huge_pages
path, folder, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if mode == "on":
    huge_pages.read_in_huge_pages = lambda *_: False
began = time.perf_counter()
model = Cpu().load(path, LoadOptions(n_ctx=512, max_rows=1, cache_dir=folder, runtime_options={"huge_pages": mode}))
loaded = time.perf_counter()
model.session(512).forward(np.array([100], np.int32), n_past=0)
print(loaded - began, time.perf_counter() - loaded)
"""


def put_in_cache(file: Path, state: str) -> None:
    """Have the system's cache hold a file in "small" pages or, where the file system can, in "huge" ones."""
    with file.open("rb", buffering=0) as opened:
        os.fsync(opened.fileno())
        forget(opened.fileno())
        if state == "small":
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # then nothing is read ahead in large pieces
            while opened.read(1 << 20):
                pass
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            huge_pages.ask_for(memory)
            memory.madvise(22, 0, len(memory))
            array = np.frombuffer(memory, np.uint8)
            print(f"{file.parent.parent.name}: {huge_pages.share_of(array.ctypes.data, len(array)):.0%} in huge pages")
            int(array.sum())  # the machine's first touch of these pages is not to be measured
            del array


def tile_file(folder: Path) -> Path:
    """Return the one tile file of a cache."""
    (path,) = folder.glob("tiles/*.tiles")
    return path


def forwards(path: Path, folder: Path, n_threads: int, n_runs: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a forward over n rows, by how the weights lie in memory."""
    sessions: dict[str, Session] = {}
    real = huge_pages.read_in_huge_pages
    bits = set()
    for state in ("small", "huge"):
        put_in_cache(tile_file(folder / state), state)
    for way, (state, mode) in WAYS.items():
        huge_pages.read_in_huge_pages = lambda *_: False
        options = LoadOptions(
            n_ctx=512, max_rows=16, n_threads=n_threads, runtime_options={"huge_pages": mode}, cache_dir=folder / state
        )
        model = Cpu().load(path, options)
        huge_pages.read_in_huge_pages = real
        sessions[way] = model.session(512)
        bits.add(sessions[way].forward(np.arange(100, 100 + N_PAST, dtype=np.int32), n_past=0).logits.tobytes())
        print(f"{way}: {next(term.detail for term in model.memory(512, 16) if 'weights' in term.name)}")
    assert len(bits) == 1, "the logits differ"
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(n_runs):
        for way, session in sessions.items():
            for n in ROWS:
                tokens = np.arange(500, 500 + n, dtype=np.int32)
                began = time.perf_counter()
                session.forward(tokens, n_past=N_PAST, rows="all")
                times.setdefault((way, n), []).append(time.perf_counter() - began)
    return {way: {f"T({n})": round(median(times[way, n]) * 1e3, 2) for n in ROWS} for way in sessions}


def starts(path: Path, folder: Path, n_runs: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of loading and of the first forward, by how the weights lie in memory."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(n_runs + 1):
        for way, (state, mode) in STARTS.items():
            put_in_cache(tile_file(folder / state), state)
            command = [sys.executable, "-c", START, str(path), str(folder / state), mode]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            times.setdefault(way, []).append((float(found[0]), float(found[1])))
    return {
        way: {
            "load_s": round(median(load for load, _ in found[1:]), 3),
            "first_forward_s": round(median(first for _, first in found[1:]), 3),
        }
        for way, found in times.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    for state in ("small", "huge"):
        Cpu().load(path, LoadOptions(cache_dir=args.folder / state)).close()
    figures: dict[str, Any] = {"benchmark": "huge_pages", "model": args.model}
    if args.json_out and args.json_out.exists():
        figures = json.loads(args.json_out.read_text())
    figures |= provenance()
    if args.starts:
        figures["starts"] = starts(path, args.folder, args.starts)
    for n_threads in args.threads:
        found = forwards(path, args.folder, n_threads, args.runs)
        figures.setdefault("forwards_ms", {})[counted(n_threads, "thread")] = found
    for name in ("starts", "forwards_ms"):
        print(json.dumps(figures.get(name), indent=1))
    if args.json_out:
        args.json_out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
