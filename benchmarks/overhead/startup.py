"""Measure what a start costs (`import edgedec`, `edgedec --help`, the memory of `edgedec run`), and Python in a step.

    python benchmarks/overhead/startup.py --model smollm2-135m

Wall times are medians over fresh processes; an empty interpreter's time is printed beside them. The memory is the peak
resident size of the whole process over a prompt and 64 tokens. Of a step the CPU time is measured in a hot loop whose
native forward does nothing: the least of the runs. Ends with one line of JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

import edgedec
from edgedec_runtimes.cpu.library import native

_TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
_HOT_STEPS = 1500
_RUN = """
import sys
from edgedec.memory.system import peak_resident_bytes
from edgedec_apps.cli import main
sys.argv = ["edgedec", "run", sys.argv[1], "Why is the sky blue?", "--max-tokens", "64", "-t", "0"]
try:
    main()
except SystemExit as end:
    print(peak_resident_bytes(), file=sys.stderr)
    sys.exit(end.code)
"""


def wall_s(command: list[str], n_runs: int) -> list[float]:
    """Return the wall times of `n_runs` runs after one warm-up."""
    times = []
    for _ in range(n_runs + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return times[1:]


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
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=11)
    args = parser.parse_args()
    commands = {
        "empty interpreter": [sys.executable, "-c", "pass"],
        "import edgedec": [sys.executable, "-c", "import edgedec"],
        "edgedec --help": [sys.executable, "-m", "edgedec_apps.cli", "--help"],
    }
    figures: dict[str, Any] = {}
    for name, command in commands.items():
        times = wall_s(command, args.runs)
        figures[name] = round(median(times), 3)
        print(f"{name:20} {median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    result = subprocess.run([sys.executable, "-c", _RUN, args.model], capture_output=True, text=True, check=True)
    peak = int(result.stderr.split()[-1])
    figures["peak_resident_bytes"] = peak
    print(f"{'edgedec run':20} {peak / 1e6:.1f} MB at the peak ({args.model}, default context)")
    figures["hot_step_us"] = hot_step_us(args.model, args.runs)
    print(f"{'a step':20} {figures['hot_step_us']:.1f} us of CPU time without the native forward")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
