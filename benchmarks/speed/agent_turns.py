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
from support.texts.agent_turns import TEMPLATE, request

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
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", model, f"--port={port}", "--quiet"]
    server = subprocess.Popen([*command, f"--context={n_ctx}", "--draft=off"], env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            while subprocess.run([*command[:3], "ps", f"--port={port}"], capture_output=True, check=False).returncode:
                time.sleep(1)
            yield client, server.pid
    finally:
        server.terminate()
        server.wait()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turn(client: httpx.Client, pid: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the first token of an answer took."""
    n = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    begun, before = time.perf_counter(), cpu_s(pid)
    with client.stream("POST", "/v1/messages", json=body | {"stream": True}) as reply:
        reply.raise_for_status()
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("event: content_block_delta"))
        times = {"n_tokens": n, "s": time.perf_counter() - begun, "cpu_s": cpu_s(pid) - before}
        list(lines)
    return times
