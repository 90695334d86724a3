"""Time steps of some rows on a random model in the proportions of a real one, beside those of the llamacpp runtime.

    python benchmarks/forwards/steps_beside_llamacpp.py qwen3.5-2b --rows 1 8 --json-out steps.json
    python benchmarks/forwards/steps_beside_llamacpp.py smollm2-135m.gguf --rows 1 --threads 1 --cpu-time

The models are files, or those of going_back.py, with fewer layers and a small vocabulary. Both runtimes hold the same
text of 512 tokens. In each round, each takes one step of every number of rows, which it keeps, all logits wanted. The
medians and the least milliseconds are printed, and those of the prompt's second half. Ends with one line of JSON.
--cpu-time, for a busy machine, counts the processor time of the process; two threads also wait for each other in it.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from going_back import PROPORTIONS
from numpy.typing import NDArray
from support.models.tiny_quantized import write_tiny

from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.runtime import Runtime
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

N_CTX = 2048
PAUSE = 0.03  # seconds; OpenMP's threads wait actively for some milliseconds after a forward of llama.cpp


CLOCK = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


def step(session: Session, ids: NDArray[np.int32], n_past: int, n_rows: int, rows: Literal["all", "last"]) -> float:
    """Evaluate rows that follow the text, and return the milliseconds."""
    time.sleep(PAUSE)
    began = CLOCK()
    session.forward(ids[n_past : n_past + n_rows], n_past=n_past, rows=rows)
    return 1000 * (CLOCK() - began)


def measured(name: str, folder: Path, rows: list[int], n_threads: int, n_runs: int, n_prompt: int) -> dict[str, Any]:
    """Return the milliseconds of both runtimes, by rows."""
    path = Path(name)
    if name in PROPORTIONS:
        path = write_tiny(folder / f"{name}.gguf", replace(PROPORTIONS[name], n_ctx_train=4096))
    ids = np.random.default_rng(0).integers(0, 260, N_CTX).astype(np.int32)
    options = LoadOptions(n_ctx=N_CTX, n_threads=n_threads, max_rows=max(rows), cache_dir=folder)
    times: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        runtimes: dict[str, Runtime] = {"cpu": Cpu(), "llamacpp": LlamaCpp()}
        models = {kind: stack.enter_context(runtime.load(path, options)) for kind, runtime in runtimes.items()}
        sessions = {kind: model.session(N_CTX) for kind, model in models.items()}
        n_past = 0
        for _ in range(2):  # the first prompt is not counted
            for kind, session in sessions.items():
                times.setdefault(kind, {})[f"prompt of {n_prompt}"] = [step(session, ids, n_past, n_prompt, "last")]
            n_past += n_prompt
        for _ in range(n_runs):
            for n in rows:
                for kind, session in sessions.items():
                    times[kind].setdefault(str(n), []).append(step(session, ids, n_past, n, "all"))
                n_past += n
    of_kinds = {
        kind: {what: [median(each), min(each)] for what, each in found.items()} for kind, found in times.items()
    }
    return {"name": name, "n_threads": n_threads, "ms": of_kinds}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="files, or names of going_back.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the text, read half by half")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measured(name, Path(folder), args.rows, args.threads, args.runs, args.prompt // 2) for name in args.models
        ]
    for each in found:
        for kind, of_rows in each["ms"].items():
            for what, (middle, least) in of_rows.items():
                print(f"{each['name']}, {kind}, {what} rows: {middle:.2f} ms (least {least:.2f})")
    report({"benchmark": "steps_beside_llamacpp", "found": found}, args.json_out)


if __name__ == "__main__":
    main()
