"""Put a server under load, with requests of mixed length and clients that misbehave: nothing may leak or hang.

    python benchmarks/memory/server_load.py --model tiny --requests 10000 --parallel 4
    python benchmarks/memory/server_load.py --model smollm2-135m --words 2 4 8 16 --lengths 1 2 4 12 --minutes 20 --kill

The script starts `edgedec serve` as a process of its own. A pool of clients sends chats and completions of mixed
length, streamed and whole; some clients read slowly, hang up (also in the middle of a body), or send malformed JSON,
oversized bodies and wrong keys. A client that gets a 429 waits a second. Every answer's status is compared with what
it must be, every text with what the same request gave before. At the end nothing may run or wait, and memory, threads
and open files are compared with those after a tenth of the requests.

With --kill, servers come before that one, on a cache of their own: one is ended in order and saves its drafts, one is
killed (SIGKILL) in the middle of its requests. No file may be lost or damaged by that, and texts must stay the same.
Ends with one line of JSON; exit code 1 where something was wrong.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.provenance import provenance

KEY = "load-test"
_ANSWERED = {"chat": 30, "stream": 30, "completion": 15, "slow": 5, "hang up": 10}
_REFUSED = {"torn": 2, "malformed": 4, "large": 2, "no key": 4}
KINDS = _ANSWERED | _REFUSED
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "sea")
_PATIENCE_S = 600.0
_MOST_BODY = 200_000
_MOST_WRONG = 20  # then there is enough to read
_MALFORMED = (
    *(b"{", b"[]", b"\xff", b'{"n": 1}', b"[" * 100_000, b'{"messages": NaN}', b'{"messages": "\\ud800"}'),
    *(b'{"messages": [{"role": "user", "content": 1}]}', b'{"messages": [], "max_tokens": 1}'),
    b'{"messages": [{"role": "user", "content": "x"}], "max_token": 1}',
)
_TORN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 99\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like: words of their prompts and most tokens of their answers, each as likely as another."""

    words: tuple[int, ...]
    lengths: tuple[int, ...]

    def fields(self, rng: random.Random) -> dict[str, Any]:
        """Return the fields of a request: one of 200, so that each comes several times."""
        i = rng.randrange(200)
        mine = random.Random(i)
        words = " ".join(mine.choice(_WORDS) for _ in range(mine.choice(self.words)))
        return {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": mine.choice(self.lengths),
            "seed": i,
            "temperature": mine.choice((0, 0.8)),
        }


