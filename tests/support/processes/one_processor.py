"""What other processes do in tests of threads; a process that is spawned imports this module, not the test's."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from support.models.tiny_runs import Bits, Tokens, extend

_SPAWN = multiprocessing.get_context("spawn")


def logits_on_one_processor(path: Path, tokens: Tokens, n_threads: int, cpu: int) -> Bits:
    """Return the logits of chunks and single steps, from a process whose threads share one logical processor."""
    with ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
        return pool.submit(_logits, path, tokens, n_threads, cpu).result()


@contextmanager
def busy(cpu: int) -> Iterator[None]:
    """Have another process busy on a logical processor."""
    ready, told = _SPAWN.Pipe(duplex=False)
    neighbour = _SPAWN.Process(target=_count, args=(cpu, told), daemon=True)
    neighbour.start()
    told.close()
    try:
        ready.recv()  # raises EOFError where the process has ended
        yield
    finally:
        ready.close()
        neighbour.terminate()
        neighbour.join()


def _logits(path: Path, tokens: Tokens, n_threads: int, cpu: int) -> Bits:
    os.sched_setaffinity(0, {cpu})
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=n_threads)) as model:
        return extend(model.session(64), np.asarray(tokens), (25, *[1] * 11, 4))


def _count(cpu: int, ready: Connection) -> None:
    os.sched_setaffinity(0, {cpu})
    ready.send(True)
    while True:
        pass
