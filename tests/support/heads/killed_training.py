"""Train a drafter in a process of its own, and kill that process in a part of the training.

    whole = train(Training(model, tmp_path / "whole"))
    kill(Training(model, tmp_path / "head"), "learning", 0.5)

The process says what it does, a word a line: which part it is in, and each file that it is about to put in its place.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PARTS = ("collecting", "learning", "writing")

_SCRIPT = """
import sys
from pathlib import Path
from edgedec_export.training.lessons.prompt_files import read_prompts
from edgedec_export.training.train_drafter import TrainOptions, train_drafter

model, out, prompts = (Path(text) for text in sys.argv[1:4])
n_tokens, n_answer, n_passes, save_every_s = (float(text) for text in sys.argv[4:8])
kind, work = sys.argv[8], Path(sys.argv[9])
parts = {"answers": "collecting", "training": "learning"}

def on_progress(progress):
    part = "writing" if (progress.phase, progress.done) == ("training", progress.total) else parts.get(progress.phase)
    if part:
        print(part, flush=True)

def on_event(event, arguments):
    if event == "os.rename":
        print("file", flush=True)

sys.addaudithook(on_event)
own = read_prompts([prompts]) if prompts.name else ()
train_drafter(model, out, TrainOptions(
    kind=kind, work=work if work.name else None, prompts=own, n_tokens=int(n_tokens), n_answer=int(n_answer),
    n_passes=n_passes, n_vocabulary=64, n_threads=1, save_every_s=save_every_s, on_progress=on_progress))
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of a drafter with 64 tokens on one thread.

    Attributes:
        model: The target.
        out: The head's folder, or the draft model's file.
        prompts: A file of prompts; None where the target writes them all.
        n_tokens: Tokens of answers.
        n_answer: Most tokens of an answer.
        n_passes: How often the drafter learns from every answer.
        save_every_s: Seconds between two checkpoints.
        kind: What is trained: "head", "block" or "model".
        work: The folder of answers and checkpoints; None for the usual one.
    """

    model: Path
    out: Path
    prompts: Path | None = None
    n_tokens: int = 4200
    n_answer: int = 20
    n_passes: float = 3.0
    save_every_s: float = 0.02
    kind: str = "head"
    work: Path | None = None


def train(training: Training) -> dict[str, float]:
    """Train to the end, or go on where earlier runs stopped; return the seconds that each of PARTS took.

    Raises:
        AssertionError: The process failed.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    with _process(training) as (process, lines):
        part, since = "", time.monotonic()
        for word in lines:
            now = time.monotonic()
            seconds[part], since = seconds.get(part, 0.0) + now - since, now
            part = word if word in PARTS else part
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - since
        assert process.wait() == 0, "the training failed"
    return {part: seconds[part] for part in PARTS}


def kill(training: Training, part: str, after_s: float = 0.0, files: int = 0) -> str:
    """Begin the training, or go on with it, and kill it in a part of PARTS, or in a later one where that one is over.

    Args:
        training: The training.
        part: When to kill.
        after_s: So many seconds after the part began.
        files: After so many files that were put in their places in this part, or about to be.

    Returns:
        The part in which the process died; "" where it was over before.

    Raises:
        AssertionError: The process failed by itself.
    """
    with _process(training) as (process, lines):
        reached = ""
        for word in lines:
            reached = word if word in PARTS else reached
            if reached and PARTS.index(reached) >= PARTS.index(part):
                files -= word == "file"
                if files <= 0:
                    break
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        for word in lines:
            reached = word if word in PARTS else reached
        code = process.wait()
    assert code in (0, -signal.SIGKILL), f"the training failed with {code}"
    return reached if code else ""


@contextmanager
def _process(training: Training) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    numbers = (training.n_tokens, training.n_answer, training.n_passes, training.save_every_s)
    prompts = "" if training.prompts is None else str(training.prompts)
    words = (prompts, *map(str, numbers), training.kind, "" if training.work is None else str(training.work))
    command = [sys.executable, "-c", _SCRIPT, str(training.model), str(training.out), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process, process.stdout as output:
        try:
            yield process, _words(output)
        finally:
            process.kill()


def _words(output: IO[str]) -> Iterator[str]:
    """Yield the lines of a process, each stripped; a line that the end of the process cut short is left out."""
    yield from (line.strip() for line in output if line.endswith("\n"))
