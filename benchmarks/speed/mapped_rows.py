"""Measure `edgedec map` on short texts beside a loop of requests to `edgedec serve`, which keeps prompts.

    python benchmarks/speed/mapped_rows.py smollm2-135m --task fields --json-out mapped.json

The texts are tickets of a seeded generator. The task `labels` asks for a category and urgency, `fields` for a summary,
too, `words` for a text alone. Both ways run in turn, in new processes; the time is that of the rows, without loading.
Answers must be equal. With --peer PROGRAM, a llama-server answers --parallel requests at a time in the same rounds.
"""

import argparse
import json
import random
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from edgedec_apps.bench.provenance import report

_PARTS = """
Sort this ticket of a customer. Its category is billing, delivery, technical or account. It is urgent where the \
customer loses money, cannot work, or asks for help at once. The summary has at most ten words. Ticket: {text}
I|We|My mother|Our team|The whole office|A colleague of mine|My neighbour|Two of our drivers
paid twice for one order|cannot sign in since the update|got a broken lamp instead of a chair|miss three boxes of tiles
|need the invoice in another name|see a blank page after the login|lost the key of the safe|cannot export the table
Please help at once.|No hurry.|This is the third time!|Thanks a lot.|We lose money every hour.|What now?
"""
(_ASK,), _WHO, _WHAT, _END = (part.split("|") for part in _PARTS.strip().replace("\n|", "|").split("\n"))
_SCHEMA = {"category": {"enum": ["billing", "delivery", "technical", "account"]}, "urgent": {"type": "boolean"}}


def asked(
    command: list[str], model: str, texts: list[str], schema: dict[str, Any], port: int, n_clients: int
) -> tuple[float, list[Any]]:
    """Ask a server, so many texts at a time; return the seconds of the requests, and the answers."""
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    body: dict[str, Any] = {"model": model, "temperature": 0, "seed": 1}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    def answer(text: str) -> Any:
        with closing(HTTPConnection("127.0.0.1", port)) as connection:
            its = body | {"messages": [{"role": "user", "content": _ASK.format(text=text)}]}
            connection.request("POST", "/v1/chat/completions", json.dumps(its), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status == 200 and json.loads(response.read())["choices"][0]["message"]["content"]

    try:
        while socket.socket().connect_ex(("127.0.0.1", port)) or not answer(texts[0]):  # until the model is loaded
            assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
            time.sleep(0.1)
        with ThreadPoolExecutor(n_clients) as clients:
            begun = time.perf_counter()
            answers = list(clients.map(answer, texts))
            return time.perf_counter() - begun, [*map(json.loads, answers)]
    finally:
        server.terminate()
        server.wait()


def mapped(model: str, folder: Path, parallel: int) -> tuple[float, list[Any]]:
    """Run edgedec map; return the seconds of its rows, as it says them, and the answers."""
    out = folder / f"{time.time_ns()}.jsonl"
    files = [folder / "texts.txt", "--json-schema", folder / "schema.json", "--out", out, "--parallel", parallel]
    words = ["edgedec", "map", model, *files, "--prompt", _ASK, "--seed", 1, "-t", 0, "--context", 2048]
    said = subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stderr
    return float(said.split()[-2]), [json.loads(line)["output"] for line in out.open(encoding="ascii")]


def main() -> None:
    """Run both ways in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", choices=["labels", "fields", "words"], default="labels")
    for option, default in (("--rows", 200), ("--rounds", 3), ("--parallel", 16)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--peer", help="a llama-server, which gets --peer-file")
    parser.add_argument("--peer-file", help="the model's GGUF")
    parser.add_argument("--json-out", type=Path)
    args, rounds = parser.parse_args(), list[dict[str, float]]()
    texts = random.Random(20).sample([f"{a} {b}. {c}" for a in _WHO for b in _WHAT for c in _END], args.rows)
    fields = _SCHEMA | ({"summary": {"type": "string", "maxLength": 80}} if args.task == "fields" else {})
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    schema = {"type": "string", "minLength": 60, "maxLength": 90} if args.task == "words" else schema
    with TemporaryDirectory() as name:
        (folder := Path(name)).joinpath("texts.txt").write_text("\n".join(texts), encoding="utf-8")
        folder.joinpath("schema.json").write_text(json.dumps(schema), encoding="utf-8")
        for _ in range(args.rounds):
            ours = ["edgedec", "serve", args.model, "--context", "2048", "--quiet"]
            loop_s, by_loop = asked(ours, args.model, texts, schema, 18912, 1)
            map_s, by_map = mapped(args.model, folder, args.parallel)
            assert by_loop == by_map, "the answers differ"
            rounds.append({"loop_s": loop_s, "map_s": map_s, "ratio": loop_s / map_s})
            if args.peer:
                slots = ["-np", str(args.parallel), "-c", str(args.parallel * 1024), "-t", "2"]
                peer = [args.peer, "-m", args.peer_file, *slots]
                peer_s, _ = asked(peer, args.model, texts, schema, 18913, args.parallel)
                rounds[-1] |= {"peer_s": peer_s, "peer_ratio": peer_s / map_s}
    names = {"benchmark": "mapped_rows", "model": args.model, "task": args.task, "n_rows": args.rows}
    medians = {each: median(one[each] for one in rounds) for each in rounds[0]}
    report(names | medians | {"rounds": rounds}, args.json_out)


if __name__ == "__main__":
    main()
