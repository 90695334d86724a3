"""A tool server without an SDK, for tests: `python plain_tool_server.py [MODE]` at its standard streams.

It starts in no time, and misbehaves as it is told: by its mode before it has listed its tools, by its tools afterwards.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve()
TOOLS = ("echo", "hang", "die", "flood", "rubbish", "deep", "wrong", "escape", "refuse")
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def answer(method: str, parameters: dict[str, Any], mode: str) -> Any:
    """Return the result of a request; None for a method that is not known."""
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        names = (mode.removeprefix("as:"),) if mode.startswith("as:") else TOOLS
        listed = [{"name": name, "description": f"The tool {name}.", "inputSchema": SCHEMA} for name in names]
        return {"tools": listed}
    return called(parameters["name"], parameters.get("arguments") or {}) if method == "tools/call" else None


def called(name: str, arguments: dict[str, Any]) -> Any:
    """Return what a tool answers, where it does."""
    if name == "hang":
        if started := os.environ.get("STARTED"):
            Path(started).touch()
        time.sleep(600)
    if name == "die":
        sys.stderr.write("first\nout of order\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "flood":
        flood()
    if name == "rubbish":
        sys.stdout.write("no message\n" * 50 + '{"jsonrpc": "2.0", "id": 12345, "result": {}}\n')
    if name == "deep":
        sys.stdout.write("[" * 100_000 + "\n")
    if name == "wrong":
        return {"content": [{"type": "text", "text": 5}]}
    text = "\x1b[2Ja\u202eb" if name == "escape" else f"{name}: {json.dumps(arguments)}"
    return {"content": [{"type": "text", "text": text}], "isError": name == "refuse"}


def flood() -> None:
    """Write letters without an end, and no line."""
    while True:
        sys.stdout.write("x" * 65_536)


def serve(mode: str) -> None:
    """Answer requests until the input ends."""
    if mode == "end":
        sys.exit("no such database")
    if mode == "flood":
        flood()
    if mode == "talk":
        while True:
            print("starting")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or mode == "silent":
            continue
        result = answer(message["method"], message.get("params") or {}, mode)
        error = {"error": {"code": -32601, "message": "Method not found"}}
        reply = {"jsonrpc": "2.0", "id": message["id"]} | (error if result is None else {"result": result})
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1] if len(sys.argv) > 1 else "")
