"""Measure a synthetic Gemma 4 on the cpu runtime and on llama.cpp, side by side.

    python benchmarks/speed/gemma4.py --prepare     # write the model, and make its tiles
    python benchmarks/speed/gemma4.py

The model has the widths of E2B, with 10 layers in place of 35 and 65,536 tokens in place of 262,144: five layers with
keys and values, and five twice as wide blocks behind them that share these, as 15 and 20 do in E2B. Its matrices are
random blocks of Q4_0. It lies in the cache (`gemma4/` below EDGEDEC_CACHE) and is written once.

Both runtimes run in this process, in turn, with the same number of threads. T(n) is one forward of n new tokens on 256
cached ones that returns all rows of logits; a prompt returns the last row only. The figures are medians, in
milliseconds. The last line is JSON.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgedec_apps.bench.provenance import report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from moe import in_turn
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.cpu.library import read_bandwidth
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.shared.cpu_count import usable_cores

E2B = Tiny(
    "gemma4",
    types=("Q4_0",),
    n_layer=10,
    n_embd=1536,
    n_head=8,
    n_head_kv=1,
    head_dim=512,
    narrow=256,
    whole=5,
    n_shared=5,
    n_ff=6144,
    n_per_layer=256,
    sliding_window=512,
    n_ctx_train=4096,
    n_vocab=65536,
    tied=True,
)
BATCHES = (1, 8)
N_PAST, N_PREFILL = 256, 256


def prepare(options: LoadOptions) -> Path:
    """Write the model and its tiles where they are not there, and return the model's path."""
    path = cache_folder() / "gemma4" / "synthetic-gemma4-Q4_0.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tiny(path.with_suffix(".part"), E2B).rename(path)
    Cpu().load(path, options).close()
    return path


def measure(path: Path, options: LoadOptions, n_runs: int) -> dict[str, Any]:
    """Return the figures."""
    n_threads = options.n_threads or usable_cores()
    figures: dict[str, Any] = {"threads": n_threads, "file_gb": path.stat().st_size / 1e9}
    figures["bandwidth_gb_s"] = read_bandwidth(n_threads) / 1e9
    with Cpu().load(path, options) as ours, LlamaCpp().load(path, options) as theirs:
        ids = np.random.default_rng(1).integers(260, E2B.n_vocab, (n_runs + 1, N_PREFILL + 8)).astype(np.int32)

        def act(model: Model, n_past: int, n: int) -> Callable[[int], Any]:
            session = model.session(N_PAST + BATCHES[-1])
            session.forward(ids[0, :N_PAST], n_past=0)

            def forward(run: int) -> None:
                session.forward(ids[run + 1, :n], n_past=n_past, rows="all" if n_past else "last")

            return forward

        figures["prompt of 256"] = in_turn((act(ours, 0, N_PREFILL), act(theirs, 0, N_PREFILL)), min(n_runs, 5))
        for n in BATCHES:
            figures[f"T({n})"] = in_turn((act(ours, N_PAST, n), act(theirs, N_PAST, n)), n_runs)
    names = [name for name, found in figures.items() if isinstance(found, list)]
    return figures | {f"{name}, ours / llama.cpp": figures[name][0] / figures[name][1] for name in names}


def main() -> int:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="only write the model and make its tiles")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=25, help="runs of each figure (default: 25)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    options = LoadOptions(n_ctx=512, n_threads=arguments.threads, max_rows=16, cache_dir=cache_folder())
    path = prepare(options)
    if not arguments.prepare:
        report({"benchmark": "gemma4"} | measure(path, options, arguments.runs), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
