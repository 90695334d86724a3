"""Measure how close the cpu runtime and llama.cpp come to what the weights mean, and where their choices differ.

    python benchmarks/texts/cpu_closeness.py --positions 2000 smollm2-135m qwen2.5-coder-0.5b gemma3-270m \
        qwen2.5-coder-1.5b

The truth is a float32 computation on the dequantized weights (float_truth.py). Each position of real text (this
repository's own documents, or --text, or --prompts) is predicted by all three from the same tokens before it, and
KL(truth || runtime) is taken over the whole vocabulary. A margin says by how much llama.cpp prefers its best token to
the cpu runtime's, in its own logits; "with truth" counts only positions where llama.cpp's best token is the truth's,
too. Keys and values are kept in f16 by both runtimes. Ends with one line of JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from float_truth import FloatModel, log_softmax
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Model, Session
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

_ROOT = Path(__file__).resolve().parents[2]
_CHUNK = 64
RUNTIMES: dict[str, Callable[[], Runtime]] = {"cpu": Cpu, "llamacpp": LlamaCpp}


@dataclass(slots=True)
class Compared:
    """The comparison at one position.

    Attributes:
        kl: KL(truth || runtime) in nats, by runtime.
        top: The token that each prefers, "truth" included.
        margin: How much llama.cpp prefers its own token to the cpu runtime's.
    """

    kl: dict[str, float]
    top: dict[str, int]
    margin: float


def read_text(args: argparse.Namespace) -> str:
    """Return the text to predict: that of --text or --prompts, else this repository's documents."""
    if args.prompts:
        lines = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines() if line]
        return "\n\n".join(turn for line in lines for turn in line["turns"])
    files = [args.text] if args.text else [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def windows(model: Model, text: str, n_positions: int, n_window: int) -> list[NDArray[np.int32]]:
    """Return token ids in windows that hold `n_positions` together, each begun as a text of its own."""
    begin = model.tokenizer.encode("")
    ids = model.tokenizer.encode(text, add_special=False)
    result, n_left = [], n_positions
    while n_left:
        n = min(n_left, n_window)
        taken, ids = ids[: n - len(begin)], ids[n - len(begin) :]
        if len(begin) + len(taken) < n:
            raise SystemExit(f"the text has too few tokens for {n_positions} positions; give a longer one (--text)")
        result.append(np.array([*begin, *taken], np.int32)[:n])
        n_left -= n
    return result


def compare_rows(truth: NDArray[np.float32], found: dict[str, NDArray[np.float32]]) -> Iterator[Compared]:
    """Compare the logits of some positions, f32[n, n_vocab] each."""
    for i, row in enumerate(truth):
        expected = log_softmax(row.astype(np.float64))
        p = np.exp(expected)
        kl = {name: float(p @ (expected - log_softmax(logits[i].astype(np.float64)))) for name, logits in found.items()}
        top = {name: int(logits[i].argmax()) for name, logits in found.items()} | {"truth": int(row.argmax())}
        theirs = found["llamacpp"][i]
        yield Compared(kl, top, float(theirs[top["llamacpp"]] - theirs[top["cpu"]]))


def compare_window(
    truth: FloatModel, states: Any, tokens: NDArray[np.int32], sessions: dict[str, Session]
) -> list[Compared]:
    """Evaluate one window with both runtimes, some rows at a time."""
    result: list[Compared] = []
    for begin in range(0, len(tokens), _CHUNK):
        piece = slice(begin, begin + _CHUNK)
        found = {name: s.forward(tokens[piece], n_past=begin, rows="all").logits for name, s in sessions.items()}
        result += compare_rows(truth.logits(states[piece]), found)
    return result


def summary(rows: list[Compared]) -> dict[str, Any]:
    """Return the figures of one model."""
    differing = [row.margin for row in rows if row.top["cpu"] != row.top["llamacpp"]]
    ours = [row.margin for row in rows if row.top["cpu"] != row.top["llamacpp"] == row.top["truth"]]
    figures: dict[str, Any] = {"positions": len(rows)}
    for name in RUNTIMES:
        kl = np.array([row.kl[name] for row in rows])
        figures[f"kl_{name}"] = float(kl.mean())
        figures[f"kl_p99_{name}"] = float(np.percentile(kl, 99))
        figures[f"agreement_{name}"] = float(np.mean([row.top[name] == row.top["truth"] for row in rows]))
    figures["ratio"] = figures["kl_cpu"] / figures["kl_llamacpp"]
    figures["differing"] = len(differing) / len(rows)
    figures["largest_margin"] = max(differing, default=0.0)
    figures["largest_margin_against_truth"] = max(ours, default=0.0)
    return figures


def measure(name: str, args: argparse.Namespace, text: str) -> dict[str, Any]:
    """Compare one model."""
    start = time.perf_counter()
    path = resolve(name, ResolveOptions(args.cache_dir))
    truth = FloatModel(read_gguf(path))
    options = LoadOptions(n_ctx=args.window, max_rows=_CHUNK, n_threads=args.threads, cache_dir=args.cache_dir)
    with ExitStack() as stack:
        models = {key: stack.enter_context(runtime().load(path, options)) for key, runtime in RUNTIMES.items()}
        pieces = windows(models["llamacpp"], text, args.positions, args.window)
        states = truth.states(pieces)
        sessions = {key: model.session(args.window) for key, model in models.items()}
        rows: list[Compared] = []
        for tokens, window_states in zip(pieces, states, strict=True):
            rows += compare_window(truth, window_states, tokens, sessions)
    return {"model": name, **summary(rows), "seconds": round(time.perf_counter() - start, 1)}


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="closeness to float32 on the dequantized weights")
    for column in ("model", "positions", "mean KL cpu", "llama.cpp", "ratio", "p99 cpu", "llama.cpp"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=column == "model")
    for column in ("top-1 as truth cpu", "llama.cpp", "cpu differs from llama.cpp", "largest margin", "with truth"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            *(r["model"], str(r["positions"]), f"{r['kl_cpu']:.2e}", f"{r['kl_llamacpp']:.2e}", f"{r['ratio']:.3f}"),
            *(f"{r['kl_p99_cpu']:.2e}", f"{r['kl_p99_llamacpp']:.2e}"),
            *(f"{r['agreement_cpu']:.1%}", f"{r['agreement_llamacpp']:.1%}"),
            *(f"{r['differing']:.1%}", f"{r['largest_margin']:.3f}", f"{r['largest_margin_against_truth']:.3f}"),
        )
    Console(width=max(140, Console().width)).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names or paths")
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--window", type=int, default=512, help="tokens of context, at most (default: 512)")
    parser.add_argument("--text", type=Path, help="a text file to predict")
    parser.add_argument("--prompts", type=Path, help="lines of JSON with turns, to predict")
    parser.add_argument("--threads", type=int, help="threads of the runtimes (default: the cores)")
    parser.add_argument("--cache-dir", type=Path, default=None, help="edgedec's cache, for tiles")
    args = parser.parse_args()
    args.cache_dir = args.cache_dir or (Path(cache) if (cache := os.environ.get("EDGEDEC_CACHE")) else None)
    text = read_text(args)
    results = [measure(name, args, text) for name in args.models]
    show(results)
    print(json.dumps({"benchmark": "cpu_closeness", "window": args.window, "results": results}))


if __name__ == "__main__":
    main()
