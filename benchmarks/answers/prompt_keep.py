"""Measure what `--method prompt-keep` does to answers about long documents, and to the time before the first token.

    python benchmarks/answers/prompt_keep.py qwen2.5-coder-1.5b --keeps 1 0.2 0.3 0.5 --tokens 8000 --count 40 \
        --work FILE.jsonl --json-out FILE.json

Documents are made from a seed. Of three kinds in turn, each has ten questions, each about one place among many that
look like it: a code in a report (needle), a number in a table (table), and what somebody did where (question). Every
question is answered greedily from each share of the document, with the reading model, or with the target's own first
layers where none is given. An answer is right where the expected word is in it; its "nats" are those of the expected
word, minus its log-probability. Where the reading model is the target itself, its first layers read a document once
for its ten questions; the answers are those of its own first layers.

The script adds a line an answer to --work and skips what that has, so it can be interrupted; --seconds ends it in time.
It prints accuracy with 95 % intervals and the median time to the first token of questions about a document that was not
read before, on the clock and of the processor, and ends with one line of JSON.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import monotonic, process_time
from typing import Any

import numpy as np
from made_pairs import compared
from made_runs import add_line, lines_of
from made_table import interval
from numpy.typing import NDArray

import edgedec
from edgedec.api.options import Lossy
from edgedec.choosing.partial_texts import row_log_probs
from edgedec.decoding.reading import prompt_read
from edgedec.progress import CancelToken
from edgedec_apps.bench.provenance import report

_NAMES = "Mara", "Ivo", "Nadia", "Tomas", "Lena", "Omar", "Ruth", "Piet", "Hana", "Jorge", "Silke", "Bruno"
_PLACES = "Lisbon", "Oslo", "Quito", "Riga", "Dakar", "Turin", "Osaka", "Perth", "Tunis", "Cork", "Lima", "Ghent"
_THINGS = "pencils", "stamps", "apples", "tiles", "bolts", "cups", "cards", "bricks", "lamps", "ropes", "plates"
_ACTS = "repaired", "counted", "painted", "sold", "packed", "measured", "washed", "borrowed", "labelled"
KINDS = ("needle", "table", "question")
N_QUESTIONS = 10  # about a document


@dataclass(frozen=True, slots=True)
class Asked:
    """A document with a question about one place of it.

    Attributes:
        kind, number: Its kind, and the question's number of that kind.
        lines: The document.
        at: The line that the question is about.
        question: The question.
        answer: The word that a right answer has.
    """

    kind: str
    number: int
    lines: list[str]
    at: int
    question: str
    answer: str


def made(kind: str, number: int, n_lines: int) -> Asked:
    """Return a question of a kind about a document of so many lines, the same for the same arguments.

    Questions 0 to 9 are about one document, 10 to 19 about the next one, and so on.

    >>> asked = made("table", 6, 12)
    >>> asked.answer in asked.lines[asked.at], asked.lines == made("table", 9, 12).lines
    (True, True)
    """
    random = Random(f"{kind} {number // N_QUESTIONS}")
    asked_of = random.sample(range(n_lines), N_QUESTIONS)
    archives = dict(zip(asked_of, random.sample(_PLACES, N_QUESTIONS), strict=True))
    lines, asked = [], []
    for i in range(n_lines):
        name, place, thing = random.choice(_NAMES), random.choice(_PLACES), random.choice(_THINGS)
        act, count, code = random.choice(_ACTS), random.randrange(100, 1000), random.randrange(10_000, 100_000)
        if kind == "table":
            line = f"| {1000 + 7 * i} | {thing} | {count} | {place} |"
            ask = f"How many pieces are in row {1000 + 7 * i}?", str(count)
        elif kind == "needle" and i in archives:
            line = f"The archive in {archives[i]} has the code {code}."
            ask = f"Which number opens the archive of {archives[i]}?", str(code)
        else:
            line = f"On day {i + 1} {name} {act} {count} {thing} in {place}."
            ask = f"In which city did {name} spend day {i + 1}?", place
        lines.append(line)
        asked.append(ask)
    at = asked_of[number % N_QUESTIONS]
    return Asked(kind, number, lines, at, *asked[at])


def task(i: int) -> tuple[str, int]:
    """Return the kind and the number of question `i` of all: questions about one document follow one another."""
    document, question = divmod(i, N_QUESTIONS)
    return KINDS[document % len(KINDS)], document // len(KINDS) * N_QUESTIONS + question


def prompt_of(
    engine: edgedec.Engine, kind: str, number: int, n_tokens: int, ask: str = ""
) -> tuple[tuple[int, ...], Asked]:
    """Return the prompt of a question whose document has about so many tokens (or of what is asked), and it."""
    sample = made(kind, number, 100)
    per_line = len(engine.tokenizer.encode("\n".join(sample.lines), add_special=False)) / 100
    asked = made(kind, number, max(N_QUESTIONS, int(n_tokens / per_line)))
    head = "| number | what | pieces | where |\n" if kind == "table" else ""
    text = f"{head}{chr(10).join(asked.lines)}\n\n{ask or f'Answer with one word or number. {asked.question}'}"
    if engine.template is not None:
        return tuple(engine.chat_ids([{"role": "user", "content": text}])), asked
    return engine.prompt_ids(f"{text}\nAnswer:"), asked


def logits_of(engine: edgedec.Engine, prompt: tuple[int, ...], answer: list[int]) -> NDArray[np.float32]:
    """Return the logits that predict each token of an answer, f32[n, n_vocab]."""
    with prompt_read(engine.pool, engine.requests.plain(prompt, {}), CancelToken()) as read:
        first = read.forward.logits[-1:].copy()
        if len(answer) == 1:
            return first
        behind = read.slot.session.forward(np.array(answer[:-1], np.int32), n_past=len(prompt), rows="all").logits
        return np.concatenate([first, behind])


def answers(args: argparse.Namespace, keep: float, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the answers that are missing for one share; 1 stands for all of the document."""
    reading_model = args.reading_model if keep < 1 else None
    setting = {"model": args.model, "reading_model": reading_model, "keep": keep, "tokens": args.tokens}
    missing = [each for each in map(task, range(args.count)) if (*setting.values(), *each) not in done]
    if not missing:
        return
    methods = {"prompt_keep": {"keep": keep, "model": reading_model}} if keep < 1 else None
    options = {"runtime": "cpu", "offline": True, "draft": "off", "n_threads": args.threads}
    with edgedec.load(args.model, n_ctx=args.tokens + 1024, lossy=Lossy(methods=methods), **options) as engine:
        previous = None
        for kind, number in missing:
            prompt, asked = prompt_of(engine, kind, number, args.tokens)
            begun, first_cpu_s, text = process_time(), 0.0, ""
            stream = engine.stream(prompt, temperature=0.0, max_tokens=args.answer_tokens)
            for token in stream:
                first_cpu_s = first_cpu_s or process_time() - begun
                text += token.text
            is_new, previous = asked.lines != previous, asked.lines
            stats = stream.generation.stats
            expected = engine.tokenizer.encode(asked.answer, add_special=False)
            rows = logits_of(engine, prompt, expected)
            yield setting | {
                "kind": kind,
                "number": number,
                "is_new": is_new,
                "right": asked.answer.lower() in text.lower(),
                "text": text,
                "expected": asked.answer,
                "nats": -sum(float(row_log_probs(row)[i]) for row, i in zip(rows, expected, strict=True)),
                "n_prompt": len(prompt),
                "first_token_s": stats.first_token_s,
                "first_token_cpu_s": first_cpu_s,
                "notes": stats.notes,
            }


