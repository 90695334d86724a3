"""Record what coding agents send to a server, what they are answered, and how long each turn waits.

    python benchmarks/speed/agents.py qwen2.5-coder-0.5b --out agents.json

Each agent that is installed is started twice by `edgedec launch` in a folder with one small file, the second time to go
on. A proxy before the server records its requests. Prompts of earlier runs are not used, and no settings of yours.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import report

_EDGEDEC = [sys.executable, "-m", "edgedec_apps.cli"]
_FIRST = "Call the tool {} to read the file calc.py. Then say in one sentence what it does."
_SECOND = "Is it right? Answer in one word."
_AIDER = ["calc.py", "--yes-always", "--no-auto-commits", "--no-gitignore"]
_TURNS = {
    "claude": (["-p", _FIRST.format("Read")], ["-p", "--continue", _SECOND]),
    "codex": (["exec", "-s", "read-only", _FIRST.format("exec_command")], ["exec", "resume", "--last", _SECOND]),
    "opencode": (["run", _FIRST.format("read")], ["run", "--continue", _SECOND]),
    "aider": (
        [*_AIDER, "--message", "Say in one sentence what calc.py does."],
        [*_AIDER, "--restore-chat-history", "--message", _SECOND],
    ),
}
_TIMINGS = re.compile(r'"timings": (\{[^{}]*\})')
_CALLS = re.compile(r'"type": "(?:tool_use|function_call)"[^{}]*"name": "([^"]*)"|"function": \{"name": "([^"]*)"')
_TEXT = re.compile(r'"(?:content|text)": "((?:[^"\\]|\\.)*)"')
_ENDS = ("message_stop", "response.completed", "[DONE]", '"finish_reason": "')
_TURN_S = 420


def record_of(body: bytes, answer: str) -> dict[str, Any]:
    """Return what is recorded of a request and its answer: names and counts, no texts."""
    sent = json.loads(body or b"{}")
    timings = json.loads((_TIMINGS.findall(answer) or ["{}"])[-1])
    return {
        "fields": list(sent),
        "tools": [tool.get("name") or tool["function"]["name"] for tool in sent.get("tools") or ()],
        "ended": any(end in answer[-4000:] for end in _ENDS) and '"error"' not in answer[-400:],
        "calls": sorted({a or b for a, b in _CALLS.findall(answer)} - {""}),
        "call_in_text": re.match(r"(\\n|\s)*\{|.*<tool_call>", "".join(_TEXT.findall(answer))) is not None,
        **{name: timings.get(name) for name in ("prompt_n", "cache_n", "prompt_ms", "predicted_n", "predicted_ms")},
    }


def recorder(target: str, records: list[dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    """Return the handler of a proxy before `target` that appends to `records`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            begun, pieces = time.time(), list[bytes]()
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: self.headers[name] for name in ("content-type", "authorization") if name in self.headers}
            with httpx.stream(self.command, target + self.path, content=body, headers=headers, timeout=None) as reply:
                self.send_response(reply.status_code)
                self.send_header("content-type", reply.headers.get("content-type", ""))
                self.end_headers()
                try:
                    for piece in reply.iter_raw():
                        pieces.append(piece)
                        self.wfile.write(piece)
                        self.wfile.flush()
                except OSError:  # the agent went away
                    pieces.append(b"(gone)")
            if not self.path.startswith("/api/"):  # those are edgedec's own
                named = {"method": self.command, "path": self.path, "status": reply.status_code}
                named |= {"ignored": reply.headers.get("x-edgedec-ignored", ""), "s": round(time.time() - begun, 2)}
                records.append(named | record_of(body, b"".join(pieces).decode()))

        do_GET = do_HEAD = do_POST

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    return Handler


def run(name: str, at: list[str], records: list[dict[str, Any]], place: dict[str, Any]) -> dict[str, Any]:
    """Run both turns of an agent, and return its version and what is recorded of each turn."""
    version = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    turns = []
    for words in _TURNS[name]:
        records.clear()
        begun = time.time()
        command = ["timeout", str(_TURN_S), *_EDGEDEC, "launch", name, *at, "--", *words]
        ended = subprocess.run(command, stdout=2, check=False, **place)
        turns.append({"exit_code": ended.returncode, "s": round(time.time() - begun, 1), "requests": [*records]})
    return {"version": version, "turns": turns}


def main() -> None:
    """Run the agents and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--agents", nargs="+", default=list(_TURNS), choices=list(_TURNS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        cache, home, project = (Path(folder, name) for name in ("cache", "home", "project"))
        for each in (cache, home, project):
            each.mkdir()
        for part in ("models", "tiles", "heads", "probes"):
            (cache / part).symlink_to(cache_folder() / part)
        (project / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        subprocess.run(["git", "init", "-q"], cwd=project, check=True)
        environment = os.environ | {"EDGEDEC_CACHE": str(cache), "HOME": str(home)}
        place = {"cwd": project, "env": environment, "stdin": subprocess.DEVNULL}
        server = subprocess.Popen([*_EDGEDEC, "serve", args.model, f"--port={port}", "--quiet"], env=environment)
        records: list[dict[str, Any]] = []
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), recorder(f"http://127.0.0.1:{port}", records))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        at = [f"--port={proxy.server_port}", f"--model={args.model}"]
        try:
            while subprocess.run([*_EDGEDEC, "ps", f"--port={port}"], capture_output=True, check=False).returncode:
                time.sleep(1)
            agents = {name: run(name, at, records, place) for name in filter(shutil.which, args.agents)}
        finally:
            server.terminate()
            server.wait()
    report({"benchmark": "agents", "model": args.model, "agents": agents}, args.out)


if __name__ == "__main__":
    main()
