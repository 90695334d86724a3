"""Measure the first token of each turn of an agent's conversation, as a share of reading all of the prompt.

    python benchmarks/speed/agent_turns.py qwen2.5-coder-0.5b --characters 30000 --json-out agent_turns.json

Ten requests to /v1/messages with tools, results and Claude Code's line for bills, which differs in each. The server
starts anew in the middle. Shares are of the first turn, whose prompt is the shortest, on the clock and of the server's
processor time. A short request comes before, as the first one of a server with tools reads the vocabulary; it is shown,
too. The model "recurrent" has random weights, and the layers of Qwen3.5.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.models.tiny_quantized import Tiny, write_tiny
from support.texts.agent_turns import ANSWER, N_TURNS, TEMPLATE, request

_SIZES = {"n_layer": 8, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "head_dim": 256, "n_rot": 64, "n_ff": 3584}
_STATES = {"recurrent": (0, 1, 2, 4, 5, 6), "n_state_head": 16, "n_state_key_head": 16, "n_state": 128}
_KEYS = (("rope.dimension_sections", [11, 11, 10, 0]),)
_RECURRENT = Tiny("qwen35", ("Q4_K",), tied=True, n_ctx_train=32768, keys=_KEYS, **_SIZES, **_STATES)


@contextmanager
def serving(model: str, folder: str) -> Iterator[tuple[httpx.Client, int]]:
    """Run a server whose cache is a folder; yield a client of it, and the number of its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template = Path(folder, "template.jinja")
    template.write_text(TEMPLATE)  # some models' own knows no tools
    edgedec = [sys.executable, "-m", "edgedec_apps.cli"]
    options = [f"--port={port}", "--quiet", "--alias=m", "--context=8192", "--draft=off", f"--chat-template={template}"]
    server = subprocess.Popen([*edgedec, "serve", model, *options], env=os.environ | {"EDGEDEC_CACHE": folder})
    try:
        while subprocess.run([*edgedec, "ps", f"--port={port}"], capture_output=True, check=False).returncode:
            time.sleep(1)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            yield client, server.pid
    finally:
        server.terminate()
        server.wait()


def first_token(client: httpx.Client, pid: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a prompt, and what the first token of the answer took."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    begun, before = time.perf_counter(), cpu_s()
    with client.stream("POST", "/v1/messages", json=body | {"stream": True, "ignore_end": True}) as reply:
        reply.raise_for_status()
        events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        n_tokens = next(events)["message"]["usage"]["input_tokens"]
        next(event for event in events if event["type"] == "content_block_delta")
        times = {"n_tokens": n_tokens, "s": round(time.perf_counter() - begun, 3), "cpu_s": round(cpu_s() - before, 2)}
        list(events)
    print(times, flush=True)
    return times


def main() -> None:
    """Hold the conversation, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--characters", type=int, default=30000, help="of the system message")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    starts, turns, half = list[dict[str, Any]](), list[dict[str, Any]](), N_TURNS // 2
    with TemporaryDirectory() as folder:
        for part in ("models", "tiles", "probes"):
            Path(folder, part).symlink_to(cache_folder() / part)
        model = str(write_tiny(Path(folder, "m.gguf"), _RECURRENT)) if args.model == "recurrent" else args.model
        for numbers in (range(half), range(half, N_TURNS)):
            with serving(model, folder) as (client, pid):
                starts.append(first_token(client, pid, request([], 9)))
                turns += [first_token(client, pid, request([ANSWER] * i, args.characters)) for i in numbers]
    shares = {f"share_{by}": [round(turn[by] / turns[0][by], 4) for turn in turns[1:]] for by in ("s", "cpu_s")}
    document = {"benchmark": "agent_turns", "model": args.model, "starts": starts, "turns": turns} | shares
    report(document | {"turn_after_restart": half + 1}, args.json_out)


if __name__ == "__main__":
    main()
