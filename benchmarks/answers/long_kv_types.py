"""Measure what smaller KV types, a context that slides, and heads that see a part of the slots do to long documents.

    python benchmarks/answers/long_kv_types.py qwen2.5-coder-1.5b --tokens 8000 --count 10 --threads 2 \
        --work FILE.jsonl --json-out FILE.json

The documents and questions are those of benchmarks/answers/prompt_keep.py. Each way reads a document once for its five
questions, answers them greedily, and evaluates the answer of f16 keys and values. Reported are the right answers, and
over the tokens of f16's answers the KL divergence from f16 in nats and how often the best token is the same, and how
many questions only f16, or only the other way, gets right. "slide" is a context of a quarter of the document's length
that slides; "drop10" and "drop20" let each head go on with a tenth or a fifth of the slots right behind the prompt,
"recycle10" chooses them again each 64 tokens. Behind the questions about a document comes a text of --text-tokens about
it, of which KL, same token and the processor's seconds a step are reported. Beside these stands what `edgedec plan`
gives up at this length, step by step, and what is held then.

The script adds a line a question to --work and skips what that has, so it can be interrupted. It keeps f16's logits
and the documents as they were read beside that file. It ends with one line of JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from made_pairs import compared
from made_runs import add_line, lines_of
from made_table import interval
from prompt_keep import KINDS, N_QUESTIONS, logits_of, prompt_of, task

import edgedec
from edgedec.api.options import EngineOptions, Lossy
from edgedec.choosing.partial_texts import row_log_probs
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.provenance import report

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "drop10": {"dropped_slots": {"share": 0.1, "ahead": 0}},
    "drop20": {"dropped_slots": {"share": 0.2, "ahead": 0}},
    "recycle10": {"recycled_attention": {"share": 0.1}},
}
KV_TYPES = ("f16", "q8_0", "q8_0/q4_0", "gear", "q4_0")
WAYS = (*KV_TYPES, "slide", *METHODS)
ASK = "Retell what the document says, in its order and in your words."


def asked_of(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield kind and number of each question, and behind a document's last one those of a text about it."""
    for i in range(args.count):
        document, question = divmod(i, args.of_document)
        yield task(N_QUESTIONS * document + question)
        if args.text_tokens and (question == args.of_document - 1 or i == args.count - 1):
            yield f"{task(N_QUESTIONS * document)[0]} text", document


