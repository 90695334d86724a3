"""Load on a server: many requests of mixed length, and clients that misbehave; does anything leak or hang?

    python benchmarks/server_load.py --model tiny --requests 10000 --parallel 4
    python benchmarks/server_load.py --model smollm2-135m --requests 500

Starts `edgedec serve` as a process of its own and sends, from a pool of clients: chats and completions of mixed length,
streamed and whole, slow readers, clients that hang up, malformed JSON, oversized bodies and wrong keys. Every answer's
status is compared with what it must be, every whole text with what the same request gave before. At the end: nothing
may run or wait, and the memory at the end is compared with that after a tenth of the requests. Prints a line of JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

KEY = "load-test"
KINDS = {"chat": 30, "stream": 30, "completion": 15, "slow": 5, "hang up": 10, "malformed": 4, "large": 2, "no key": 4}
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "sea")
_PATIENCE_S = 600.0
_MOST_BODY = 200_000


@dataclass
class Seen:
    """What came of the requests.

    Attributes:
        answers: How many, by kind and status.
        wrong: Answers that were not what they must be, a few of them.
        texts: The text of each request that was answered whole, by its fields.
        queue_ms: Waiting time of each answered request.
        seconds: Time of each answered request.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    queue_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, kind: str, status: int, allowed: tuple[int, ...], what: str = "") -> None:
        """Count an answer, and remember it where its status is not an allowed one."""
        self.answers[f"{kind} {status}"] += 1
        if status not in allowed and len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {status} {what[:200]}")


