"""Measure what several texts of one prompt cost together, beside the same texts one after another.

    python benchmarks/speed/samples.py qwen2.5-coder-1.5b --n 8 --out benchmarks/results/samples.json

A chat prompt of about 300 tokens is answered n times: by Engine.samples, and by a request for each seed, which finds
the prompt in the KV cache; with --draft NAME both draft. Every text must equal the one of its seed alone. The script
prints the tokens per second of both ways, prefill included, their ratio, and the state that bounds it: the seconds T(n)
of a native forward with a row of each text, against those of one row.

Then a prompt of about 2,000 tokens is read, and the resident memory that n texts of it take is compared with that of
one text. Ends with one line of JSON; the exit code is 1 where a text differs.
"""

import argparse
import gc
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import edgedec
from edgedec.memory.system import resident_bytes, return_free_memory
from edgedec.model import ForwardItem, RowGroup, Session
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_apps.bench.provenance import report


def prompt_of(engine: edgedec.Engine, n_tokens: int) -> list[dict[str, Any]]:
    """Return a chat of about so many tokens, of the benchmark's prompts one after another."""
    text = "\n\n".join(prompt.text for prompt in read_prompts(DEFAULT_PROMPTS, 3)) * 20
    ids = engine.tokenizer.encode(text)[: n_tokens - 40]
    return [{"role": "user", "content": engine.tokenizer.decode(ids) + "\n\nGo on with this in your own words."}]


def forward_seconds(engine: edgedec.Engine, prompt: list[int], n: int, rounds: int) -> dict[int, float]:
    """Return the median seconds of a forward with one row, and with one row of each of n forks."""
    session = engine.session()
    session.forward(np.array(prompt, np.int32), n_past=0)
    forks: list[Session] = [session.fork() for _ in range(n)]
    one = np.array([prompt[0]], np.int32)
    found = {}
    for n_rows in (1, n):
        seconds = []
        for _ in range(rounds):
            begun = perf_counter()
            engine.model.forward([ForwardItem(fork, len(prompt), (RowGroup(one),)) for fork in forks[:n_rows]])
            seconds.append(perf_counter() - begun)
        found[n_rows] = median(seconds)
    for fork in [*forks, session]:
        fork.close()
    return found


def rates(
    engine: edgedec.Engine, chat: list[dict[str, Any]], n: int, given: dict[str, Any], rounds: int
) -> tuple[dict[str, list[float]], int, float]:
    """Return tokens per second of both ways by round, how many texts differ, and tokens a step one after another."""
    found: dict[str, list[float]] = {"one after another": [], "together": []}
    differ, a_step = 0, 1.0
    for i in range(rounds + 1):
        options = given if i else {**given, "max_tokens": 8}  # the first round warms both
        engine.forget()
        engine.generate([1, 2, 3], max_tokens=1)  # so that both ways read the whole prompt
        begun = perf_counter()
        together = engine.samples(chat, n, **options)
        together_s = perf_counter() - begun
        engine.forget()  # or drafts would be of the same texts
        engine.generate([1, 2, 3], max_tokens=1)
        begun = perf_counter()
        alone = [engine.chat(chat, **{**options, "seed": options["seed"] + k}) for k in range(n)]
        alone_s = perf_counter() - begun
        differ += sum(a.token_ids != b.token_ids for a, b in zip(together, alone, strict=True))
        if i:
            n_tokens = sum(len(text.token_ids) for text in alone)
            a_step = (n_tokens - n) / sum(text.stats.n_steps for text in alone)
            found["one after another"].append(n_tokens / alone_s)
            found["together"].append(n_tokens / together_s)
            print(f"round {i}: {n_tokens / together_s:.1f} against {n_tokens / alone_s:.1f} tokens/s", flush=True)
    return found, differ, a_step


def memory(engine: edgedec.Engine, chat: list[dict[str, Any]], n: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of one text's KV cache and of n texts', by the resident memory that they add."""
    ids = engine.chat_ids(chat)
    kv = next(term.n_bytes for term in engine.model.memory(engine.n_ctx, 1) if term.name == "KV cache")
    per_token = kv / engine.n_ctx
    stream = engine.samples_stream([1, 2, 3], n, **options)  # what Python and the logits of n rows take
    for _ in stream:
        pass
    del stream
    gc.collect()
    return_free_memory()  # what closed forks left behind would not be counted else
    before = resident_bytes() or 0
    stream = engine.samples_stream(ids, n, **options)
    most, n_own = 0, 0
    for output in stream:
        n_own += output.output.token_id >= 0
        most = max(most, resident_bytes() or 0)
    prompt_bytes = int(per_token * len(ids))
    return {
        "prompt_tokens": len(ids),
        "own_tokens": n_own,
        "one_kv_bytes": prompt_bytes,
        "own_kv_bytes": int(per_token * n_own),
        "added_bytes": most - before,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--draft", default="off")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draft = None if args.draft == "off" else args.draft
    options = {"temperature": 0.8, "seed": 1, "max_tokens": args.max_tokens, "ignore_end": True, "logprobs": None}
    with edgedec.load(args.model, runtime="cpu", offline=True, draft=draft, n_ctx=4096, draft_head="off") as engine:
        chat = prompt_of(engine, args.prompt_tokens)
        found, differ, a_step = rates(engine, chat, args.n, options, args.rounds)
        ids = engine.chat_ids(chat)
        forward_s = forward_seconds(engine, ids, args.n, 10)
        held = {} if args.no_memory else memory(engine, prompt_of(engine, 2000), args.n, options | {"max_tokens": 64})
    together, alone = median(found["together"]), median(found["one after another"])
    document: dict[str, Any] = {
        "benchmark": "samples",
        "model": args.model,
        "n": args.n,
        "draft": args.draft,
        "prompt_tokens": len(ids),
        "max_tokens": args.max_tokens,
        "tokens_per_s": found,
        "tokens_a_step": a_step,
        "ratio": together / alone,
        "forward_s": forward_s,
        "growth": forward_s[args.n] / forward_s[1],
        "different": differ,
        "memory": held,
    }
    if held:
        document["memory_ratio"] = (held["added_bytes"] - held["own_kv_bytes"]) / held["one_kv_bytes"]
    growth = document["growth"]
    print(f"{args.n} texts together: {together / alone:.2f} x one after another; T({args.n}) / T(1) = {growth:.2f}")
    report(document, args.out)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