@dataclass
class Seen:
    """What came of the requests.

    Attributes:
        answers: How many, by kind and status.
        wrong: Answers that were not what they must be, a few of them.
        texts: The text of each request that was answered whole, by its fields.
        n_compared: Texts that were compared with an earlier one.
        queue_ms: Waiting time of each answered request.
        seconds: Time of each answered request.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    n_compared: int = 0
    queue_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, kind: str, status: int, allowed: tuple[int, ...], what: str = "") -> None:
        """Count an answer, and remember it where its status is not an allowed one."""
        self.answers[f"{kind} {status}"] += 1
        if status not in allowed:
            self.complain(f"{kind}: {status} {what[:200]}")

    def complain(self, what: str) -> None:
        """Remember that something was wrong."""
        if len(self.wrong) < _MOST_WRONG:
            self.wrong.append(what)

    def compare(self, kind: str, fields: dict[str, Any], text: str) -> None:
        """Compare a whole text with what the same fields gave before."""
        name = json.dumps(fields, sort_keys=True)
        self.n_compared += name in self.texts
        if self.texts.setdefault(name, text) != text:
            self.complain(f"{kind}: another text than before for {name[:200]}")


async def one(client: httpx.AsyncClient, kind: str, fields: dict[str, Any], rng: random.Random, seen: Seen) -> None:
    """Send one request of a kind and check its answer."""
    path = "/v1/chat/completions"
    begun = time.perf_counter()
    if kind == "malformed":
        body = rng.choice(_MALFORMED)
        reply = await client.post(path, content=body)
        seen.note(kind, reply.status_code, (400,), f"{body[:40]!r} {reply.text}")
    elif kind == "large":
        reply = await client.post(path, content=b"x" * (2 * _MOST_BODY))
        seen.note(kind, reply.status_code, (413,), reply.text)
    elif kind == "no key":
        headers = {"authorization": rng.choice(("Bearer wrong", "Bearer", KEY, ""))}
        reply = await client.post(path, json=fields, headers=headers)
        seen.note(kind, reply.status_code, (401,), reply.text)
    elif kind == "torn":
        await _torn(client)
        seen.answers[kind] += 1
    elif kind in ("stream", "slow", "hang up"):
        await _streamed(client, kind, path, fields, rng, seen)
    else:
        if kind == "completion":
            path = "/v1/completions"
            fields["prompt"] = fields.pop("messages")[0]["content"]
        reply = await client.post(path, json=fields)
        seen.note(kind, reply.status_code, (200, 429), reply.text)
        if reply.status_code == 200:
            document = reply.json()
            seen.seconds.append(time.perf_counter() - begun)
            seen.queue_ms.append(document["edgedec"]["queue_ms"])
            choice = document["choices"][0]
            seen.compare(kind, fields, choice["text"] if kind == "completion" else choice["message"]["content"])
        else:
            await asyncio.sleep(1)


async def _torn(client: httpx.AsyncClient) -> None:
    """Send a part of a body and go away."""
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(_TORN % KEY.encode() + b'{"messages":')
    await writer.drain()
    writer.close()


async def _streamed(
    client: httpx.AsyncClient, kind: str, path: str, fields: dict[str, Any], rng: random.Random, seen: Seen
) -> None:
    text, n, n_most = "", 0, rng.randrange(1, 20)
    async with client.stream("POST", path, json=fields | {"stream": True}) as reply:
        seen.note(kind, reply.status_code, (200, 429))
        async for line in reply.aiter_lines():
            n += 1
            if kind == "hang up" and n > n_most:
                return
            if kind == "slow":
                await asyncio.sleep(0.05)
            text += _added(line)
    if reply.status_code == 200:
        seen.compare(kind, fields, text)
    else:
        await asyncio.sleep(1)


def _added(line: str) -> str:
    """Return what a line of a stream adds to the text; an error is none."""
    if not line.startswith("data: {"):
        return ""
    document = json.loads(line.removeprefix("data: "))
    return document["choices"][0]["delta"].get("content") or "" if "choices" in document else f"({line})"


async def load(url: str, requests: list[tuple[str, dict[str, Any]]], args: argparse.Namespace, seen: Seen) -> bool:
    """Send requests from a pool of clients until the time is over; return whether the server was there to the end."""
    rng = random.Random(0)
    following = iter(requests)
    limits = httpx.Limits(max_connections=args.clients, max_keepalive_connections=args.clients)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits, headers=headers) as client:

        async def work() -> bool:
            for kind, fields in following:
                if time.monotonic() > args.until or len(seen.wrong) == _MOST_WRONG:
                    break
                try:
                    await one(client, kind, dict(fields), rng, seen)
                except (httpx.TransportError, OSError):
                    return False
            return True

        return all(await asyncio.gather(*(work() for _ in range(args.clients))))


def requests_of(n: int, mix: Mix, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds in a random order."""
    rng = random.Random(seed)
    return [(kind, mix.fields(rng)) for kind in rng.choices(list(KINDS), list(KINDS.values()), k=n)]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and where."""

    process: "subprocess.Popen[bytes]"
    url: str

    def metrics(self) -> dict[str, float]:
        """Return the server's values without labels, and on Linux its threads and open files."""
        found: dict[str, float] = {}
        own = Path(f"/proc/{self.process.pid}")
        if own.is_dir():  # counted before this asks for the rest, by a connection of its own
            found = {"threads": len(list((own / "task").iterdir())), "open_files": len(list((own / "fd").iterdir()))}
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        pairs = re.findall(r"^edgedec_(\w+) (\S+)$", text, re.MULTILINE)
        return found | {name: float(value) for name, value in pairs}

    def idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits, at most a minute, and return the values a moment later."""
        for _ in range(600):
            found = self.metrics()
            if not found["requests_running"] and not found["requests_waiting"]:
                break
            time.sleep(0.1)
        time.sleep(2)
        return self.metrics()

    def end(self) -> int:
        """End it in order; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def started(model: str, arguments: list[str], cache: Path | None, log: Path) -> Server:
    """Start a server and return it once it is ready; what it says goes to a file, for which nobody has to wait."""
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", model, "--port", "0", *arguments]
    environment = os.environ | {"EDGEDEC_API_KEY": KEY} | ({} if cache is None else {"EDGEDEC_CACHE": str(cache)})
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=environment)
    while process.poll() is None:
        if match := re.search(r"is ready at (http://\S+)", log.read_text(errors="replace")):
            return Server(process, match[1])
        time.sleep(0.05)
    raise SystemExit(f"the server did not start: {log.read_text(errors='replace')}")