def fields_of(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request: one of some 200, so that each comes several times."""
    i = rng.randrange(200)
    mine = random.Random(i)
    words = " ".join(mine.choice(_WORDS) for _ in range(mine.choice((2, 8, 30, 100))))
    return {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": mine.choice((1, 4, 16, 48)),
        "seed": i,
        "temperature": mine.choice((0, 0.8)),
    }


async def one(client: httpx.AsyncClient, kind: str, rng: random.Random, seen: Seen) -> None:
    """Send one request of a kind and check its answer."""
    fields = fields_of(rng)
    path = "/v1/chat/completions"
    begun = time.perf_counter()
    if kind == "malformed":
        reply = await client.post(path, content=rng.choice((b"{", b"[]", b"\xff", b'{"n": 1}')))
        seen.note(kind, reply.status_code, (400,), reply.text)
    elif kind == "large":
        reply = await client.post(path, content=b"x" * (2 * _MOST_BODY))
        seen.note(kind, reply.status_code, (413,), reply.text)
    elif kind == "no key":
        reply = await client.post(path, json=fields, headers={"authorization": "Bearer wrong"})
        seen.note(kind, reply.status_code, (401,), reply.text)
    elif kind in ("stream", "slow", "hang up"):
        await _streamed(client, kind, path, fields, rng, seen)
    else:
        if kind == "completion":
            path = "/v1/completions"
            fields["prompt"] = fields.pop("messages")[0]["content"]
        reply = await client.post(path, json=fields)
        seen.note(kind, reply.status_code, (200, 429), reply.text)
        if reply.status_code == 200:
            seen.seconds.append(time.perf_counter() - begun)
            _compare(kind, fields, reply.json(), seen)


async def _streamed(
    client: httpx.AsyncClient, kind: str, path: str, fields: dict[str, Any], rng: random.Random, seen: Seen
) -> None:
    async with client.stream("POST", path, json=fields | {"stream": True}) as reply:
        seen.note(kind, reply.status_code, (200, 429))
        n = 0
        async for _ in reply.aiter_lines():
            n += 1
            if kind == "hang up" and n > rng.randrange(1, 20):
                return
            if kind == "slow":
                await asyncio.sleep(0.05)


def _compare(kind: str, fields: dict[str, Any], document: dict[str, Any], seen: Seen) -> None:
    choice = document["choices"][0]
    text = choice["text"] if kind == "completion" else choice["message"]["content"]
    seen.queue_ms.append(document["edgedec"]["queue_ms"])
    name = json.dumps(fields, sort_keys=True)
    if seen.texts.setdefault(name, text) != text and len(seen.wrong) < 20:
        seen.wrong.append(f"{kind}: another text than before for {name[:200]}")


async def load(url: str, n_requests: int, n_clients: int, seen: Seen, seed: int) -> None:
    """Send requests from a pool of clients."""
    rng = random.Random(seed)
    kinds = iter(rng.choices(list(KINDS), list(KINDS.values()), k=n_requests))
    limits = httpx.Limits(max_connections=n_clients, max_keepalive_connections=n_clients)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits, headers=headers) as client:

        async def work() -> None:
            for kind in kinds:
                await one(client, kind, rng, seen)

        await asyncio.gather(*(work() for _ in range(n_clients)))


def metrics(url: str) -> dict[str, float]:
    """Return the server's values without labels."""
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    pairs = re.findall(r"^edgedec_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def wait_until_idle(url: str) -> dict[str, float]:
    """Wait until nothing runs or waits, at most a minute, and return the values then."""
    for _ in range(600):
        found = metrics(url)
        if not found["requests_running"] and not found["requests_waiting"]:
            return found
        time.sleep(0.1)
    return found


def started(model: str, arguments: list[str]) -> tuple["subprocess.Popen[str]", str]:
    """Start a server and return it with its address once it is ready."""
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", model, "--port", "0", *arguments]
    environment = os.environ | {"EDGEDEC_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"is ready at (http://\S+)", line):
            return process, match[1]
    raise SystemExit(f"the server did not start: exit code {process.wait()}")


def tiny(folder: str) -> str:
    """Write a tiny random model and return its path."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.tiny_models import tiny_llama

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    return str(tiny_llama(Path(folder) / "tiny.gguf", chat_template=template, n_ctx_train=4096))


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> None:
    """Run and print what came of it; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model's name, or tiny")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--draft", default="auto")
    given = parser.parse_args()
    arguments = ["--parallel", str(given.parallel), "--queue", str(given.queue), "--max-body", str(_MOST_BODY)]
    arguments += ["--draft", given.draft, *(["--memory", given.memory] if given.memory else [])]
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(folder) if given.model == "tiny" else given.model
        process, url = started(model, arguments)
        try:
            begun = time.perf_counter()
            n_first = given.requests // 10
            asyncio.run(load(url, n_first, given.clients, seen, seed=0))
            early = wait_until_idle(url)
            asyncio.run(load(url, given.requests - n_first, given.clients, seen, seed=1))
            seconds = time.perf_counter() - begun
            late = wait_until_idle(url)
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
        finally:
            process.kill()
            process.wait()
    stuck = late["requests_running"] + late["requests_waiting"]
    result = {
        "model": given.model,
        "requests": given.requests,
        "parallel": given.parallel,
        "clients": given.clients,
        "seconds": round(seconds, 1),
        "answers": dict(sorted(seen.answers.items())),
        "wrong": seen.wrong,
        "stuck": stuck,
        "exit_code": code,
        "queue_ms": {"p50": percentile(seen.queue_ms, 0.5), "p99": percentile(seen.queue_ms, 0.99)},
        "seconds_whole": {"p50": percentile(seen.seconds, 0.5), "p99": percentile(seen.seconds, 0.99)},
        "resident_mb": {"early": early["resident_bytes"] / 1e6, "late": late["resident_bytes"] / 1e6},
        "memory_cap_mb": late.get("memory_cap_bytes", 0.0) / 1e6 or None,
        "peak_mb": late["peak_resident_bytes"] / 1e6,
    }
    print(json.dumps(result))
    raise SystemExit(1 if seen.wrong or stuck or code else 0)


if __name__ == "__main__":
    main()