def answers(args: argparse.Namespace, way: str, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield what is missing of one way; f16 comes first, as the others are compared with its answers."""
    missing = [each for each in asked_of(args) if (args.model, args.tokens, way, *each) not in done]
    if not missing:
        return
    slides, room = way == "slide", max(1024, args.tokens // 8)
    n_ctx = args.tokens + room + (args.tokens // 3 if way in METHODS else 0)
    options = {"runtime": "cpu", "draft": "off", "n_threads": args.threads}
    storing = {"memory": "1TB", "prompt_cache": "40GB", "cache_dir": args.work.with_suffix(".kept")}
    kept = args.work.with_suffix(".logits")
    kept.mkdir(exist_ok=True)
    with edgedec.load(
        resolve(args.model, EngineOptions(offline=True).resolving),
        n_ctx=args.tokens // 4 if slides else n_ctx,
        kv_type=way if way in KV_TYPES else "f16",
        lossy=Lossy(slide=slides, methods=METHODS.get(way)),
        **options,
        **storing,
    ) as engine:
        for kind, number in missing:
            of, n = kind.removesuffix(" text"), args.answer_tokens if of_answers(kind) else args.text_tokens
            first = number if of_answers(kind) else number // len(KINDS) * N_QUESTIONS
            prompt, asked = prompt_of(engine, of, first, args.tokens, "" if of_answers(kind) else ASK)
            marks = list[float]()
            stream = engine.stream(prompt, temperature=0.0, max_tokens=n)
            for _ in stream:
                marks.append(process_time())
            found = stream.generation
            file = kept / f"{args.model}-{args.tokens}-{kind}{number}.npz"
            if way == "f16":
                ids = list(found.token_ids)
                np.savez(file, ids=ids, logits=logits_of(engine, prompt, ids))
            of_f16 = np.load(file)
            expected = np.array([row_log_probs(row) for row in of_f16["logits"]])
            rows = of_f16["logits"] if way == "f16" else logits_of(engine, prompt, of_f16["ids"].tolist())
            own = np.array([row_log_probs(row) for row in rows])
            kl = (np.exp(expected) * (expected - own)).sum(axis=1)
            yield {
                "model": args.model,
                "tokens": args.tokens,
                "way": way,
                "kind": kind,
                "number": number,
                "right": asked.answer.lower() in found.text.lower(),
                "text": found.text,
                "expected": asked.answer,
                "kl": kl.tolist(),
                "same": (expected.argmax(axis=1) == own.argmax(axis=1)).tolist(),
                "step_s": (marks[-1] - marks[0]) / max(len(marks) - 1, 1),
            }


def of_answers(kind: str) -> bool:
    """Return whether a kind is that of questions, and not of texts."""
    return not kind.endswith(" text")


def ladder(model: str, n_ctx: int) -> list[dict[str, Any]]:
    """Return what `edgedec plan` gives up at this length, step by step, and what is held then; the KV type is free."""
    wish = ("plan", model, "--context", str(n_ctx), "--kv-type", "auto", "--runtime", "cpu", "--json", "--offline")
    program = [sys.executable, "-m", "edgedec_apps.cli", *wish, "--memory", "64GB"]
    plan = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    steps = [{"total_bytes": each["total_bytes"], "given_up": each["given_up"]} for each in plan["alternatives"]]
    for step in steps:
        print(f"{step['total_bytes'] / 1e6:6.0f} MB: {', '.join(step['given_up'])}")
    return steps


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each way, and print them."""
    found: dict[str, Any] = {}
    for way, texts in product(WAYS, (False, True)):
        of = [row for row in rows if row["way"] == way and of_answers(row["kind"]) != texts]
        if not of:
            continue
        kl, same = (np.concatenate([row[name] for row in of]) for name in ("kl", "same"))
        n_right = sum(row["right"] for row in of)
        low, high = interval(n_right, len(of))
        name = f"{way} texts" if texts else way
        found[name] = {"n": len(of), "n_tokens": len(kl), "step_s": median(row.get("step_s", 0.0) for row in of)}
        found[name] |= {"kl": float(kl.mean()), "most_kl": float(kl.max()), "same": float(same.mean())}
        share = f"{found[name]['step_s']:.3f} s a step"
        if not texts:
            found[name] |= {"right": n_right, "interval": [low, high]}
            rights = [
                {f"{r['kind']}{r['number']}": r["right"] for r in rows if r["way"] == each and of_answers(r["kind"])}
                for each in (way, "f16")
            ]
            found[name]["against"] = against = compared(*rights)
            share = f"{n_right}/{len(of)} ({low:.2f} to {high:.2f})"
            share += f", {against['only ours']} right alone, f16 {against['only theirs']}"
        print(f"{name:>15}: {share}, KL {kl.mean():.4f}, at most {kl.max():.3f}, same best token {same.mean():.3f}")
    return found


def main() -> None:
    """Ask, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, default=8000, help="of a document")
    parser.add_argument("--count", type=int, default=10, help="questions")
    parser.add_argument("--of-document", type=int, default=N_QUESTIONS, help="questions about one document")
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--text-tokens", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    fields = ("model", "tokens", "way", "kind", "number")
    done = {tuple(row[name] for name in fields) for row in lines_of(args.work)}
    for way in args.ways:
        for row in answers(args, way, done):
            add_line(args.work, row)
    rows = [row for row in lines_of(args.work) if (row["model"], row["tokens"]) == (args.model, args.tokens)]
    figures = {"results": table(rows), "ladder": ladder(args.model, args.tokens + 1024)}
    report({"benchmark": "long_kv_types", "model": args.model, "tokens": args.tokens} | figures, args.json_out)


if __name__ == "__main__":
    main()
