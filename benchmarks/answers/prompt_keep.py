"""Measure what `--prompt-keep` does to answers about long documents, and to the time before the first token.

    python benchmarks/answers/prompt_keep.py qwen2.5-coder-1.5b --reading-model qwen2.5-coder-0.5b --keeps 0.2 0.3 0.5 \
        --tokens 8000 --count 40 --work FILE.jsonl --json-out FILE.json

Documents are made from a seed. Of three kinds in turn, each has one place that the question is about, and many that
look like it: a code word in a report (needle), a number in a table (table), and what somebody did where (question).
Every question is answered greedily from all of the document and from each share of it, with the reading model, or
with the target's own first layers where none is given. An answer is right where the expected word is in it.

The script adds a line an answer to --work and skips what that has, so it can be interrupted; --seconds ends it in time.
It prints accuracy with 95 % intervals and the median time to the first token, and ends with one line of JSON.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Any

from made_runs import add_line, lines_of
from made_table import interval

import edgedec
from edgedec.api.options import Lossy
from edgedec_apps.bench.provenance import report

_NAMES = "Mara", "Ivo", "Nadia", "Tomas", "Lena", "Omar", "Ruth", "Piet", "Hana", "Jorge", "Silke", "Bruno"
_PLACES = "Lisbon", "Oslo", "Quito", "Riga", "Dakar", "Turin", "Osaka", "Perth", "Tunis", "Cork", "Lima", "Ghent"
_THINGS = "pencils", "stamps", "apples", "tiles", "bolts", "cups", "cards", "bricks", "lamps", "ropes", "plates"
_ACTS = "repaired", "counted", "painted", "sold", "packed", "measured", "washed", "borrowed", "labelled"
KINDS = ("needle", "table", "question")


@dataclass(frozen=True, slots=True)
class Asked:
    """A document with a question about one place of it.

    Attributes:
        id: Its kind and number.
        lines: The document.
        at: The line that the question is about.
        question: The question.
        answer: The word that a right answer has.
    """

    id: str
    lines: list[str]
    at: int
    question: str
    answer: str


def made(kind: str, number: int, n_lines: int) -> Asked:
    """Return a document of so many lines, the same for the same arguments.

    >>> asked = made("table", 0, 3)
    >>> asked.answer in "".join(asked.lines), len(asked.lines)
    (True, 3)
    """
    random = Random(f"{kind} {number}")
    at = random.randrange(n_lines)
    lines = []
    for i in range(n_lines):
        name, place, thing = random.choice(_NAMES), random.choice(_PLACES), random.choice(_THINGS)
        act, count, code = random.choice(_ACTS), random.randrange(100, 1000), random.randrange(10_000, 100_000)
        if kind == "table":
            line = f"| {1000 + 7 * i} | {thing} | {count} | {place} |"
            ask = f"How many pieces does item {1000 + 7 * i} of the table have?", str(count)
        elif kind == "needle" and i == at:
            line = f"The code word of the archive in {place} is {code}."
            ask = f"What is the code word of the archive in {place}?", str(code)
        else:
            line = f"On day {i + 1} {name} {act} {count} {thing} in {place}."
            ask = f"Where was {name} on day {i + 1}?", place
        if i == at:
            found = ask
        lines.append(line)
    return Asked(f"{kind}{number}", lines, at, *found)


def prompt_of(engine: edgedec.Engine, kind: str, number: int, n_tokens: int) -> tuple[tuple[int, ...], Asked]:
    """Return the prompt of a document that has about so many tokens, and the document."""
    sample = made(kind, number, 100)
    per_line = len(engine.tokenizer.encode("\n".join(sample.lines), add_special=False)) / 100
    asked = made(kind, number, max(1, int(n_tokens / per_line)))
    head = "| item | what | pieces | where |\n" if kind == "table" else ""
    text = f"{head}{chr(10).join(asked.lines)}\n\nAnswer with one word or number. {asked.question}"
    if engine.can_chat:
        return tuple(engine.chat_ids([{"role": "user", "content": text}])), asked
    return engine.prompt_ids(f"{text}\nAnswer:"), asked


def answers(args: argparse.Namespace, keep: float, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the answers that are missing for one share; 1 stands for all of the document."""
    tasks = [(KINDS[i % len(KINDS)], i // len(KINDS)) for i in range(args.count)]
    reading_model = args.reading_model if keep < 1 else None
    setting = args.model, reading_model, keep, args.tokens
    missing = [(kind, i) for kind, i in tasks if (*setting, f"{kind}{i}") not in done]
    if not missing:
        return
    methods = {"prompt_keep": {"keep": keep, "model": reading_model}} if keep < 1 else None
    options = {"runtime": "cpu", "offline": True, "draft": "off", "n_threads": args.threads}
    with edgedec.load(args.model, n_ctx=args.tokens + 1024, lossy=Lossy(methods=methods), **options) as engine:
        for kind, i in missing:
            prompt, asked = prompt_of(engine, kind, i, args.tokens)
            found = engine.generate(prompt, temperature=0.0, max_tokens=args.answer_tokens)
            yield {
                "model": args.model,
                "reading_model": reading_model,
                "keep": keep,
                "tokens": args.tokens,
                "id": asked.id,
                "kind": kind,
                "right": asked.answer.lower() in found.text.lower(),
                "text": found.text,
                "expected": asked.answer,
                "n_prompt": len(prompt),
                "first_token_s": found.stats.first_token_s,
                "notes": found.stats.reasons,
            }


def table(rows: list[dict[str, Any]], keeps: list[float]) -> dict[str, Any]:
    """Return the figures of each share, by kind and of all, and print them."""
    found: dict[str, Any] = {}
    for keep in keeps:
        for kind in (*KINDS, "all"):
            of = [row for row in rows if row["keep"] == keep and kind in (row["kind"], "all")]
            if not of:
                continue
            n_right = sum(row["right"] for row in of)
            low, high = interval(n_right, len(of))
            first = median(row["first_token_s"] for row in of)
            of_kind = {"n": len(of), "right": n_right, "interval": [low, high], "first_token_s": first}
            found[f"{keep:g} {kind}"] = of_kind
            print(f"{keep:5g} {kind:>9}: {n_right}/{len(of)} ({low:.2f} to {high:.2f}), first token {first:.2f} s")
    return found


def main() -> None:
    """Ask, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--reading-model")
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.3])
    parser.add_argument("--tokens", type=int, default=8000, help="of a document")
    parser.add_argument("--count", type=int, default=40, help="questions")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    until, keeps = monotonic() + args.seconds, [1.0, *args.keeps]
    fields = ("model", "reading_model", "keep", "tokens", "id")
    done = {tuple(row[name] for name in fields) for row in lines_of(args.work)}
    for keep in keeps:
        for row in answers(args, keep, done):
            add_line(args.work, row)
            if monotonic() > until:
                break
    settings = [(args.model, args.reading_model if keep < 1 else None, keep, args.tokens) for keep in keeps]
    rows = [row for row in lines_of(args.work) if tuple(row[name] for name in fields[:-1]) in settings]
    figures = table(rows, keeps)
    report(
        {"benchmark": "prompt_keep", "model": args.model, "reading_model": args.reading_model, "tokens": args.tokens}
        | {"results": figures},
        args.json_out,
    )


if __name__ == "__main__":
    main()
