"""Several texts and several models at once under caps: read what each process held at its peak.

    python benchmarks/memory/caps_together.py --json-out benchmarks/results/caps_together.json

Draws --cases configurations from --seed, each run in a process of its own under a cap (--memory):

- a server, with one to four models: smollm2-135m, gemma3-270m, and two tiny ones that are written first. Clients send
  requests at the same time, each for one of the models: one text, several (n), the best of several (best_of), texts
  that keep to a JSON schema, a text's vector, and texts after which their model is unloaded (keep_alive 0). Several
  requests of a model may run at once (--parallel), with drafts, with the draft head or without either;
- a command, `edgedec run --texts N`, with or without drafts, a draft head or a schema.

The peak is the most resident memory that the system counted of the process (VmHWM), of a server before it ends. A cap
is kept where the peak is at or below it. A request may be refused for its memory, by name; what it was told is kept. A
text that ends before the tokens that were asked for is counted as shortened. Any other answer is a failure.

--json-out is written after each case; cases of the same commit, seed and number that are in it are not run again. Exit
code 1 where a cap was broken, a request failed or a server ended by itself. Linux only.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from held_together import status_bytes

from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.models.tiny_models import tiny_llama

_REAL = ("smollm2-135m", "gemma3-270m")
_TINY = ("tiny-a", "tiny-b")
_SETS = (_REAL[:1], _REAL[1:], _REAL, (*_REAL, *_TINY), (*_REAL, *_TINY), (*_REAL[:1], *_TINY), _TINY)
_CAPS_MB = {  # from little more than the least to ample
    "gemma3-270m": (300, 330, 400, 450, 450, 600, 900),
    "smollm2-135m": (180, 200, 260, 330, 450, 600),
    "tiny-a": (140, 160, 200, 300),
}
_KINDS = ("one", "one", "n", "n", "best_of", "schema", "schema", "embeddings", "leave")
_PROMPT = "The river runs from the hills to the sea, and the boats go down with it. "
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "tags": {"items": {"type": "string"}}},
    "required": ["name", "size"],
}
_REFUSED = 50  # MemoryCapError's exit code
_PATIENCE_S = 240.0


@dataclass(frozen=True)
class Ask:
    """One request: what is asked of a model, with how many texts, words of prompt, tokens and what temperature."""

    model: str
    kind: str
    n: int
    n_sentences: int
    n_tokens: int
    temperature: float


@dataclass(frozen=True)
class Case:
    """One process: its models, its cap and options, and what it is asked; `served` tells a server from a command."""

    number: int
    served: bool
    models: tuple[str, ...]
    memory_mb: int
    context: int
    parallel: int
    options: tuple[str, ...]
    n_at_once: int
    asks: tuple[Ask, ...]


def drawn(number: int, seed: int) -> Case:
    """Return the case of that number."""
    rng = random.Random(f"{seed} {number}")
    served = rng.random() < 0.8
    models = rng.choice(_SETS) if served else (rng.choice(_REAL),)
    largest = next(name for name in ("gemma3-270m", "smollm2-135m", "tiny-a") if name in models)
    asks = []
    for i in range(rng.randint(4, 9) if served else 1):
        model, kind = models[i % len(models)] if i < len(models) else rng.choice(models), rng.choice(_KINDS)
        n = rng.choice((2, 3, 4, 8, 12)) if kind in ("n", "best_of") else 1
        asks.append(Ask(model, kind, n, _sentences(model, rng), rng.choice((16, 40, 80)), rng.choice((0.0, 0.8, 1.2))))
    if not served:
        asks = [Ask(models[0], rng.choice(("n", "n", "schema")), rng.choice((1, 4, 8)), 4, 60, rng.choice((0.0, 1.2)))]
    drafts: tuple[str, ...] = rng.choice(((), (), ("--draft", "off"), ("--draft", "suffix"), ("--draft-head", "off")))
    return Case(
        number,
        served,
        models,
        rng.choice(_CAPS_MB[largest]),
        rng.choice((512, 1024)),
        rng.choice((1, 1, 2, 4)) if served else 1,
        drafts,
        rng.randint(1, 6),
        tuple(rng.sample(asks, len(asks))),
    )


def _sentences(model: str, rng: random.Random) -> int:
    """Return how many sentences a prompt has: fewer for a tiny model, which takes 73 tokens for each."""
    return rng.choice((1, 2, 4) if model in _TINY else (1, 4, 15))


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case, and return what came of it."""
    begun = time.perf_counter()
    found = (served if case.served else commanded)(case, folder)
    cap = case.memory_mb * 10**6
    found |= {"cap_bytes": cap, "kept": found["peak_bytes"] <= cap, "seconds": round(time.perf_counter() - begun, 1)}
    return asdict(case) | found


