"""Measure what attention to a shared prefix costs in a forward with a row of each of several texts.

    python benchmarks/forwards/shared_prefix.py qwen2.5-coder-1.5b --library before=OLD/libedgedec_cpu.so \
        --out benchmarks/results/shared_prefix.json

Cascade attention (FlashInfer, Ye et al. 2025, arXiv:2501.01005) reads a prefix that several texts share once for all of
them. The script forks a session that holds the prefix, evaluates a row of each fork again and again, and prints the
medians of the milliseconds of attention and of the whole forward. Every library is a process of its own; the libraries
take turns in every round, and their logits must have the same bits. Ends with one line of JSON.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgedec
from edgedec.model import ForwardItem, Session
from edgedec_apps.bench.provenance import provenance

Tokens = NDArray[np.int32]
Answer = tuple[float, float, str]
_SPAWN = multiprocessing.get_context("spawn")


def answer(engine: edgedec.Engine, forks: Sequence[Session], n_prefix: int, tokens: Tokens) -> Answer:
    """Return the seconds of attention and of a forward with a row of each fork, and the hash of its logits."""
    items = [ForwardItem(fork, n_prefix, tokens[i : i + 1]) for i, fork in enumerate(forks)]
    before = engine.model.operation_seconds()  # type: ignore[attr-defined]
    forwards = engine.model.forward(items)
    after = engine.model.operation_seconds()  # type: ignore[attr-defined]
    digest = sha256(b"".join(forward.logits.tobytes() for forward in forwards)).hexdigest()
    return after["attention"] - before["attention"], sum(after.values()) - sum(before.values()), digest


def serve(pipe: Connection, model: str, library: str, kv_type: str, n_most: int) -> None:
    """Load the model, read the longest prefix, then answer each prefix and number of texts."""
    if library:
        os.environ["EDGEDEC_CPU_LIBRARY"] = library
    tokens = np.random.default_rng(1).integers(1000, 20000, n_most).astype(np.int32)
    with edgedec.load(model, runtime="cpu", offline=True, draft=None, n_ctx=n_most + 64, kv_type=kv_type) as engine:
        session = engine.session()
        session.forward(tokens, n_past=0)
        pipe.send(None)
        forks: dict[int, list[Session]] = {}  # by the prefix that they share
        while True:
            try:
                n_prefix, n = pipe.recv()
            except EOFError:
                return
            known = forks.setdefault(n_prefix, [])
            known += [session.fork() for _ in range(n - len(known))]
            pipe.send(answer(engine, known[:n], n_prefix, tokens))


def in_turn(pipes: dict[str, Connection], n_prefix: int, n: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each library, from rounds in which the libraries take turns."""
    found: dict[str, list[Answer]] = {name: [] for name in pipes}
    for _ in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.send((n_prefix, n))
            found[name].append(pipe.recv())
    if len({digest for answers in found.values() for *_, digest in answers}) != 1:
        raise SystemExit("logits differ between libraries or rounds")
    rows = []
    for name, answers in found.items():
        attention = [seconds * 1e3 for seconds, _, _ in answers[1:]]
        total = [seconds * 1e3 for _, seconds, _ in answers[1:]]
        low, *_, high = statistics.quantiles(attention, n=10)
        figures = {"attention_ms": statistics.median(attention), "attention_p10_ms": low, "attention_p90_ms": high}
        rows.append({"prefix": n_prefix, "n": n, "library": name, **figures, "forward_ms": statistics.median(total)})
    return rows


def measure(
    model: str, libraries: dict[str, str], kv_type: str, prefixes: list[int], numbers: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Return and print a row for each prefix, number of texts and library."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        pipes: dict[str, Connection] = {}
        for name, library in libraries.items():
            ours, theirs = _SPAWN.Pipe()
            _SPAWN.Process(target=serve, args=(theirs, model, library, kv_type, max(prefixes)), daemon=True).start()
            theirs.close()
            pipes[name] = stack.enter_context(ours)
            ours.recv()
        for n_prefix in prefixes:
            for n in numbers:
                for row in in_turn(pipes, n_prefix, n, rounds):
                    print(f"{kv_type} prefix {n_prefix:5}  n {n:2}  {row['library']:10} attention", end=" ")
                    print(f"{row['attention_ms']:7.2f} ms, forward {row['forward_ms']:7.2f} ms", flush=True)
                    rows.append({"kv_type": kv_type, **row})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, nargs="+", default=[300, 2000, 8000])
    parser.add_argument("--n", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kv-type", nargs="+", default=["f16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH", help="another build of ours")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    libraries = dict(text.split("=", 1) for text in args.library) | {"this": ""}
    rows: list[dict[str, Any]] = []
    for kv_type in args.kv_type:
        rows += measure(args.model, libraries, kv_type, args.prefix, args.n, args.rounds)
    document: dict[str, Any] = {"benchmark": "shared_prefix", "model": args.model, "rows": rows} | provenance()
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