def table(rows: list[dict[str, Any]], keeps: list[float]) -> dict[str, Any]:
    """Return the figures of each share, by kind and of all, and print them."""
    found: dict[str, Any] = {}
    for keep in keeps:
        for kind in (*KINDS, "all"):
            of = [row for row in rows if row["keep"] == keep and kind in (row["kind"], "all")]
            new = [row for row in of if row["is_new"]]
            if not new:
                continue
            n_right = sum(row["right"] for row in of)
            low, high = interval(n_right, len(of))
            first, cpu = (median(row[name] for row in new) for name in ("first_token_s", "first_token_cpu_s"))
            figures = {
                "n": len(of),
                "right": n_right,
                "interval": [low, high],
                "nats": fmean(row["nats"] for row in of),
            }
            found[f"{keep:g} {kind}"] = figures | {"first_token_s": first, "first_token_cpu_s": cpu}
            if keep < 1 and kind == "all" and 1 in keeps:
                rights = [
                    {f"{row['kind']} {row['number']}": row["right"] for row in rows if row["keep"] == each}
                    for each in (keep, 1)
                ]
                found[f"{keep:g} all"]["against"] = compared(*rights)
            share = f"{n_right}/{len(of)} ({low:.2f} to {high:.2f}), {figures['nats']:.2f} nats"
            print(f"{keep:5g} {kind:>9}: {share}, first token {first:.2f} s, of the processor {cpu:.2f} s")
    return found


def main() -> None:
    """Ask, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--reading-model")
    parser.add_argument("--keeps", type=float, nargs="+", default=[1.0, 0.3], help="1 is all of the prompt")
    parser.add_argument("--tokens", type=int, default=8000, help="of a document")
    parser.add_argument("--count", type=int, default=40, help="questions")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    until, keeps = monotonic() + args.seconds, args.keeps
    fields = ("model", "reading_model", "keep", "tokens", "kind", "number")
    done = {tuple(row[name] for name in fields) for row in lines_of(args.work)}
    for keep in keeps:
        for row in answers(args, keep, done):
            add_line(args.work, row)
            if monotonic() > until:
                break
    settings = [(args.model, args.reading_model if keep < 1 else None, keep, args.tokens) for keep in keeps]
    rows = [row for row in lines_of(args.work) if tuple(row[name] for name in fields[:-2]) in settings]
    figures = table(rows, keeps)
    report(
        {"benchmark": "prompt_keep", "model": args.model, "reading_model": args.reading_model, "tokens": args.tokens}
        | {"results": figures},
        args.json_out,
    )


if __name__ == "__main__":
    main()