def commanded(case: Case, folder: Path) -> dict[str, Any]:
    """Run `edgedec run`; its report has the peak. The figures of a refused command are those of its process so far."""
    (ask,) = case.asks
    out, schema = folder / f"{case.number}.json", folder / "schema.json"
    schema.write_text(json.dumps(_SCHEMA), encoding="utf-8")
    command = [sys.executable, "-m", "edgedec_apps.cli", "run", str(folder / f"{ask.model}.gguf"), "--raw", "--quiet"]
    command += ["--offline", "--memory", f"{case.memory_mb}MB", "-c", str(case.context), "-n", str(ask.n_tokens)]
    command += ["--texts", str(ask.n), "--temperature", str(ask.temperature), "--json-out", str(out), *case.options]
    command += ["--json-schema", str(schema), "--json-close"] if ask.kind == "schema" else ["--ignore-end"]
    with (
        subprocess.Popen(
            [*command, _PROMPT * ask.n_sentences],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(folder),
        ) as process,
        _peak_of(process.pid) as peak,
    ):
        _, error = process.communicate(timeout=_PATIENCE_S)
    refused = process.returncode == _REFUSED
    outcome = "refused" if refused else "answered" if process.returncode == 0 else "failed"
    told = [] if process.returncode == 0 else [error.decode(errors="replace").strip().partition("\n")[0][-300:]]
    return {"peak_bytes": peak[0], "outcomes": {outcome: 1}, "told": told}


