"""Serve sixteen clients that come and go, and hold the server's state at the end against that after the first minutes.

    python benchmarks/memory/server_hour.py --minutes 60

Three models under one cap: smollm2-135m, a tiny one that reads pictures, and a tiny one of another architecture. Each
client opens a connection, sends a few requests and leaves: chats with turns that are kept, streams that it leaves in
the middle, schemas, regular expressions, pictures, and now and then a model is unloaded. The state is
resident memory, threads, descriptors, child processes, and files of the cache's folder, each after a pause in which
nothing runs. The last line is JSON; exit code 1 where the end is not the beginning, an answer was wrong, or the
server's peak was above the cap.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from server_load import KEY, Server, started

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.models.seeing_model import CHAT, data_url, seeing_model
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory_plan import parse_size
from edgedec_apps.bench.provenance import provenance

N_CLIENTS = 16
PAUSE_S = 20
MORE_BYTES = 8_000_000  # of resident memory between two equal states: the heap's pieces
TEXT, SEEING, OTHER = "smollm2-135m", "seeing", "other"
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "sea")
_PERSON = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}


def models(folder: Path) -> None:
    """Put the three models into a cache's folder of models."""
    folder.mkdir(parents=True)
    shutil.copy(resolve(TEXT, ResolveOptions(offline=True)), folder / f"{TEXT}.gguf")
    seeing_model(folder, SEEING)
    write_tiny(folder / f"{OTHER}.gguf", ARCHITECTURES["qwen3"], metadata={"tokenizer.chat_template": CHAT})


def body(kind: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the fields of a request of a kind."""
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.choice((2, 8, 40, 60))))
    model = rng.choice((TEXT, TEXT, OTHER))
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.choice((1, 4, 16)),
        "seed": rng.randrange(9),
    }
    if kind == "turns":
        answer = {"role": "assistant", "content": "Yes."}
        return "/v1/chat/completions", chat | {"messages": [*chat["messages"], answer, *chat["messages"]]}
    if kind == "picture":
        url = data_url(rng.choice(("red", "green", "blue", "black")))
        parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        return "/v1/chat/completions", chat | {"model": SEEING, "messages": [{"role": "user", "content": parts}]}
    if kind == "schema":
        schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": _PERSON}}
        return "/v1/chat/completions", chat | {"response_format": schema, "max_tokens": 40}
    if kind == "regex":
        form = {"type": "regex", "pattern": f"[a-z]{{{rng.randrange(1, 9)}}}"}
        return "/v1/completions", {"model": model, "prompt": words, "max_tokens": 12, "response_format": form}
    if kind == "unload":
        return "/api/generate", {"model": rng.choice((SEEING, OTHER, TEXT)), "keep_alive": 0, "stream": False}
    return "/v1/chat/completions", chat | ({"stream": True} if kind in ("stream", "leave") else {})


KINDS = {"chat": 20, "turns": 15, "stream": 15, "leave": 15, "picture": 6, "schema": 6, "regex": 6, "unload": 1}


async def one(client: httpx.AsyncClient, kind: str, rng: random.Random, answers: Counter[str]) -> None:
    """Send a request and count its answer; a client that leaves closes its stream, or its prompt, in the middle."""
    path, fields = body(kind, rng)
    if kind not in ("stream", "leave"):
        reply = await client.post(path, json=fields)
        answers[f"{kind} {reply.status_code}"] += 1
        if reply.status_code not in (200, 429):
            print(kind, reply.status_code, reply.text[:300], file=sys.stderr)
        return
    n_most = rng.randrange(4) if kind == "leave" else 10**6
    async with client.stream("POST", path, json=fields) as reply:
        answers[f"{kind} {reply.status_code}"] += 1
        n = 0
        async for _ in reply.aiter_lines():
            n += 1
            if n > n_most:
                return


async def clients(url: str, until: float, seed: int, answers: Counter[str]) -> None:
    """Let the clients come and go until a time (time.monotonic)."""

    async def come_and_go(i: int) -> None:
        rng = random.Random(seed * N_CLIENTS + i)
        while time.monotonic() < until:
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:
                for _ in range(rng.randrange(1, 8)):
                    await one(client, rng.choices([*KINDS], [*KINDS.values()])[0], rng, answers)
                    if time.monotonic() > until:
                        return
            await asyncio.sleep(rng.random())

    await asyncio.gather(*(come_and_go(i) for i in range(N_CLIENTS)))


def state(server: Server, cache: Path) -> dict[str, Any]:
    """Return what the server holds after a pause, with all three models asked once before, in the same order."""
    for model in (SEEING, OTHER, TEXT):
        fields = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {KEY}"}
        httpx.post(f"{server.url}/v1/chat/completions", json=fields, headers=headers, timeout=600).raise_for_status()
    time.sleep(PAUSE_S)
    values, process = server.idle(), Path(f"/proc/{server.process.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    children = (process / "task" / str(server.process.pid) / "children").read_text().split()
    names = [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()]
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
        "threads": int(values["threads"]),
        "open_files": int(values["open_files"]),
        "children": len(children),
        "files": len(names),
        "files_by_folder": dict(Counter(name.partition("/")[0] for name in names)),
        "unfinished_files": [name for name in names if name.endswith((".partial", ".tmp"))],
    }


def faults(first: dict[str, Any], last: dict[str, Any], answers: Counter[str], cap: int) -> list[str]:
    """Return what is not as it must be."""
    wrong = [
        f"{key}: {first[key]} became {last[key]}"
        for key in ("threads", "open_files", "children")
        if last[key] > first[key]
    ]
    if last["resident_bytes"] > first["resident_bytes"] + MORE_BYTES:
        wrong.append(f"resident memory: {first['resident_bytes']} became {last['resident_bytes']}")
    if last["peak_bytes"] > cap:
        wrong.append(f"the peak of {last['peak_bytes']} is above the cap of {cap}")
    if last["unfinished_files"]:
        wrong.append(f"unfinished files: {last['unfinished_files']}")
    return wrong + [f"{name}: {n}" for name, n in answers.items() if name.rpartition(" ")[2] not in ("200", "429")]


def main() -> int:
    """Serve, and compare the end with the beginning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--first-minutes", type=float, default=5, help="after which the first state is taken")
    parser.add_argument("--memory", default="700MB")
    args = parser.parse_args()
    answers: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        cache = folder / "cache"
        models(cache / "models")
        options = ["-c", "1024", "--parallel", "2", "--memory", args.memory, "--offline", "--queue", "64"]
        server = started(TEXT, options, cache, folder / "server.log")
        try:
            begin = time.monotonic()
            asyncio.run(clients(server.url, begin + 60 * args.first_minutes, 1, answers))
            first = state(server, cache)
            print(json.dumps(first), file=sys.stderr)
            asyncio.run(clients(server.url, begin + 60 * args.minutes, 2, answers))
            last = state(server, cache)
        finally:
            code = server.end()
        wrong = faults(first, last, answers, parse_size(args.memory)) + ([f"exit code {code}"] if code else [])
        if "Traceback" in (log := (folder / "server.log").read_text(errors="replace")):
            wrong.append(f"a traceback in the log: {log[log.index('Traceback') :][:2000]}")
    found = {"benchmark": "server_hour"} | provenance() | {"memory": args.memory, "minutes": args.minutes}
    print(json.dumps(found | {"first": first, "last": last, "answers": dict(answers), "wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
