"""Decode with part of the weights in memory: measure what is held, and the speed against the rate of the disk.

    python benchmarks/forwards/larger_than_memory.py qwen2.5-coder-1.5b --share 0.5 --rounds 5

One process has all weights in memory, a second one `--share` of the bytes that each token needs. The second may
allocate no more than planned and 64 MB (RLIMIT_DATA), and the system's cache is told to drop the tile file first.
Between rounds of steps, the disk's speed is measured by reading what a token misses and doing nothing else; a round is
compared with the mean of the two measurements around it. The outputs must be equal. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.system import peak_resident_bytes
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu import weights
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.cache import known_tile_file
from edgedec_runtimes.cpu.tiles.paged_file import PAGE_BYTES, PagedFile, page_buffer
from edgedec_runtimes.cpu.tiles.streaming import StreamPlan, plan_streaming

_PROMPT = "def fibonacci(n):\n"
_SLACK_BYTES = 64 << 20
_N_CTX = 512


def options(resident_bytes: int | None) -> LoadOptions:
    """Return how to load."""
    return LoadOptions(
        n_ctx=_N_CTX,
        n_threads=2,
        max_rows=1,
        cache_dir=cache_folder(),
        resident_bytes=resident_bytes,
    )


def stream_plan(path: Path, share: float) -> tuple[StreamPlan, int]:
    """Return the plan for a share of the weights that each token needs, and what is allowed for it."""
    gguf = read_gguf(path)
    network = read_network(gguf)
    offsets = weights.tile_job(gguf, network, LoadOptions()).header.places()
    needed = sum(part.n_bytes for part in plan_streaming(network, offsets, 1 << 60).parts)
    allowed = int(needed * share)
    return plan_streaming(network, offsets, allowed), allowed


def limit_allocations(planned_bytes: int) -> None:
    """Have the system refuse what goes far beyond the plan."""
    if sys.platform != "linux":
        return
    import resource

    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    data_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    n_bytes = data_kib * 1024 + planned_bytes + _SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))


def disk_rate(path: Path, plan: StreamPlan | None) -> float:
    """Return the bytes per second at which the parts that don't stay are read, one after another, by nobody else."""
    if plan is None:
        return 0.0
    out = page_buffer(max(part.held_bytes for part in plan.parts))
    out[::PAGE_BYTES] = 1  # so that its pages are there
    sleep(0.5)  # what is being read ahead has come by then
    with PagedFile(path) as file:
        start = perf_counter()
        for part in plan.parts:
            if not part.stays:
                file.read(part.offset, part.n_bytes, out)
        return plan.missing_bytes / (perf_counter() - start)


def decode(path: Path, tile_file: Path, resident_bytes: int | None, n_rounds: int, n_steps: int) -> dict[str, Any]:
    """Take greedy steps in rounds, with a look at the disk's speed around each where weights are streamed."""
    chosen = options(resident_bytes)
    gguf = read_gguf(path)
    network = read_network(gguf)
    plan = weights.stream_plan(weights.tile_job(gguf, network, chosen), network, chosen.resident_bytes)
    if resident_bytes is not None:
        terms = Cpu().plan(path, chosen)
        with PagedFile(tile_file) as file:
            file.forget(0, file.n_bytes)
        limit_allocations(sum(term.n_bytes for term in terms if not term.base))
    with Cpu().load(path, chosen) as model:
        assert isinstance(model, CpuModel)
        tokens = model.tokenizer.encode(_PROMPT)
        session = model.session(_N_CTX)
        forward = session.forward(np.array(tokens, np.int32), n_past=0)
        n_prompt = len(tokens)
        rates, seconds = [], []
        for _ in range(n_rounds):
            rates.append(disk_rate(tile_file, plan))
            start = perf_counter()
            for _ in range(n_steps):
                tokens.append(int(forward.logits[-1].argmax()))
                forward = session.forward(np.array(tokens[-1:], np.int32), n_past=len(tokens) - 1)
            seconds.append((perf_counter() - start) / n_steps)
        rates.append(disk_rate(tile_file, plan))
        terms = model.memory(_N_CTX, 1)
    return {
        "tokens": tokens[n_prompt:],
        "seconds": seconds,
        "rates": rates,
        "peak_bytes": peak_resident_bytes(),
        "planned_bytes": sum(term.n_bytes for term in terms),
        "weights_bytes": next(term.n_bytes for term in terms if term.name.startswith("weights")),
        "prediction": next(term.detail for term in terms if term.name.startswith("weights")),
    }


def in_child(path: Path, tile_file: Path, resident_bytes: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run decode in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps([str(tile_file), resident_bytes]), str(path)]
    command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Compare, print and end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--share", type=float, default=0.5, help="of the weights that each token needs (default: 0.5)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="tokens of a round (default: 8)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        tile_file, resident_bytes = json.loads(arguments.child)
        found = decode(Path(arguments.model), Path(tile_file), resident_bytes, arguments.rounds, arguments.steps)
        print(json.dumps(found))
        return
    path = resolve(arguments.model, ResolveOptions(cache_folder(), True, None, None))
    plan, allowed = stream_plan(path, arguments.share)
    Cpu().load(path, options(allowed)).close()  # makes the tiles where there are none
    gguf = read_gguf(path)
    tile_file = known_tile_file(weights.tile_job(gguf, read_network(gguf), LoadOptions(cache_dir=cache_folder())))
    assert tile_file is not None, "they were made"
    whole, streamed = (in_child(path, tile_file, most, arguments) for most in (None, allowed))
    if whole["tokens"] != streamed["tokens"]:
        raise SystemExit("the outputs differ")
    rates = streamed["rates"]
    shares = [
        plan.missing_bytes / seconds / ((before + after) / 2)
        for seconds, before, after in zip(streamed["seconds"], rates, rates[1:], strict=False)
    ]
    result = provenance() | {
        "model": path.stem,
        "tile_bytes": tile_file.stat().st_size,
        "allowed_bytes": allowed,
        "resident_bytes": streamed["weights_bytes"],
        "missing_bytes": plan.missing_bytes,
        "peak_bytes": streamed["peak_bytes"],
        "planned_bytes": streamed["planned_bytes"],
        "peak_bytes_in_memory": whole["peak_bytes"],
        "tokens_per_s": [round(1 / seconds, 3) for seconds in streamed["seconds"]],
        "tokens_per_s_in_memory": round(1 / statistics.median(whole["seconds"]), 2),
        "read_mb_per_s": [round(rate / 1e6) for rate in rates],
        "share_of_storage": [round(share, 3) for share in shares],
        "median_share_of_storage": round(statistics.median(shares), 3),
        "prediction": streamed["prediction"],
    }
    for name, value in result.items():
        print(f"{name:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
