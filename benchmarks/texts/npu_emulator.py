"""Compare an export for NPUs on the Hexagon emulator with the same graph on the CPU provider, and both with the source.

    python benchmarks/texts/npu_emulator.py smollm2-135m --positions 512

The emulator comes with onnxruntime-qnn for x86-64 (pip install ".[npu,export]"); every node of the graph runs on
it, or nothing does. The source is a float32 computation on the GGUF's dequantized weights (float_truth.py). Each
position of real text (this repository's own documents, or --text) is predicted by all three from the same tokens
before it. Agreement is how often two prefer the same token; KL is in nats, over the whole vocabulary. What the
emulator takes says nothing about an NPU's speed. Ends with one line of JSON.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from cpu_closeness import read_text, windows
from float_truth import FloatModel, log_softmax
from numpy.typing import NDArray
from rich.console import Console

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec_export.npu.export import export_npu
from edgedec_runtimes.npu.facts import read_facts
from edgedec_runtimes.npu.runtime import Npu

_ROWS = 8  # of a forward: one run of the graph that single steps take
_DEVICES = {"emulator": "npu", "cpu": "cpu"}

Found = dict[str, NDArray[np.float32]]


def kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    """Return KL(p || q) of two rows of logits, f32[n_vocab]."""
    p, q = log_softmax(p_logits.astype(np.float64)), log_softmax(q_logits.astype(np.float64))
    return float(np.exp(p) @ (p - q))


def compare(found: Found) -> list[dict[str, float]]:
    """Return what is kept of some positions; logits are f32[n, n_vocab] by name, "source" among them."""
    top = {name: logits.argmax(axis=1) for name, logits in found.items()}
    kept = []
    for i, source in enumerate(found["source"]):
        row = {f"kl_{name}": kl(source, found[name][i]) for name in found if name != "source"}
        for first, second in (("emulator", "cpu"), ("emulator", "source"), ("cpu", "source")):
            if first in top and second in top:
                row[f"{first}_as_{second}"] = float(top[first][i] == top[second][i])
        if "emulator" in found and "cpu" in found:
            row["kl_cpu_emulator"] = kl(found["cpu"][i], found["emulator"][i])
        kept.append(row)
    return kept


def compare_window(truth: FloatModel, states: Any, tokens: NDArray[np.int32], sessions: dict[str, Session]) -> Any:
    """Yield what is kept of each position of a window, a forward of each session at a time."""
    for begin in range(0, len(tokens), _ROWS):
        piece = slice(begin, begin + _ROWS)
        found = {name: s.forward(tokens[piece], n_past=begin, rows="all").logits for name, s in sessions.items()}
        yield compare({**found, "source": truth.logits(states[piece])})


def measure(args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Export the model and compare its forwards."""
    start = time.perf_counter()
    path = resolve(args.model, ResolveOptions(None))
    if args.folder is None:
        export_npu(path, folder, contexts=args.contexts)
    export_s = time.perf_counter() - start
    truth, facts = FloatModel(read_gguf(path)), read_facts(folder)
    window = min(args.window, facts.contexts[-1])
    with ExitStack() as stack:
        options = {name: LoadOptions(device=device, n_threads=args.threads) for name, device in _DEVICES.items()}
        chosen = {name: o for name, o in options.items() if name in args.on}
        models = {name: stack.enter_context(Npu().load(folder, o)) for name, o in chosen.items()}
        pieces = windows(next(iter(models.values())), read_text(args), args.positions, window)
        states = truth.states(pieces)
        sessions = {name: model.session(window) for name, model in models.items()}
        rows: list[dict[str, float]] = []
        begun = time.perf_counter()
        for tokens, window_states in zip(pieces, states, strict=True):
            for found in compare_window(truth, window_states, tokens, sessions):
                rows += found
                spent = time.perf_counter() - begun
                console.print(f"{len(rows)} of {args.positions} positions, {spent:.0f} s", end="\r")
    figures = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {
        "model": path.name,
        "positions": len(rows),
        **{name: round(value, 5) for name, value in figures.items()},
        "export_s": round(export_s, 1),
        "compare_s": round(time.perf_counter() - begun, 1),
        "folder_bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or path of a GGUF")
    parser.add_argument("--folder", type=Path, help="an export of it, instead of a new one")
    parser.add_argument("--on", nargs="+", choices=[*_DEVICES], default=[*_DEVICES], help="where to run the export")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--window", type=int, default=256, help="tokens of context, at most (default: 256)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256], help="contexts to export")
    parser.add_argument("--text", type=Path, help="a text file to predict")
    parser.add_argument("--threads", type=int, help="threads of the CPU provider (default: the cores)")
    args = parser.parse_args()
    args.prompts = None
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "export"
        result = measure(args, folder, console)
    console.print(*(f"{name}: {value}" for name, value in result.items()), sep="\n")
    print(json.dumps({"benchmark": "npu_emulator", "window": args.window, **result}))


if __name__ == "__main__":
    main()
