"""Send requests for three models to one server whose memory holds one or two of them: the cap must be kept.

    python benchmarks/memory/server_cap.py --memory 600MB 1.2GB --json-out benchmarks/results/server_cap.json

The models are smollm2-135m, the same in Q4_0 (written first, with edgedec export), and qwen2.5-coder-0.5b. For each cap
a server of its own is started, as a process, without models. Clients send twenty requests, several at a time; each
names one of the models in a fixed order, and models are loaded and unloaded for them. A request is one of two prompts
of a model, so that texts are compared: each must equal what the model writes alone, in a server that loads no other.
The peak is the most resident memory that the system counted of the server (VmHWM, from the server's metrics).

Linux only. Exit code 1 where a cap was not kept, a request failed, a text differed, or nothing was unloaded.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from edgedec_apps.bench.provenance import provenance

_MODELS = ("smollm2-135m", "smollm2-135m-q4_0", "qwen2.5-coder-0.5b")
_PROMPTS = ("Why is the sky blue?", "Write a function that sorts a list of words by their length.")
_PATIENCE_S = 300.0
Request = tuple[str, str]


@contextmanager
def server(memory: str, folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Run a server during the block; yield its address. Models that it finds beside the cache are those in `folder`."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", "--port", "0", "--offline", "--memory", memory]
    command += [
        "--context",
        str(args.context),
        "--parallel",
        str(args.parallel),
        "--queue",
        "32",
        "--draft",
        args.draft,
    ]
    environment = os.environ | {"EDGEDEC_MODELS": str(folder)}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=environment)
    try:
        while not (match := re.search(r"is ready at (http://\S+)", log.read_text(errors="replace"))):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: {log.read_text(errors='replace')}")
            time.sleep(0.05)
        yield match[1]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def answer(client: httpx.Client, request: Request, n_tokens: int) -> dict[str, Any]:
    """Return status, text and seconds of one request, and which models were loaded when it was answered."""
    model, prompt = request
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": n_tokens, "temperature": 0}
    begun = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - begun
    loaded = sorted(each["name"] for each in client.get("/api/ps").json()["models"])
    text = reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else reply.text[:300]
    found = {
        "model": model,
        "prompt": _PROMPTS.index(prompt),
        "status": reply.status_code,
        "seconds": round(seconds, 2),
    }
    return found | {"loaded": loaded, "text": text}


def requests_of(n: int) -> list[Request]:
    """Return the requests in their order: the three models in turn, but each third time the same again."""
    return [(_MODELS[i * 7 // 3 % len(_MODELS)], _PROMPTS[i % len(_PROMPTS)]) for i in range(n)]


def alone(folder: Path, args: argparse.Namespace) -> dict[Request, str]:
    """Return what each model writes for each prompt in a server that loads no other model."""
    texts = {}
    for model in _MODELS:
        with server("4GB", folder, args) as url, httpx.Client(base_url=url, timeout=_PATIENCE_S) as client:
            for prompt in _PROMPTS:
                texts[model, prompt] = answer(client, (model, prompt), args.tokens)["text"]
    return texts


def measure(memory: str, texts: dict[Request, str], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Send the requests to a server under a cap; return what came of it."""
    requests = requests_of(args.requests)
    with server(memory, folder, args) as url, httpx.Client(base_url=url, timeout=_PATIENCE_S) as client:
        begun = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(lambda request: answer(client, request, args.tokens), requests))
        seconds = time.perf_counter() - begun
        said = client.get("/metrics").text
    metrics = {name: float(value) for name, value in re.findall(r"^edgedec_(\w+) (\S+)$", said, re.MULTILINE)}
    peak, cap = int(metrics["peak_resident_bytes"]), int(metrics["memory_cap_bytes"])
    for each, request in zip(answers, requests, strict=True):
        each["same_text"] = each.pop("text") == texts[request]
    return {
        "memory": memory,
        "cap_bytes": cap,
        "peak_bytes": peak,
        "kept": peak <= cap,
        "seconds": round(seconds, 1),
        "statuses": dict(Counter(str(each["status"]) for each in answers)),
        "same_texts": sum(each["same_text"] for each in answers),
        "most_loaded": max(len(each["loaded"]) for each in answers),
        "sets_loaded": sorted({" + ".join(each["loaded"]) for each in answers}),
        "requests": answers,
    }


def is_right(found: dict[str, Any]) -> bool:
    """Tell whether the cap was kept, every request was answered with its model's text, and models were unloaded."""
    n = len(found["requests"])
    answered = found["statuses"] == {"200": n} and found["same_texts"] == n
    return bool(found["kept"] and answered and found["most_loaded"] < len(_MODELS))


def main() -> None:
    """Measure under each cap, and print a line for each and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["600MB", "1.2GB"])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4, help="how many requests are sent at once")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("clients", "parallel", "context", "tokens", "draft")}
    document = {"benchmark": "server_cap", "models": _MODELS} | settings | provenance() | {"results": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = [sys.executable, "-m", "edgedec_apps.cli", "export", _MODELS[0], "--to", "gguf", "--type", "Q4_0"]
        export += ["--allow-requantize", "--offline", "--out", str(folder / f"{_MODELS[1]}.gguf")]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        texts = alone(folder, args)
        for memory in args.memory:
            found = measure(memory, texts, folder, args)
            document["results"].append(found)
            print(
                f"{memory}: {'kept' if found['kept'] else 'NOT KEPT'}, {found['peak_bytes'] / 1e6:.1f} MB at the peak; "
                f"{found['same_texts']} of {len(found['requests'])} texts the same; at most {found['most_loaded']} "
                f"models at once; {found['seconds']} s",
                flush=True,
            )
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    raise SystemExit(0 if all(map(is_right, document["results"])) else 1)


if __name__ == "__main__":
    main()
