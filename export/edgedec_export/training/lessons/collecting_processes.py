"""Answers written by several processes, each of which takes its share of the files of lessons.

One process draws tokens and copies hidden states on one core while the other cores wait, so that a machine with many
cores writes more answers with several processes of a few threads each. A file's contents depend on its number alone, so
the processes write what a single one would write.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec.api.load import load
from edgedec.errors import EdgedecError, RequestError, argument
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.storage.whole_file import remove_temporaries
from edgedec_export.training.lessons.collecting import Collecting, collect
from edgedec_export.training.lessons.lesson_files import first_files, lesson_files
from edgedec_runtimes.child.process import child_environment
from edgedec_runtimes.shared.cpu_count import usable_cores

_LOOK_EVERY_S = 0.2
_MODULE = "edgedec_export.training.lessons.collecting_processes"


@dataclass(frozen=True, slots=True)
class AnswerModel:
    """The model that writes answers.

    Attributes:
        path: The GGUF.
        n_ctx: Tokens of a prompt with its answer.
        n_threads: Threads of all processes together; None for as many as there are cores that this process may use.
        cache_dir: The cache's root; None for this installation's default.
    """

    path: Path
    n_ctx: int
    n_threads: int | None = None
    cache_dir: Path | None = None


def collect_alone(
    target: AnswerModel, job: Collecting, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> None:
    """Collect in this process; raises what load() and collect() raise."""
    keywords: dict[str, Any] = {"on_progress": on_progress, "cancel": cancel, "offline": True}
    with load(
        target.path,
        runtime="cpu",
        draft="off",
        n_ctx=target.n_ctx,
        n_threads=target.n_threads,
        cache_dir=target.cache_dir,
        **keywords,
    ) as engine:
        collect(engine, job, on_progress, cancel)


def collect_together(
    target: AnswerModel,
    job: Collecting,
    n_processes: int,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> None:
    """Collect in several processes until the folder holds the tokens that are wanted.

    Raises:
        RequestError: A process failed; the message holds its last words.
        CancelledError: `cancel` was cancelled. The files that are complete stay.
    """
    each = replace(target, n_threads=max(1, (target.n_threads or usable_cores()) // n_processes))
    jobs = [replace(job, share=(i, n_processes)) for i in range(n_processes)]
    with _processes(each, jobs) as processes:
        while not first_files(job.folder, job.n_tokens):
            check_cancelled(cancel, "writing answers")
            _check_running(processes)
            report_progress(on_progress, "answers", _n_tokens(job), job.n_tokens, "tokens")
            time.sleep(_LOOK_EVERY_S)
    report_progress(on_progress, "answers", job.n_tokens, job.n_tokens, "tokens")


def _n_tokens(job: Collecting) -> int:
    """Return the tokens of the files that are complete, less than are wanted."""
    return min(sum(file.n_tokens for file in lesson_files(job.folder).values()), job.n_tokens - 1)


@contextmanager
def _processes(target: AnswerModel, jobs: Sequence[Collecting]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each job, and end all of them when the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()
            )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((target, job)))  # by a parent for its own child, never from a file
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
        remove_temporaries(jobs[0].folder)


def _check_running(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise RequestError where a process failed."""
    for process in processes:
        if process.poll():
            assert process.stderr is not None
            words = process.stderr.read().decode(errors="replace").strip()
            last = words.splitlines()[-1] if words else f"it ended with {process.returncode}"
            raise RequestError(f"a process that writes answers stopped: {last}; try fewer ({argument('n_processes')})")


def _end_with_parent() -> None:
    """End this process when the parent's end of the standard input closes, which a killed parent does, too."""
    os.read(sys.stdin.fileno(), 1)  # not by way of sys.stdin, whose lock would be held when the process ends
    os._exit(1)


def main() -> None:
    """Collect the share that the parent process sends to the standard input."""
    target, job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        collect_alone(target, job)
    except EdgedecError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
