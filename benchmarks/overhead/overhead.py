"""What Python costs a token: everything except the native forward, with drafting off and with `auto`.

    python benchmarks/overhead/overhead.py smollm2-135m

A text is streamed greedily, token by token. The native library's own account of its forwards is subtracted from the
time after the first token; that takes a quiet machine. The last figure does not: the CPU time of a plain step in a hot
loop, where the native forward is replaced by a function that does nothing. Figures are medians over several
generations, that of the hot loop is the least. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

import edgedec
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.model import CpuModel

_TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
_HOT_STEPS = 1500


def measure(name: str, draft: str, n_tokens: int, n_runs: int) -> dict[str, Any]:
    """Return the median microseconds of Python for a token and for a step."""
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
    in_library = sum(model.operation_seconds().values()) - before
    stats = stream.generation.stats
    python = stats.total_s - stats.first_token_s - in_library
    return 1e6 * python / (stats.n_generated_tokens - 1), 1e6 * python / max(1, stats.n_steps)


def hot_step_us(name: str, n_runs: int) -> float:
    """Return the least microseconds of CPU time of a plain step whose native forward does nothing."""
    library = native()
    forward = library.ec_forward
    seconds = []
    with edgedec.load(name, draft="off", offline=True, runtime="cpu") as engine:
        for _ in range(n_runs):
            stream = engine.stream(_TEXT, temperature=0, max_tokens=_HOT_STEPS + 2, ignore_end=True)
            next(stream)
            library.ec_forward = lambda *arguments: 0
            try:
                started = time.process_time()
                for _ in range(_HOT_STEPS):
                    next(stream)
                seconds.append(time.process_time() - started)
            finally:
                library.ec_forward = forward
            stream.close()
    return 1e6 * min(seconds) / _HOT_STEPS


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
    hot_us = hot_step_us(args.model, args.runs)
    print(f"hot   {hot_us:7.1f} us of CPU time a plain step without the native forward")
    print(json.dumps({"benchmark": "overhead", "model": args.model, "results": results, "hot_us_per_step": hot_us}))


if __name__ == "__main__":
    main()
