"""Memory and threads over many requests: both must stay flat.

    python benchmarks/soak.py smollm2-135m --requests 1000

Requests differ in prompt length, sampling and seed; some are dropped half-way, some go through forks and new sessions.
Prints resident memory, threads and open files after 5 % of the requests and after all. The last line is JSON.
"""

import argparse
import json
import os
import random
import threading
from pathlib import Path

import numpy as np
from rich.progress import track

import edgedec
from edgedec.system_memory import resident_bytes


def state() -> dict[str, int]:
    """Return what the process holds now."""
    threads = Path("/proc/self/task")
    files = Path("/proc/self/fd")
    return {
        "resident_bytes": resident_bytes() or 0,
        "threads": len(list(threads.iterdir())) if threads.is_dir() else threading.active_count(),
        "open_files": len(os.listdir(files)) if files.is_dir() else 0,
    }


def one_request(engine: edgedec.Engine, rng: random.Random) -> None:
    """Serve a request, whole or dropped."""
    prompt = "The number " + " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 40)))
    stream = engine.stream(
        prompt, max_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99)
    )
    for i, _ in enumerate(stream):
        if i == 5 and rng.random() < 0.3:
            stream.close()
            break


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
    args = parser.parse_args()
    rng = random.Random(0)
    found = {}
    with edgedec.load(args.model, runtime=args.runtime, n_ctx=512, offline=True) as engine:
        for i in track(range(args.requests), "requests"):
            one_request(engine, rng)
            if i % 10 == 0:
                one_session(engine, rng)
            if i + 1 in (max(1, args.requests // 20), args.requests):
                found[i + 1] = state()
                print(i + 1, found[i + 1])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
