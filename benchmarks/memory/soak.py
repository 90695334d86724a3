"""Serve many requests and watch memory and threads: both must stay flat.

    python benchmarks/memory/soak.py smollm2-135m --requests 1000

Requests differ in prompt length, sampling and seed; some are dropped half-way, some go through forks and new sessions.
Prints resident memory, threads and open files after 5 % of the requests and after all, the most that was held, and a
hash of all texts. With --memory the model is loaded under a cap, and no sessions are opened beside the planned ones.
With --beside another process takes and releases so much memory all the time. The last line is JSON.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import edgedec
from edgedec.memory.system import peak_resident_bytes, resident_bytes
from edgedec.memory_plan import parse_size
from edgedec_apps.bench.provenance import provenance

_BESIDE = """
import sys, time
while True:
    data = bytearray(int(sys.argv[1]))
    data[::4096] = b"x" * len(data[::4096])
    time.sleep(0.5)
    del data
    time.sleep(0.5)
"""


def state() -> dict[str, int]:
    """Return what the process holds now."""
    threads = Path("/proc/self/task")
    files = Path("/proc/self/fd")
    return {
        "resident_bytes": resident_bytes() or 0,
        "threads": len(list(threads.iterdir())) if threads.is_dir() else threading.active_count(),
        "open_files": len(os.listdir(files)) if files.is_dir() else 0,
    }


@contextmanager
def other_process(n_bytes: int | None) -> Iterator[None]:
    """Let another process take and release memory meanwhile."""
    if n_bytes is None:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", _BESIDE, str(n_bytes)])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def one_request(engine: edgedec.Engine, rng: random.Random) -> str:
    """Serve a request, whole or dropped, and return its text."""
    prompt = "The number " + " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 40)))
    stream = engine.stream(
        prompt, max_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99)
    )
    for i, _ in enumerate(stream):
        if i == 5 and rng.random() < 0.3:
            stream.close()
            break
    return stream.generation.text


def one_session(engine: edgedec.Engine, rng: random.Random) -> None:
    """Open a session and a fork of it, and let both go on."""
    session = engine.session(n_ctx=256)
    tokens = np.array([rng.randrange(100, 1000) for _ in range(rng.randrange(2, 100))], dtype=np.int32)
    session.forward(tokens, n_past=0)
    fork = session.fork()
    for each in (session, fork):
        each.forward(tokens[:1], n_past=len(tokens))
        each.close()


def main() -> None:
    """Serve the requests and compare the beginning with the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--runtime", default="cpu")
    parser.add_argument("--memory")
    parser.add_argument("--beside", type=parse_size, help="bytes that another process takes and releases")
    args = parser.parse_args()
    rng, others = random.Random(0), random.Random(1)
    found: dict[str, Any] = {"benchmark": "soak"} | provenance() | {"memory": args.memory, "beside": args.beside}
    before, texts = resident_bytes() or 0, hashlib.sha256()
    with (
        other_process(args.beside),
        edgedec.load(args.model, runtime=args.runtime, n_ctx=512, offline=True, memory=args.memory) as engine,
    ):
        for i in track(range(args.requests), "requests"):
            texts.update(one_request(engine, rng).encode() + b"\0")
            if i % 10 == 0 and args.memory is None:
                one_session(engine, others)
            if i + 1 in (max(1, args.requests // 20), args.requests):
                found[f"after {i + 1}"] = state()
                print(i + 1, found[f"after {i + 1}"])
        found |= {"given_up": engine.plan.given_up, "texts_sha256": texts.hexdigest()}
    found["held_more_bytes"] = (peak_resident_bytes() or 0) - before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
