"""Measure the first token of each turn of an agent's conversation, as a share of reading all of the prompt.

    python benchmarks/speed/agent_turns.py qwen2.5-coder-0.5b --characters 30000 --json-out agent_turns.json

Ten requests to /v1/messages with tools, results and Claude Code's line for bills; the server starts anew in the middle.
Shares are of the first turn, on the clock and of the server's processor time. A short request comes before, as a first
one with tools reads the vocabulary. The model "recurrent" has random weights, and layers of Qwen3.5's widths.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.models.tiny_quantized import Tiny, write_tiny
from support.texts.agent_turns import ANSWER, N_TURNS, TEMPLATE, request

_SIZES: dict[str, Any] = {"n_layer": 8, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "head_dim": 256, "n_ff": 3584}
_STATES: dict[str, Any] = {"recurrent": (0, 1, 2, 4, 5, 6), "n_state_head": 16, "n_state_key_head": 16, "n_state": 128}
_KEYS = (("rope.dimension_sections", [11, 11, 10, 0]),)
_RECURRENT = Tiny("qwen35", ("Q4_K",), tied=True, n_rot=64, n_ctx_train=8192, keys=_KEYS, **_SIZES, **_STATES)


def first_token(client: httpx.Client, pid: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a prompt, and what the first token of the answer took."""

    def cpu_s() -> float:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100

    begun, before = time.perf_counter(), cpu_s()
    with client.stream("POST", "/v1/messages", json=body | {"stream": True, "ignore_end": True}) as reply:
        reply.raise_for_status()
        events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        times = {"n_tokens": next(events)["message"]["usage"]["input_tokens"]}
        next(event for event in events if event["type"] == "content_block_delta")
        times |= {"s": round(time.perf_counter() - begun, 3), "cpu_s": round(cpu_s() - before, 2)}
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
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        for part in ("models", "tiles", "probes"):
            Path(folder, part).symlink_to(cache_folder() / part)
        model = str(write_tiny(Path(folder, "m.gguf"), _RECURRENT)) if args.model == "recurrent" else args.model
        edgedec, template = [sys.executable, "-m", "edgedec_apps.cli"], Path(folder, "template.jinja")
        template.write_text(TEMPLATE)  # some models' own knows no tools
        options = ["--quiet", "--alias=m", "--context=8192", "--draft=off", f"--chat-template={template}"]
        command = [*edgedec, "serve", model, f"--port={port}", *options]
        for numbers in (range(half), range(half, N_TURNS)):
            server = subprocess.Popen(command, env=os.environ | {"EDGEDEC_CACHE": folder})
            try:
                while subprocess.run([*edgedec, "ps", f"--port={port}"], capture_output=True, check=False).returncode:
                    time.sleep(1)
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
                    starts.append(first_token(client, server.pid, request([], 9)))
                    turns += [first_token(client, server.pid, request([ANSWER] * i, args.characters)) for i in numbers]
            finally:
                server.terminate()
                server.wait()
    shares = {f"share_{by}": [round(turn[by] / turns[0][by], 4) for turn in turns[1:]] for by in ("s", "cpu_s")}
    names = {"benchmark": "agent_turns", "model": args.model, "turn_after_restart": half + 1}
    report(names | {"starts": starts, "turns": turns} | shares, args.json_out)


if __name__ == "__main__":
    main()
