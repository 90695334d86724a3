"""Damage GGUF headers at random: an answer or an EdgedecError must come out, quickly and in little memory.

    python benchmarks/fuzz/fuzz_gguf.py --count 20000 --seed 1 --keep findings/

The models to damage are the tests' tiny ones and, where it is installed, the header of SmolLM2 135M with its tokenizer
cut short. Each mutant is read, described, checked for a text decoder, its arrays decoded and its tensors read. A
finding is any other exception, more than 1 s, or more memory than LIMIT_BYTES above the start. Findings are kept as
files.

With --load (the default where llama_cpp imports and processes fork) two mutants in three contradict themselves in a
sound header, and each mutant that passes the checks is planned or loaded by llama.cpp in a child process, which opens
a session, evaluates three tokens and takes the vocabulary there and back. A child that dies, hangs or raises anything
but EdgedecError is a finding, too.
"""

import argparse
import importlib.util
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source, header_sources, loadable_sources
from fuzz_mutants import contradictory, damaged
from support.models.gguf_writer import Built, build_gguf

from edgedec.errors import EdgedecError
from edgedec.gguf.file import GGUFArray, read_gguf
from edgedec.gguf.model_info import describe
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.load_options import LoadOptions
from edgedec_runtimes.shared.consistency import require_consistent

LIMIT_S = 1.0
LIMIT_BYTES = 128 * 2**20
LOAD_LIMIT_S = 20
LOAD_LIMIT_BYTES = 2 * 2**30
_REFUSED, _RAISED = 3, 4
_TEXT = "Hi <s>hello<|im_end|> w\u00f6rld 123\n\t \u20ac\U0001f642 don't\x00 <0x0A>"


@dataclass(frozen=True, slots=True)
class Finding:
    """One mutant that was not handled, kept under `file`."""

    error: str
    seconds: float
    file: str


class TooSlow(BaseException):
    """Raised by the alarm; no Exception, so that nothing in the code under test takes it for one of its own."""


class Crashed(Exception):
    """A child that died or hung; the message holds how, and the last line it wrote."""


class LoadRefusedError(EdgedecError):
    """A child that refused a mutant which had passed the checks; the message is its own."""


@dataclass(frozen=True, slots=True)
class Models:
    """The sound models, with the bytes they are written as."""

    headers: list[tuple[Source, Built]]
    loadable: list[tuple[Source, Built]]

    def mutant(self, rng: random.Random) -> bytes:
        """Return a damaged file."""
        if not self.loadable or rng.random() < 0.2:
            return damaged(*rng.choice(self.headers), rng)
        source, built = rng.choice(self.loadable)
        return contradictory(source, rng) if rng.random() < 0.85 else damaged(source, built, rng)


def models(loads: bool) -> Models:
    """Return the models to damage."""
    headers = [(source, build_gguf(source.metadata, source.tensors)) for source in header_sources()]
    sound = loadable_sources() if loads else []
    return Models(headers, [(source, build_gguf(source.metadata, source.tensors)) for source in sound])


def exercise(path: Path) -> None:
    """Do all that a user's first command does with a file before a runtime gets it."""
    gguf = read_gguf(path)
    for value in gguf.metadata.values():
        if isinstance(value, GGUFArray):
            value.tolist()
    for name in gguf.tensors:
        gguf.read_tensor_bytes(name)
    describe(gguf)
    require_text_decoder(gguf)
    require_consistent(gguf)


