"""Measure what attention to a shared prefix costs beside the rest of a forward, with a row of each of several texts.

    python benchmarks/shared_prefix.py qwen2.5-coder-1.5b --prefix 2000 --n 8

Cascade attention (FlashInfer, Ye et al. 2025, arXiv:2501.01005) reads a prefix that several texts share once for all of
them. It can gain at most the part of a forward that attention takes. The script reads a prefix, forks the session,
evaluates a row of each fork again and again, and prints the seconds of each operation. Ends with one line of JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

import edgedec
from edgedec.model import ForwardItem


def operation_seconds(engine: edgedec.Engine, n_prefix: int, n: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each operation in a forward with one row of each of n forks."""
    session = engine.session()
    tokens = np.random.default_rng(1).integers(1000, 20000, n_prefix).astype(np.int32)
    session.forward(tokens, n_past=0)
    forks = [session.fork() for _ in range(n)]
    items = [ForwardItem(fork, n_prefix, tokens[i : i + 1]) for i, fork in enumerate(forks)]
    engine.model.forward(items)
    before = engine.model.operation_seconds()  # type: ignore[attr-defined]
    for _ in range(rounds):
        engine.model.forward(items)
    after = engine.model.operation_seconds()  # type: ignore[attr-defined]
    for fork in [*forks, session]:
        fork.close()
    return {name: (after[name] - before[name]) / rounds for name in after}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with edgedec.load(args.model, runtime="cpu", offline=True, draft=None, n_ctx=4096) as engine:
        found = operation_seconds(engine, args.prefix, args.n, args.rounds)
    total = sum(found.values())
    attention = found["attention"]
    document: dict[str, Any] = {"benchmark": "shared_prefix", "model": args.model, "prefix": args.prefix, "n": args.n}
    document |= {"operation_s": found, "attention_share": attention / total} | provenance()
    print(f"attention takes {attention / total:.1%} of a forward over {args.n} texts with {args.prefix} shared tokens")
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
