"""What Superposed Decoding could bring at best: the time of one row against that of k real forks.

    python benchmarks/studies/superposed.py --timed qwen2.5-coder-1.5b

Superposed Decoding (Shen et al. 2024, arXiv:2405.18400) writes k continuations with one row a token: their latest
tokens enter the model as one embedding. Real forks take a row for each continuation in a common forward, and write what
the model would. So the ratio of the two times bounds the gain from above, whatever the texts are worth. Ends with one
line of JSON: milliseconds by the number of forks, the medians of 40 forwards, three times.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import edgedec
from edgedec_apps.bench.provenance import report

PROMPT = "The best way to learn a new language is to"


def times(name: str, k: int) -> dict[str, float]:
    """Return the median milliseconds of a forward of one branch, and of one of k branches."""
    with edgedec.load(name, runtime="cpu", draft="off", offline=True) as engine, engine.branches(PROMPT) as texts:
        names = [texts.root, *texts.fork(texts.root, k - 1)]
        found: dict[int, list[float]] = {1: [], k: []}
        for step in range(40):
            for n, seconds in found.items():
                began = perf_counter()
                texts.forward({branch: [100 + step] for branch in names[:n]})
                seconds.append(perf_counter() - began)
    return {f"{n}": round(1000 * median(seconds), 2) for n, seconds in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", required=True, metavar="MODEL")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "superposed", "timed": args.timed, "k": args.k}
    line |= {"forward_ms": [times(args.timed, args.k) for _ in range(3)]}
    report(line, args.json_out)


if __name__ == "__main__":
    main()
