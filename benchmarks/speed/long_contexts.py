"""Measure decoding behind long prompts: T(n), drafts and memory by length and KV type, with llama.cpp beside it.

    python benchmarks/speed/long_contexts.py MODEL --lengths 2000,8000 --kv f16,q8_0 --work FILE.jsonl --json-out FILE

A cell, a length with a KV type, is a process and a line of --work; it is not measured again. All cells read one made
document, which the cpu runtime keeps in FILE.kept. Behind it forwards of 1 to 8 tokens take turns with plain reads of
memory and, with f16, llama.cpp's forwards; "share" is a plain read's time for the bytes of weights, keys and values,
over T(1). Then questions are answered with each of --drafts and plainly, in turn; the texts must be equal.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import edgedec
from edgedec.api.options import EngineOptions
from edgedec.decoding.reading import prompt_read
from edgedec.loading.resolve import resolve
from edgedec.memory.system import resident_bytes
from edgedec.progress import CancelToken
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.library import read_bandwidth

sys.path.insert(0, str(Path(__file__).parents[1] / "answers"))
from made_runs import add_line, lines_of
from prompt_keep import made


def opened(args: argparse.Namespace, length: int, kv: str, draft: str, runtime: str = "cpu") -> Any:
    """Load the model; return it and the first tokens of the document."""
    storing: dict[str, Any] = {"memory": "1TB", "prompt_cache": "40GB", "cache_dir": args.work.with_suffix(".kept")}
    options = {"runtime": runtime, "draft": draft, "n_ctx": length + 256, "kv_type": kv, "n_threads": args.threads}
    path = resolve(args.model, EngineOptions(offline=True).resolving)
    engine = edgedec.load(path, **options, **(storing if runtime == "cpu" else {}))
    return engine, [*map(int, engine.tokenizer.encode("\n".join(made("question", 0, 4000).lines))[:length])]


def cell(args: argparse.Namespace, length: int, kv: str) -> dict[str, Any]:
    """Return what forwards behind the document take, what the process holds of what was planned, and what drafts do."""
    begun, ms, sessions, n_bytes = perf_counter(), dict[str, Any](), dict[str, Any](), 1 << 29
    with ExitStack() as stack:
        for runtime, draft in (("cpu", "auto"), ("llamacpp", "off"))[: 2 if kv == "f16" and args.llamacpp else 1]:
            engine, ids = opened(args, length, kv, draft, runtime)
            request = stack.enter_context(engine).requests.plain(tuple(ids), {})
            sessions[runtime] = stack.enter_context(prompt_read(engine.pool, request, CancelToken())).slot.session
            ms[f"{runtime} loaded and read"] = [1e3 * (perf_counter() - begun)]
            print(f"{runtime} has read {length} tokens", flush=True)
            if runtime == "cpu":
                plan, held = engine.plan, resident_bytes()
        for turn in range(args.rounds):
            for name, n in ((name, n) for n in (1, 2, 4, 8) for name in sorted(sessions, reverse=turn % 2 == 1)):
                for _ in range(2):  # of which the second counts
                    started = perf_counter()
                    sessions[name].forward(np.array(ids[turn : turn + n], np.int32), n_past=length, rows="all")
                ms.setdefault(f"{name} T({n})", []).append(1e3 * (perf_counter() - started))
            ms.setdefault("plain read", []).append(1e3 * n_bytes / read_bandwidth(args.threads, n_bytes))
    ms = {name: median(each) for name, each in ms.items()}
    terms = {term.name.split(" (")[0]: term.n_bytes for term in plan.terms}
    read = terms["weights"] + terms["KV cache"] * length // (length + 256)
    measured = {"model": args.model, "length": length, "kv": kv, "ms": ms, "terms": terms, "bytes": read}
    measured |= {"planned": plan.total_bytes, "held": held, "share": read / n_bytes * ms["plain read"] / ms["cpu T(1)"]}
    measured |= {way: drafts(args, length, kv, way) for way in args.drafts if args.texts}
    return measured | {"cell_s": perf_counter() - begun}


def drafts(args: argparse.Namespace, length: int, kv: str, draft: str) -> dict[str, Any]:
    """Return how fast questions are answered with drafts, in times of plain decoding, and what drafts did."""
    (engine, ids), (plain, _) = opened(args, length, kv, draft), opened(args, length, kv, "off")
    ratios, counts = list[float](), dict[str, float]()
    with engine, plain:  # apart, so that no text is copied from its twin, and drafters go on with what they learned
        for turn in range(args.texts):
            what, answers = ("What happened on", "Copy the line of", "Tell a story about")[turn % 3], {}
            ask = [*ids, *map(int, engine.tokenizer.encode(f"\n\n{what} day {17 * turn + 3}:", add_special=False))]
            for drafted in (turn % 2 == 0, turn % 2 == 1):
                asked = {"max_tokens": args.tokens, "temperature": 0.0, "ignore_end": True}
                answers[drafted] = (engine if drafted else plain).generate(tuple(ask), **asked)
            assert answers[True].token_ids == answers[False].token_ids, "drafts have changed a text"
            stats = answers[True].stats
            ratios.append(stats.tokens_per_s / answers[False].stats.tokens_per_s)
            done = {"tokens": stats.n_generated_tokens - 1, "steps": stats.n_steps, "drafts": stats.n_drafts}
            done |= {f"ms of {name}": 1e3 * each["draft_s"] for name, each in stats.drafters.items()}
            counts = {name: counts.get(name, 0) + n for name, n in done.items()}
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    interval = np.quantile(medians, (0.025, 0.975)).tolist()
    return {"ratios": ratios, "median": median(ratios), "interval": interval, **counts}


def main() -> None:
    """Measure the cells that are missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, listed in (("lengths", "2000,8000,16000,32000"), ("kv", "f16,q8_0,q4_0"), ("drafts", "auto,suffix,head")):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=listed.split(","))
    for name, default in (("texts", 20), ("tokens", 64), ("rounds", 9), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-llamacpp", dest="llamacpp", action="store_false")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    cells = [(args.model, int(length), kv) for kv in args.kv for length in args.lengths]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for each in cells:
            if each not in [(row["model"], row["length"], row["kv"]) for row in lines_of(args.work)]:
                add_line(args.work, pool.submit(cell, args, *each[1:]).result())
                print(f"{each}: {lines_of(args.work)[-1]}", flush=True)
    measured = [row for row in lines_of(args.work) if (row["model"], row["length"], row["kv"]) in cells]
    report({"benchmark": "long_contexts", "model": args.model, "cells": measured}, args.json_out)


if __name__ == "__main__":
    main()
