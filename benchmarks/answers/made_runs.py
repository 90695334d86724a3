"""What benchmarks/answers/better_answers.py needs to run a model on made tasks, resumably."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from function_runner import n_passed
from made_tasks import MadeTask, given_answer, is_right, made_tasks

import edgedec
from edgedec.choosing.partial_texts import PartialTexts
from edgedec.decoding.branches import branches_on
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.progress import CancelToken
from edgedec.sampling import SamplingParams
from edgedec.sequence import Request
from edgedec_methods.judgement import Question, question_of, turn_after_answer

N_CTX = 2048
STOPS = {"functions": ("\n```",)}


def load(args: Namespace, model: str) -> edgedec.Engine:
    """Load a model for branches of its prompt."""
    return edgedec.load(model, runtime="cpu", offline=True, draft="off", n_ctx=N_CTX, n_threads=args.threads)


def prompt_of(engine: edgedec.Engine, task: MadeTask) -> list[int]:
    """Return the prompt of a task as token ids."""
    return engine.chat_ids([{"role": "user", "content": task.prompt}])


@contextmanager
def texts_of(engine: edgedec.Engine, task: MadeTask, max_tokens: int) -> Iterator[PartialTexts]:
    """Yield the texts of a task's prompt, which is read; free them at the end."""
    prompt, session = prompt_of(engine, task), engine.session(N_CTX)
    try:
        pool = SessionPool([SessionSlot(session)])
        with branches_on(pool, Request(tuple(prompt), SamplingParams(), 0), CancelToken()) as branches:
            yield PartialTexts(
                branches,
                prompt,
                is_end=engine.tokenizer.is_end,
                decode=engine.tokenizer.decode,
                max_tokens=max_tokens,
                stop=STOPS.get(task.kind, ()),
            )
    finally:
        session.close()


def question(engine: edgedec.Engine) -> Question:
    """Return the judge's question, as a turn of the chat."""
    return question_of(engine.tokenizer, turn_after_answer(engine.requests.render), parse_special=True)


def figures(task: MadeTask, text: str) -> dict[str, Any]:
    """Return the answer of a text and whether it is right; for functions also the public tests that it passes."""
    if task.kind != "functions":
        return {"answer": given_answer(text), "right": is_right(task, text)}
    public = n_passed(text, task.public)
    right = public == len(task.public) and n_passed(text, task.hidden) == len(task.hidden)
    return {"answer": None, "right": right, "public": public / len(task.public)}


def open_tasks(args: Namespace, key: dict[str, Any]) -> Iterator[MadeTask]:
    """Yield the tasks whose lines are not in the file yet, until the seconds are over."""
    done = [line["task"] for line in lines_of(args.out) if all(line.get(name) == value for name, value in key.items())]
    ends = monotonic() + args.seconds
    for task in made_tasks(args.kind, args.tasks, args.seed):
        if task.id not in done:
            if monotonic() > ends:
                print(f"the time is over; {len(done)} of {args.tasks} tasks are in {args.out}")
                return
            yield task
            done.append(task.id)
    print(f"all {args.tasks} tasks are in {args.out}")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of runs; a line that was cut in the middle is left out."""
    found = list[dict[str, Any]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file of runs."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