def load(path: Path, *, plan: bool) -> None:
    """Load a mutant as the llamacpp runtime does, and evaluate a little; in a child process."""
    from edgedec_runtimes.llamacpp.runtime import LlamaCpp

    options = LoadOptions(n_ctx=64, max_rows=2, n_threads=1)
    if plan:
        LlamaCpp().plan(path, options)
    with LlamaCpp().load(path, options) as model:
        tokenizer = model.tokenizer
        for parse_special in (False, True):
            ids = tokenizer.encode(_TEXT, add_special=True, parse_special=parse_special)
            tokenizer.decode(ids)
        n_vocab = model.card.n_vocab
        tokenizer.decode([*range(min(n_vocab, 300)), n_vocab - 1])
        tokenizer.is_end(0), tokenizer.bos_token, tokenizer.eos_token
        session = model.session(64)
        session.forward(np.array([0, n_vocab // 2, n_vocab - 1], np.int32), n_past=0, rows="last")
        session.forward(np.array([n_vocab // 3], np.int32), n_past=3)


def load_in_child(path: Path, *, plan: bool) -> None:
    """Load a mutant in a child process.

    Raises:
        LoadRefusedError: It was refused there.
        Crashed: It died, hung, or raised anything else.
    """
    with tempfile.TemporaryFile() as log:
        alive, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _be_child(path, log.fileno(), plan=plan)
        os.close(end)
        # The child holds the other end; it can be read once the child is gone.
        ended, _, _ = select.select([alive], [], [], LOAD_LIMIT_S)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(alive)
        log.seek(0)
        said = log.read()[-2000:].decode(errors="replace").strip()
    if not ended:
        raise Crashed(f"no end after {LOAD_LIMIT_S} s; {said}")
    if code == _REFUSED:
        raise LoadRefusedError(said)
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise Crashed(f"{how}: {said}")


def _be_child(path: Path, log: int, *, plan: bool) -> NoReturn:
    """Load, write what came out to `log`, and end with a code for it."""
    code = 0
    try:
        import resource  # absent on Windows, which does not get here

        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (LOAD_LIMIT_S, LOAD_LIMIT_S + 1))
        _let_grow(LOAD_LIMIT_BYTES)
        load(path, plan=plan)
    except EdgedecError as error:
        os.write(log, f"{type(error).__name__}: {error}".encode(errors="replace"))
        code = _REFUSED
    except BaseException as error:
        os.write(log, repr(error).encode(errors="replace"))
        code = _RAISED
    os._exit(code)


def run(count: int, seconds: float, seed: int, keep: Path, *, loads: bool) -> dict[str, object]:
    """Try up to `count` mutants for up to `seconds`, and return the result for the last line."""
    rng = random.Random(seed)
    sound = models(loads)
    refused: Counter[str] = Counter()
    findings: list[Finding] = []
    n_done = n_ok = n_loads = 0
    slowest_s = slowest_load_s = 0.0
    start = last_report = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mutant.gguf"
        while n_done < count and time.perf_counter() - start < seconds:
            data = sound.mutant(rng)
            path.write_bytes(data)
            outcome, spent_s = attempt(path)
            n_done += 1
            slowest_s = max(slowest_s, spent_s)
            is_finding = spent_s > LIMIT_S
            if outcome is None and loads:
                outcome, spent_s = attempt_load(path, plan=rng.random() < 0.25)
                n_loads += 1
                slowest_load_s = max(slowest_load_s, spent_s)
            if isinstance(outcome, EdgedecError):
                refused[type(outcome).__name__] += 1
            elif outcome is None:
                n_ok += 1
            if is_finding or not (outcome is None or isinstance(outcome, EdgedecError)):
                findings.append(save(data, repr(outcome), spent_s, keep))
            if time.perf_counter() - last_report > 5:
                last_report = time.perf_counter()
                print(f"{n_done}/{count}, {n_loads} loads, {len(findings)} findings", file=sys.stderr)
    return {
        "count": n_done,
        "ok": n_ok,
        "loads": n_loads,
        "refused": dict(refused),
        "findings": [{"error": f.error, "seconds": f.seconds, "file": f.file} for f in findings],
        "seed": seed,
        "slowest_s": round(slowest_s, 4),
        "slowest_load_s": round(slowest_load_s, 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def attempt(path: Path) -> tuple[BaseException | None, float]:
    """Return what came out of one mutant (None for success) and the time it took."""
    start = time.perf_counter()
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 10 * LIMIT_S)
    outcome: BaseException | None = None
    try:
        exercise(path)
    except (Exception, TooSlow) as error:
        outcome = error
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    return outcome, time.perf_counter() - start


def attempt_load(path: Path, *, plan: bool) -> tuple[Exception | None, float]:
    """Return what came out of loading a mutant (None for success) and the time it took."""
    start = time.perf_counter()
    outcome: Exception | None = None
    try:
        load_in_child(path, plan=plan)
    except (Crashed, LoadRefusedError) as error:
        outcome = error
    return outcome, time.perf_counter() - start


def save(data: bytes, error: str, seconds: float, keep: Path) -> Finding:
    """Keep a mutant as a file."""
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"finding-{len(list(keep.iterdir())):04}.gguf"
    path.write_bytes(data)
    print(f"finding: {error} after {seconds:.2f} s, kept as {path}", file=sys.stderr)
    return Finding(error, round(seconds, 3), str(path))


def _let_grow(n_bytes: int) -> None:
    """Let the process grow by n_bytes at most, where the system can (Linux)."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource  # absent on Windows

        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def prepare_loads() -> None:
    """Load llama.cpp once, for the children to start with; without its backtraces, which start a debugger."""
    from edgedec_runtimes.llamacpp.library import llama  # optional here

    os.environ["GGML_NO_BACKTRACE"] = "1"
    llama()


def main() -> int:
    """Parse the command line, run, print one line of JSON; 1 where anything was found."""
    can_load = hasattr(os, "fork") and importlib.util.find_spec("llama_cpp") is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="mutants to try (default: 20000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    load_help = "load mutants with llama.cpp (default: where that is possible)"
    parser.add_argument("--load", action=argparse.BooleanOptionalAction, default=can_load, help=load_help)
    options = parser.parse_args()

    def on_alarm(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlow

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, on_alarm)
    if options.load:
        prepare_loads()
    _let_grow(LIMIT_BYTES)
    result = run(options.count, options.seconds, options.seed, options.keep, loads=options.load)
    print(json.dumps(result))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
