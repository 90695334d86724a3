"""Time whole forwards with weights fetched ahead as usual and as measured on this machine.

    python benchmarks/forwards/prefetch.py qwen2.5-coder-1.5b --json-out prefetch.json

The model is loaded once for each value of the cpu runtime's option prefetch; "auto" is what was measured, at this load
or an earlier one. Forwards of 1 to 8 rows behind 256 tokens are timed in turn, on one thread and on two; the medians
and the least times are printed, and the bits of the logits are compared. Ends with one line of JSON.
"""

import argparse
import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu import prefetch
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu

N_PAST, ROWS = 256, (1, 2, 4, 8)


def measured(path: Path, settings: list[str], n_threads: int, n_runs: int) -> dict[str, Any]:
    """Return, for each setting and number of rows, the median and the least milliseconds of a forward."""
    ids = np.random.default_rng(0).integers(0, 20000, N_PAST + max(ROWS)).astype(np.int32)
    sessions: dict[str, Session] = {}
    with ExitStack() as opened:
        for setting in settings:
            own = {"prefetch": setting}
            options = LoadOptions(n_ctx=512, n_threads=n_threads, cache_dir=cache_folder(), runtime_options=own)
            model = opened.enter_context(closing(Cpu().load(path, options)))
            sessions[setting] = opened.enter_context(closing(model.session(512)))
            sessions[setting].forward(ids[:N_PAST], n_past=0)
        times: dict[tuple[str, int], list[float]] = {(setting, n): [] for setting in settings for n in ROWS}
        for _ in range(n_runs):
            for n in ROWS:
                logits = [timed(session, ids[: N_PAST + n], times[setting, n]) for setting, session in sessions.items()]
                assert all(np.array_equal(found, logits[0]) for found in logits), "a setting changed a bit"
        found = prefetch.known(cache_folder(), instruction_sets()[0], n_threads)
    return {
        "n_threads": n_threads,
        "known": prefetch.described(found),
        "ms": {setting: {n: [median(times[setting, n]), min(times[setting, n])] for n in ROWS} for setting in settings},
    }


def timed(session: Session, ids: np.ndarray[Any, np.dtype[np.int32]], times: list[float]) -> Any:
    """Note the least milliseconds of two forwards of the tokens behind the context, and return their logits."""
    took = []
    for _ in range(2):
        began = time.perf_counter()
        logits = session.forward(ids[N_PAST:], n_past=N_PAST, rows="all").logits.copy()
        took.append(1000 * (time.perf_counter() - began))
    times.append(min(took))
    return logits


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--settings", nargs="+", default=["usual", "auto"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    Cpu().load(path, LoadOptions(cache_dir=cache_folder())).close()  # tiles are made, where there are none
    found = [measured(path, args.settings, n_threads, args.runs) for n_threads in args.threads]
    for each in found:
        for setting, ms in each["ms"].items():
            cells = "  ".join(f"T({n}) {middle:.1f} ({least:.1f})" for n, (middle, least) in ms.items())
            print(f"{each['n_threads']} threads, {setting:8} {cells} ms")
        print(each["known"])
    line = json.dumps({"benchmark": "prefetch", "model": path.stem, "found": found, **provenance()})
    print(line)
    if args.json_out is not None:
        args.json_out.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
