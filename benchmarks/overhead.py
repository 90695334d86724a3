"""What Python costs a token: everything but the native forward, with drafting off and with the suffix drafter.

    python benchmarks/overhead.py smollm2-135m

A text is streamed greedily token by token. The native library's own account of its forwards is subtracted from the
time after the first token. Medians of several generations. Ends with one line of JSON.
"""

import argparse
import json
import statistics
from typing import Any

import edgedec
from edgedec_runtimes.cpu.model import CpuModel

_TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"


def measure(name: str, draft: str, n_tokens: int, n_runs: int) -> dict[str, Any]:
    """Return the median microseconds of Python per token and per step."""
    with edgedec.load(name, draft=draft, offline=True, runtime="cpu") as engine:
        runs = [_run(engine, n_tokens) for _ in range(n_runs + 1)][1:]
    return {
        "draft": draft,
        "us_per_token": statistics.median(per_token for per_token, _ in runs),
        "us_per_step": statistics.median(per_step for _, per_step in runs),
    }


def _run(engine: edgedec.Engine, n_tokens: int) -> tuple[float, float]:
    model = engine.model
    assert isinstance(model, CpuModel)
    stream = engine.stream(_TEXT, temperature=0, max_tokens=n_tokens, ignore_end=True)
    next(stream)
    before = sum(model.operation_seconds().values())
    for _ in stream:
        pass
    native = sum(model.operation_seconds().values()) - before
    stats = stream.generation.stats
    python = stats.total_s - stats.first_token_s - native
    return 1e6 * python / (stats.n_generated_tokens - 1), 1e6 * python / max(1, stats.n_steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    results = [measure(args.model, draft, args.tokens, args.runs) for draft in ("off", "auto")]
    for result in results:
        print(f"{result['draft']:5} {result['us_per_token']:7.1f} us a token {result['us_per_step']:7.1f} us a step")
    print(json.dumps({"benchmark": "overhead", "model": args.model, "results": results}))


if __name__ == "__main__":
    main()