@contextmanager
def _peak_of(pid: int) -> Iterator[list[int]]:
    """Read a process's VmHWM again and again during the block; the list has the last that was read."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], status_bytes(pid, "VmHWM"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def served(case: Case, folder: Path) -> dict[str, Any]:
    """Run `edgedec serve`, send the requests, and read the peak before it ends."""
    log = folder / f"{case.number}.log"
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", "--port", "0", "--offline", "--queue", "64"]
    command += ["--memory", f"{case.memory_mb}MB", "-c", str(case.context), "--parallel", str(case.parallel)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *_of_server(case)], stderr=file, env=_environment(folder))
    try:
        url = _address(process, log)
        with httpx.Client(base_url=url, timeout=_PATIENCE_S) as client, ThreadPoolExecutor(case.n_at_once) as pool:
            answers = list(pool.map(lambda ask: _answer(client, ask), case.asks))
        peak = status_bytes(process.pid, "VmHWM")
        alive = process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    counts = Counter(outcome for outcome, _ in answers) + Counter(failed=0 if alive else 1)
    return {"peak_bytes": peak, "outcomes": dict(counts), "told": sorted({told for _, told in answers if told})}


def _of_server(case: Case) -> list[str]:
    """Return the options of a server; those that are for models of the command line come with a model."""
    needs_model = "--draft-head" in case.options
    return [case.models[0], *case.options] if needs_model else [*case.options]


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"EDGEDEC_MODELS": str(folder)}


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    until = time.monotonic() + _PATIENCE_S
    while not (match := re.search(r"is ready at (http://\S+)", log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return match[1].rstrip(",;")


def _answer(client: httpx.Client, ask: Ask) -> tuple[str, str]:
    """Return what came of a request, and what a refusal or a failure says."""
    prompt = _PROMPT * ask.n_sentences
    if ask.kind == "embeddings":
        reply = client.post("/v1/embeddings", json={"model": f"{ask.model}#mean", "input": prompt})
    elif ask.kind == "leave":
        options = {"num_predict": ask.n_tokens, "temperature": ask.temperature}
        body = {"model": ask.model, "prompt": prompt, "raw": True, "stream": False, "keep_alive": 0, "options": options}
        reply = client.post("/api/generate", json=body)
    else:
        body = {"model": ask.model, "prompt": prompt, "max_tokens": ask.n_tokens, "temperature": ask.temperature}
        if ask.kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}
        else:
            body |= {"ignore_end": True, "seed": 7, "n": 1 if ask.kind == "best_of" else ask.n}
            body |= {"best_of": ask.n} if ask.kind == "best_of" else {}
        reply = client.post("/v1/completions", json=body)
    if reply.status_code != 200:
        message = f"{ask.model} {ask.kind} {ask.n}: {reply.status_code} {_message(reply)}"
        return "refused" if _is_refusal(reply) else "failed", message[:300]
    if ask.kind in ("one", "n"):
        n_found, n_asked = reply.json()["usage"]["completion_tokens"], ask.n * ask.n_tokens
        if n_found < n_asked:
            return "shortened", f"{ask.model} {ask.kind} {ask.n}: {n_found} of {n_asked} tokens"
    return "answered", ""


def _message(reply: httpx.Response) -> str:
    error = reply.json().get("error", "")
    return str(error["message"] if isinstance(error, dict) else error).partition("\n")[0]


def _is_refusal(reply: httpx.Response) -> bool:
    """Return whether a reply refuses a request for its memory, and says so."""
    return reply.status_code in (400, 413, 503) and re.search("memory|allowed", _message(reply)) is not None


def models_in(folder: Path) -> None:
    """Put the models of the cases into a folder: links to the real ones, and the tiny ones."""
    for name in _REAL:
        path = resolve(name, ResolveOptions(cache_folder(), offline=True))
        (folder / f"{name}.gguf").symlink_to(path.resolve())
    for seed, name in enumerate(_TINY):
        tiny_llama(folder / f"{name}.gguf", seed=seed, n_ctx_train=1024)


def line(found: dict[str, Any]) -> str:
    """Return a case for a person."""
    what = f"serve {len(found['models'])} models, {found['n_at_once']} at once" if found["served"] else "run"
    outcomes = ", ".join(f"{n} {name}" for name, n in found["outcomes"].items())
    kept = "kept" if found["kept"] else "BROKEN"
    told = "".join(f"\n    {each}" for each in found["told"])
    return (
        f"{found['number']}: {what} ({', '.join(found['models'])}), {found['memory_mb']} MB: {kept}, "
        f"{found['peak_bytes'] / 1e6:.1f} MB; {outcomes}; {found['seconds']} s{told}"
    )


def main() -> None:
    """Run the cases that are not done, print a line for each, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=52)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to run")
    parser.add_argument("--at-once", type=int, default=2, help="processes at the same time")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {"benchmark": "caps_together", "seed": args.seed} | provenance() | {"results": []}
    if args.json_out is not None and args.json_out.exists():
        earlier = json.loads(args.json_out.read_text(encoding="utf-8"))
        if (earlier["commit"], earlier["seed"]) == (document["commit"], args.seed):
            document["results"] = earlier["results"]
    done, lock = {found["number"] for found in document["results"]}, threading.Lock()
    numbers = [number for number in args.only or range(args.cases) if number not in done]

    def measure(number: int) -> None:
        found = run_case(drawn(number, args.seed), folder)
        with lock:
            document["results"] = sorted([*document["results"], found], key=lambda each: int(each["number"]))
            print(line(found), flush=True)
            if args.json_out is not None:
                args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models_in(folder)
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(measure, numbers))
    results = document["results"]
    broken = [found["number"] for found in results if not found["kept"]]
    totals = sum((Counter(found["outcomes"]) for found in results), Counter[str]())
    print(f"{len(results) - len(broken)} of {len(results)} caps kept; broken: {broken}; requests: {dict(totals)}")
    print(json.dumps(document))
    raise SystemExit(1 if broken or totals["failed"] else 0)


if __name__ == "__main__":
    main()
