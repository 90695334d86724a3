"""How the random fuzzers run: so many mutants or seconds, here or in a worker; and what is kept of findings."""

import argparse
import json
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from edgedec.errors import EdgedecError

HANG_S = 60.0
WORKER_S = 20
WORKER_BYTES = 2 * 2**30
LOADS_PER_WORKER = 400


class TooSlow(BaseException):
    """Raised by the alarm; no Exception, so that nothing in the code under test takes it for one of its own."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came out of a mutant.

    Attributes:
        outcome: "ok", the name of the error that refused it, or another word that is counted.
        seconds: The time it took.
        finding: What is wrong with that; empty where nothing is.
    """

    outcome: str
    seconds: float
    finding: str = ""


def arguments(doc: str | None, *flags: str) -> argparse.Namespace:
    """Return the command line of a fuzzer; `flags` are further switches, off but for those that are given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="mutants to try (default: 20000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    for flag in flags:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction)
    return parser.parse_args()


def fuzz(options: argparse.Namespace, mutant: Callable[[int], Path], attempt: Callable[[Path, int], Tried]) -> int:
    """Write and try mutants by their number, print one line of JSON, and return 1 where anything was found."""
    outcomes, findings = Counter[str](), list[dict[str, object]]()
    slowest_s, start, n_done = 0.0, time.perf_counter(), 0
    while n_done < options.count and time.perf_counter() - start < options.seconds:
        path = mutant(n_done)
        tried = attempt(path, n_done)
        n_done += 1
        outcomes[tried.outcome] += 1
        slowest_s = max(slowest_s, tried.seconds)
        if tried.finding:
            findings.append({"error": tried.finding, "seconds": tried.seconds, "file": keep(path, options.keep)})
            print(f"finding: {findings[-1]}", file=sys.stderr)
        if n_done % 500 == 0:
            print(f"{n_done} mutants, {dict(outcomes)}, {len(findings)} findings", file=sys.stderr)
    figures = {"count": n_done, "outcomes": outcomes, "seed": options.seed, "slowest_s": round(slowest_s, 3)}
    print(json.dumps(figures | {"findings": findings}))
    return 1 if findings else 0


def keep(path: Path, folder: Path) -> str:
    """Keep a mutant, a file or a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"finding-{len(list(folder.iterdir())):04}{path.suffix}"
    shutil.copytree(path, place) if path.is_dir() else shutil.copyfile(path, place)
    return str(place)


def here(work: Callable[[], str], limit_s: float) -> Tried:
    """Try a mutant in this process: `work` returns a word for what came out; `limit_s` is the most CPU seconds."""
    start, finding = time.process_time(), ""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _on_alarm)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        outcome = work()
    except EdgedecError as error:
        outcome = type(error).__name__
    except (Exception, TooSlow) as error:
        outcome, finding = "raised", repr(error)
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    return Tried(outcome, seconds, finding or ("too slow" if seconds > limit_s else ""))


def _on_alarm(*_: object) -> NoReturn:
    raise TooSlow


def let_grow(n_bytes: int) -> None:
    """Let the process grow by n_bytes at most, where the system can (Linux)."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource  # absent on Windows

        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def be_worker(load: Callable[[Path, int], None]) -> int:
    """Load the mutants that standard input names, and answer each with a line of JSON."""
    let_grow(WORKER_BYTES)
    for line in sys.stdin:
        number, _, name = line.rstrip("\n").partition(" ")
        outcome, words = "ok", ""
        try:
            load(Path(name), int(number))
        except EdgedecError as error:
            outcome, words = type(error).__name__, str(error)
            outcome = "raised" if "report" in words else outcome
        except BaseException as error:
            outcome, words = "raised", repr(error)
        print(json.dumps([outcome, words]), flush=True)
    return 0


class Worker:
    """A process, `script --worker`, that loads mutants; it is started anew where a mutant ends it."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by worker()
        self._n_left = 0

    def load(self, path: Path, number: int) -> tuple[Tried, str]:
        """Return what came out of a mutant, and what the worker said of it."""
        if self._n_left == 0:
            self.end()
        process, start = self._process or self._start(), time.perf_counter()
        self._n_left -= 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{number} {path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], WORKER_S)
        line, seconds = process.stdout.readline() if ready else "", time.perf_counter() - start
        if line:
            outcome, words = json.loads(line)
            return Tried(outcome, seconds, words if outcome == "raised" else ""), words
        how = f"no end after {WORKER_S} s" if not ready else f"exit code {process.wait()}"
        self.end()
        self._log.seek(0)
        words = f"{how}: {self._log.read()[-3000:].decode(errors='replace')}"
        return Tried("crashed", seconds, words), words

    def _start(self) -> subprocess.Popen[str]:
        self._log.truncate(0)
        command = [sys.executable, "-X", "faulthandler", "-W", "error", self._script, "--worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._n_left = LOADS_PER_WORKER
        return self._process

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._n_left = None, 0


@contextmanager
def worker(script: str) -> Iterator[Worker]:
    """Yield a worker, which ends with the block."""
    one = Worker(script)
    try:
        yield one
    finally:
        one.end()
        one._log.close()
