"""Measure the first token of each turn of an agent's conversation, as a share of reading all of the prompt.

    python benchmarks/speed/agent_turns.py qwen2.5-coder-0.5b --tokens 8000 --json-out agent_turns.json

Ten requests to /v1/messages with tools, results and Claude Code's line for bills, which differs in each; the last prompt
has so many tokens. The server starts anew in the middle. Shares are of the first turn, whose prompt is the shortest, on
the clock and of the server's processor time. The model "recurrent" has random weights, in Qwen3.5's proportions.
"""

import argparse
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

_RECURRENT = Tiny(
    *("qwen35", ("Q4_K",)),
    **{"n_layer": 12, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "head_dim": 256, "n_ff": 3584, "n_rot": 64},
    **{"recurrent": tuple(i for i in range(12) if i % 4 != 3), "n_state_head": 16, "n_state_key_head": 16},
    **{"n_state": 128, "n_vocab": 32768, "tied": True, "n_ctx_train": 32768},
    keys=(("rope.dimension_sections", [11, 11, 10, 0]),),
)


@contextmanager
def serving(model: str, n_ctx: int, environment: dict[str, str]) -> Iterator[tuple[httpx.Client, int]]:
    """Run a server; yield a client of it, and the number of its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template = Path(environment["EDGEDEC_CACHE"], "template.jinja")
    template.write_text(TEMPLATE)  # some models' own knows no tools
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", model, f"--port={port}", "--quiet", "--alias=m"]
    options = [f"--context={n_ctx}", "--draft=off", f"--chat-template={template}"]
    server = subprocess.Popen([*command, *options], env=environment)
    try:
        while subprocess.run([*command[:3], "ps", f"--port={port}"], capture_output=True, check=False).returncode:
            time.sleep(1)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            yield client, server.pid
    finally:
        server.terminate()
        server.wait()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counted(client: httpx.Client, body: dict[str, Any]) -> int:
    """Return the tokens of a prompt."""
    reply = client.post("/v1/messages/count_tokens", json=body)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["input_tokens"])


def fitting(client: httpx.Client, n_tokens: int) -> int:
    """Return how long the system message is, in characters, for the last prompt to have so many tokens."""
    answers, n = [ANSWER] * (N_TURNS - 1), 3 * n_tokens
    for _ in range(4):
        n_found = counted(client, request(answers, n))
        n -= round((n_found - n_tokens + 8) * (n / n_found))
    return n


def turn(client: httpx.Client, pid: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the first token of an answer took."""
    n = counted(client, body)
    begun, before = time.perf_counter(), cpu_s(pid)
    with client.stream("POST", "/v1/messages", json=body | {"stream": True}) as reply:
        reply.raise_for_status()
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("event: content_block_delta"))
        times = {"n_tokens": n, "s": time.perf_counter() - begun, "cpu_s": cpu_s(pid) - before}
        list(lines)
    return times


def main() -> None:
    """Hold the conversation, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for part in ("models", "tiles", "probes"):
            Path(folder, part).symlink_to(cache_folder() / part)
        model = args.model
        if model == "recurrent":
            model = str(write_tiny(Path(folder, "m.gguf"), _RECURRENT))
        n_system = 0
        for _ in range(2):
            with serving(model, args.tokens + 64, os.environ | {"EDGEDEC_CACHE": folder}) as (client, pid):
                while len(rows) < N_TURNS:
                    answers = [ANSWER] * len(rows)
                    if not n_system:  # so that the last prompt has the tokens that are asked for
                        n_system = fitting(client, args.tokens)
                    rows.append(turn(client, pid, request(answers, n_system)))
                    print(rows[-1], flush=True)
                    if len(rows) == N_TURNS // 2:
                        break
    shares = {name: [round(row[name] / rows[0][name], 4) for row in rows[1:]] for name in ("s", "cpu_s")}
    document = {"benchmark": "agent_turns", "model": args.model, "restart_before_turn": N_TURNS // 2 + 1}
    report(document | {"turns": rows, "shares": shares["s"], "cpu_shares": shares["cpu_s"]}, args.json_out)


if __name__ == "__main__":
    main()
