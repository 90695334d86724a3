"""Measure what drafted rows cost on models with recurrent states: bytes of the log, and time where they are rejected.

    python benchmarks/forwards/going_back.py qwen3.5-2b granite-4-h-micro --json-out going_back.json

The models are random, in the proportions of real ones, with fewer layers and a small vocabulary. Behind 256 tokens, a
step of one row is timed, and a step whose drafted rows are all rejected; the next step begins before them. Then one
whose drafted rows are all accepted, so that the step after it folds them into the states. Steps take turns, further on
in the text each time; the medians and the least times are printed.
"""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from numpy.typing import NDArray
from support.models.state_spaces import StateSpace
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.state_memory import row_bytes, state_bytes

N_PAST, DRAFTED = 256, (1, 2, 4, 8)
_TYPES = ("Q4_K",)
PROPORTIONS = {
    "qwen3.5-2b": Tiny(
        "qwen35",
        types=_TYPES,
        n_layer=4,
        n_embd=2048,
        n_head=8,
        head_dim=256,
        n_ff=6144,
        n_rot=64,
        recurrent=(0, 1, 2),
        n_state_head=16,
        n_state_key_head=16,
        n_state=128,
        keys=(("rope.dimension_sections", np.array([11, 11, 10, 0], np.int32)),),
    ),
    "granite-4-h-micro": Tiny(
        "granitehybrid",
        types=_TYPES,
        n_layer=4,
        n_embd=2048,
        n_head=32,
        n_head_kv=8,
        n_ff=8192,
        parts=("MF", "MF", "AF", "MF"),
        space=StateSpace(n_inner=4096, n_head=64, n_state=128),
        keys=(("logit_scale", 8.0), ("rope.scaling.finetuned", False)),
    ),
}
WHOLE = {"qwen3.5-2b": 18, "granite-4-h-micro": 36}  # layers with states of the real models


def measured(name: str, folder: Path, n_threads: int, n_runs: int) -> dict[str, Any]:
    """Return the bytes and the milliseconds of a model's steps."""
    tiny = replace(PROPORTIONS[name], n_ctx_train=4096)
    path = write_tiny(folder / f"{name}.gguf", tiny)
    network = read_network(read_gguf(path))
    n_recurrent = network.n_with("recurrent")
    ids = np.random.default_rng(0).integers(0, 260, 1024).astype(np.int32)
    times: dict[str, list[float]] = {}
    options = LoadOptions(n_ctx=1024, n_threads=n_threads, cache_dir=folder)
    with closing(Cpu().load(path, options)) as model, closing(model.session(1024)) as session:
        session.forward(ids[:N_PAST], n_past=0)
        n_past = N_PAST
        for _ in range(n_runs):
            for n in DRAFTED:
                for what, n_rows, n_accepted in (
                    ("plain", 1, 1),
                    (f"{n} rejected", 1 + n, 1),
                    (f"behind {n} rejected", 1, 1),
                    (f"{n} accepted", 1 + n, 1 + n),
                    (f"behind {n} accepted", 1, 1),
                ):
                    times.setdefault(what, []).append(step(session, ids, n_past, n_rows))
                    n_past += n_accepted
    return {
        "name": name,
        "n_threads": n_threads,
        "n_layer": network.n_layer,
        "n_recurrent": n_recurrent,
        "row_bytes": row_bytes(network) // n_recurrent * WHOLE[name],
        "state_bytes": state_bytes(network) // n_recurrent * WHOLE[name],
        "ms": {what: [median(found), min(found)] for what, found in times.items()},
    }


def step(session: Session, ids: NDArray[np.int32], n_past: int, n_rows: int) -> float:
    """Evaluate rows, and return the milliseconds."""
    began = time.perf_counter()
    session.forward(ids[n_past : n_past + n_rows], n_past=n_past, rows="all")
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=PROPORTIONS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(name, Path(folder), args.threads, args.runs) for name in args.models]
    for each in found:
        layers = f"{each['n_recurrent']} of {each['n_layer']} layers recurrent"
        print(f"{each['name']}, {layers}, {each['n_threads']} threads")
        print(f"  {each['row_bytes'] / 1e3:.0f} KB a row in the log, {each['state_bytes'] / 2**20:.0f} MiB of states")
        for what, (middle, least) in each["ms"].items():
            print(f"  {what:20} {middle:7.2f} ms (least {least:.2f})")
    report({"benchmark": "going_back", "found": found}, args.json_out)


if __name__ == "__main__":
    main()
