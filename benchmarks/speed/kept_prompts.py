"""Measure the first token of a second question about a long document: in the same engine, and in another process.

    python benchmarks/speed/kept_prompts.py smollm2-135m --tokens 8000 --json-out kept.json

Three processes each ask a question about one document: the first one reads it and keeps it, the second one finds it on
the disk, the third one keeps nothing. In each, a second question follows, whose prefix is in memory. Times are from the
request to the first token, on the clock and of the processor: on a busy machine only the latter say much. Answers to
equal questions must be equal. The first process is also compared with the third: what keeping costs while reading. Each
round has a new document. Ends with one line of JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import edgedec
from edgedec.api.options import EngineOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.provenance import report

_QUESTIONS = ("\n\nQuestion: what is the first word?\nAnswer:", "\n\nQuestion: how does it end?\nAnswer:")


def ask(model: str, n_tokens: int, n_threads: int | None, seed: int, cache: str, first: int, size: str | None) -> None:
    """Print the times and answers of two questions about a document, the one with number `first` at first."""
    options: dict[str, Any] = {"n_ctx": n_tokens + 128, "prompt_cache": size, "cache_dir": cache, "draft": "off"}
    with edgedec.load(model, runtime="cpu", offline=True, n_threads=n_threads, **options) as engine:
        ids = np.random.default_rng(seed).integers(1000, 30000, n_tokens).tolist()
        found = []
        for number in (first, 1 - first):
            prompt = [*ids, *engine.tokenizer.encode(_QUESTIONS[number], add_special=False)]
            begun, cpu_begun, first_s, cpu_s = time.perf_counter(), time.process_time(), 0.0, 0.0
            answer: list[int] = []
            stream = engine.stream(tuple(prompt), max_tokens=16, temperature=0.0, ignore_end=True)
            for token in stream:
                if not answer:
                    first_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
                answer.append(token.token_id)
            n_reused = stream.generation.stats.n_reused_tokens
            found.append({"first_s": first_s, "cpu_s": cpu_s, "n_reused": n_reused, "answer": answer})
    print(json.dumps(found))


def main() -> None:
    """Run the processes, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--ask", nargs=4, metavar=("SEED", "CACHE", "FIRST", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        seed, cache, first, size = args.ask
        ask(args.model, args.tokens, args.threads, int(seed), cache, int(first), None if size == "off" else size)
        return
    path, rows = str(resolve(args.model, EngineOptions(offline=True).resolving)), []
    with TemporaryDirectory() as cache:
        for seed in range(args.rounds):
            found = []
            for first, size in ((0, "4GB"), (1, "4GB"), (1, "off")):
                threads = [] if args.threads is None else ["--threads", args.threads]
                wish = [path, "--tokens", args.tokens, *threads, "--ask", seed, cache, first, size]
                command = [sys.executable, __file__, *map(str, wish)]
                found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))
            reading, from_disk, plain = found
            by_name = {"plain": plain[0], "keeping": reading[0], "memory": reading[1], "disk": from_disk[0]}
            row = {
                **{f"{name}_s": each["first_s"] for name, each in by_name.items()},
                **{f"{name}_cpu_s": each["cpu_s"] for name, each in by_name.items()},
                "n_from_disk": from_disk[0]["n_reused"],
                "is_equal": len({str(each["answer"]) for each in (from_disk[0], plain[0], reading[1])}) == 1,
            }
            rows.append(row)
            print(row, flush=True)
    medians = {name: round(median(row[name] for row in rows), 4) for name in rows[0] if name.endswith("_s")}
    ends = ("_s", "_cpu_s")
    shares = {
        f"{name}{end[:-2]}_share": round(medians[name + end] / medians[f"plain{end}"], 4)
        for name in ("keeping", "memory", "disk")
        for end in ends
    }
    document = {"benchmark": "kept_prompts", "model": args.model, "n_tokens": args.tokens, "rounds": rows}
    document |= medians | shares | {"is_equal": all(row["is_equal"] for row in rows)}
    report(document, args.json_out)
    sys.exit(not document["is_equal"])


if __name__ == "__main__":
    main()