def tiny(folder: Path) -> str:
    """Write a tiny random model and return its path."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.models.tiny_models import tiny_llama

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    return str(tiny_llama(folder / "tiny.gguf", chat_template=template, n_ctx_train=4096))


def killed(model: str, arguments: list[str], cache: Path, mix: Mix, args: argparse.Namespace, seen: Seen) -> list[str]:
    """End a server in order, kill another in the middle of its requests; return what was lost of the files."""
    log = cache.with_suffix(".log")
    server = started(model, arguments, cache, log)
    asyncio.run(load(server.url, requests_of(50, mix, 2), args, seen))
    server.end()
    before = digests(cache)
    server = started(model, arguments, cache, log)

    async def scene() -> bool:
        n_before = seen.answers.total()
        working = asyncio.create_task(load(server.url, requests_of(1000, mix, 3), args, seen))
        while seen.answers.total() < n_before + 50 and not working.done():
            await asyncio.sleep(0.01)
        server.process.kill()
        return await working

    if asyncio.run(scene()):
        seen.complain("the server that was killed answered to the end")
    server.process.wait()
    after = digests(cache)
    return [name for name, digest in before.items() if after.get(name) != digest]


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file; of JSON, which is written anew as it is used, only whether it is whole."""
    return {
        str(path.relative_to(folder)): _whole(path) if path.suffix == ".json" else sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _whole(path: Path) -> str:
    try:
        return "" if json.loads(path.read_text(encoding="utf-8")) else "empty"
    except ValueError:
        return "damaged"


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the values that half, and 99 of 100, do not exceed."""
    ordered = sorted(values) or [0.0]
    return {f"p{share}": round(ordered[min(len(ordered) - 1, share * len(ordered) // 100)], 3) for share in (50, 99)}


def measure(model: str, arguments: list[str], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Put a server under load; return what came of it."""
    mix, seen, cache, lost = Mix(tuple(args.words), tuple(args.lengths)), Seen(), None, None
    if args.kill:
        cache = folder / "cache"
        cache.mkdir()
        model = str(shutil.copy(Path(model), cache))
        arguments = [*arguments, "--draft-store", str(cache / "drafts")]
        lost = killed(model, arguments, cache, mix, args, seen)
    server = started(model, arguments, cache, folder / "server.log")
    try:
        begun = time.perf_counter()
        requests = iter(requests_of(args.requests, mix, 0))
        there = asyncio.run(load(server.url, list(islice(requests, args.requests // 10)), args, seen))
        early = server.idle()
        there = asyncio.run(load(server.url, list(requests), args, seen)) and there
        seconds = time.perf_counter() - begun
        late = server.idle()
        code = server.end()
    finally:
        server.process.kill()
        server.process.wait()
    said = (folder / "server.log").read_text(errors="replace")
    shown = ("resident_bytes", "threads", "open_files")
    return {
        "requests": seen.answers.total(),
        "seconds": round(seconds, 1),
        "answers": dict(sorted(seen.answers.items())),
        "n_compared": seen.n_compared,
        "wrong": seen.wrong + ([] if there else ["a connection was lost"]) + (["a traceback"] * ("Traceback" in said)),
        "lost": lost,
        "stuck": late["requests_running"] + late["requests_waiting"],
        "exit_code": code,
        "queue_ms": percentiles(seen.queue_ms),
        "seconds_whole": percentiles(seen.seconds),
        "early": {name: early.get(name) for name in shown},
        "late": {name: late.get(name) for name in shown},
        "memory_cap_bytes": late.get("memory_cap_bytes"),
        "peak_bytes": late["peak_resident_bytes"],
    }


def main() -> None:
    """Run and print what came of it; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model's name, or tiny")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--words", type=int, nargs="+", default=[2, 8, 30, 100], help="of prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4, 16, 48], help="most tokens of answers")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing more is sent")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--kill", action="store_true", help="kill a server in the middle first (POSIX)")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    args.until = time.monotonic() + 60 * args.minutes
    arguments = ["--parallel", str(args.parallel), "--queue", str(args.queue), "--max-body", str(_MOST_BODY)]
    arguments += ["--draft", args.draft, *(["--memory", args.memory] if args.memory else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = tiny(folder) if args.model == "tiny" else str(resolve(args.model, ResolveOptions(offline=True)))
        result = measure(path, arguments, folder, args)
    settings = {name: getattr(args, name) for name in ("model", "words", "lengths", "clients", "parallel", "queue")}
    document = {"benchmark": "server_load"} | settings | provenance() | result
    print(json.dumps(document))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    leaks = [name for name in ("threads", "open_files") if (result["late"][name] or 0) > (result["early"][name] or 0)]
    raise SystemExit(1 if result["wrong"] or result["lost"] or result["stuck"] or result["exit_code"] or leaks else 0)


if __name__ == "__main__":
    main()
