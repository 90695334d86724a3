"""Measure what exact single steps cost on the onnx runtime: the second row in attention, or in all of the graph.

python benchmarks/forwards/onnx_single_steps.py FOLDER [--runs N]

Compares CPU seconds of one thread of a plain step as it is (two rows) with those of a graph that is given one row, and
says whether its bits differ. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec_runtimes.onnx import feeds
from edgedec_runtimes.onnx.runtime import Onnx

N_PREFIX = 256


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    chosen = parser.parse_args()
    even = feeds.even
    with Onnx().load(chosen.folder, LoadOptions(n_ctx=N_PREFIX + 8, n_threads=1)) as model:
        session = model.session(N_PREFIX + 8)
        session.forward(np.arange(N_PREFIX, dtype=np.int32), n_past=0)
        seconds: dict[str, list[float]] = {"two rows": [], "one row": []}
        bits = {}
        for _ in range(chosen.runs):
            for name in seconds:
                feeds.even = even if name == "two rows" else lambda n: n
                taken, bits[name] = step(session)
                seconds[name].append(taken)
    middle = {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()}
    spread = {name: round(1000 * (max(values) - min(values)), 2) for name, values in seconds.items()}
    equal = bits["two rows"] == bits["one row"]
    print(json.dumps({"median_ms": middle, "spread_ms": spread, "runs": chosen.runs, "equal_bits": equal}))


def step(session: Session) -> tuple[float, bytes]:
    """Return the CPU seconds of one token, and the bytes of its logits."""
    started = time.process_time()
    forward = session.forward(np.array([5], np.int32), n_past=N_PREFIX)
    return time.process_time() - started, forward.logits.tobytes()


if __name__ == "__main__":
    main()
