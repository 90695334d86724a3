"""Try changes of the code that must make a test fail; `tests/mutations.toml` lists them.

    python tests/mutations.py --only a_star
    python tests/mutations.py --lane quick

Each change is made in the memory of a process that runs the tests named beside it: the file's code is compiled from the
changed text when it is imported, so no file of the checkout is ever changed. First all of these tests run without a
change. The exit status is 1 where a change is not caught: its tests pass (survived), they take too long (timed out),
or they can't tell, as they never import the file or can't be collected (broken). With --lane quick only those of the
tests run that the quick lane runs, for the changes that the list says they catch.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from support.lanes import QUICK

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
SECONDS = 300  # for the tests of one change
_NEVER_IMPORTED = 99  # an exit status that pytest does not have


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of a file that must make a test fail.

    Attributes:
        file: The file, from the root of the checkout on.
        text: What is changed; it is in the file once.
        becomes: What stands there instead.
        tests: The tests of which at least one must fail, as pytest takes them; none for a change that has a reason.
        reason: Why the changed program does the same; empty for a change that must be caught.
        quick: Whether those of the tests catch it that the quick lane runs.
    """

    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    reason: str = ""
    quick: bool = True

    @property
    def name(self) -> str:
        """The file and the change, in one line."""
        return f"{self.file}: {self.text.strip()!r} -> {self.becomes.strip()!r}"

    def changed(self) -> str:
        """Return the file's text with the change (ValueError: the text that is changed is not there exactly once)."""
        whole = (ROOT / self.file).read_text(encoding="utf-8")
        if whole.count(self.text) != 1:
            raise ValueError(f"{self.file} has {self.text!r} {whole.count(self.text)} times; it must be there once")
        return whole.replace(self.text, self.becomes)


def mutations() -> list[Mutation]:
    """Return all changes of the list; one that names no tests of its own has those of its file."""
    found = list[Mutation]()
    for file in tomllib.loads(LIST.read_text(encoding="utf-8"))["files"]:
        for change in file["changes"]:
            reason = change.get("reason", "")
            tests = () if reason else tuple(change.get("tests", file["tests"]))
            is_quick = change.get("quick", True)
            found.append(Mutation(file["file"], change["text"], change["becomes"], tests, reason, is_quick))
    return found


def command(tests: Iterable[str], lane: str = "full") -> list[str]:
    """Return the arguments with which pytest runs those tests of a lane up to the first that fails."""
    marks = [] if lane == "full" else ["-m", QUICK]
    return [
        *marks,
        "--rootdir",
        str(ROOT),
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        *tests,
    ]


def run_changed(mutation: Mutation, lane: str) -> int:
    """Run a change's tests in this process, and return pytest's exit status."""
    import pytest

    path, source, imported = (ROOT / mutation.file).resolve(), mutation.changed(), list[str]()
    unchanged = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(loader.path).resolve() != path:
            return unchanged(loader, fullname)
        imported.append(fullname)
        code: CodeType = compile(source, loader.path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
    status = int(pytest.main(command(mutation.tests, lane)))
    return status if imported else _NEVER_IMPORTED


def outcome(mutation: Mutation, number: int, lane: str = "full") -> tuple[str, str]:
    """Return "caught", "survived", "timed out" or "broken" for the change of that number, and what its tests wrote."""
    status, said = _run([str(Path(__file__)), "--number", str(number), "--lane", lane], SECONDS)
    return {0: "survived", 1: "caught", 5: "no test", None: "timed out"}.get(status, "broken"), said


def _run(arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run Python, and return its exit status (None where it took longer than that) and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:  # for examples that hypothesis keeps
        environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                timeout=seconds,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, done.stdout


def main() -> int:
    """Try the changes, one after another or several at a time, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="changes whose file or texts hold this")
    parser.add_argument("--list", action="store_true", help="print the changes and do nothing")
    parser.add_argument("--processes", type=int, default=1, help="changes that are tried at the same time")
    parser.add_argument("--json-out", type=Path, help="where to write the report")
    parser.add_argument("--lane", choices=("full", "quick"), default="full", help="whose tests run")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)  # of a change to try in this process
    given = parser.parse_args()
    listed = mutations()
    if given.number is not None:
        return run_changed(listed[given.number], given.lane)
    chosen = [
        (i, each) for i, each in enumerate(listed) if given.only in each.name and (each.quick or given.lane == "full")
    ]
    if given.list:
        print("\n".join(f"{each.name}  {each.reason or ' '.join(each.tests)}" for _, each in chosen))
        return 0
    began, tried = time.monotonic(), [(i, each) for i, each in chosen if not each.reason]
    tests = dict.fromkeys(test for _, each in tried for test in each.tests)
    print(f"{len(tried)} changes to catch, {len(chosen) - len(tried)} that change nothing; first the tests without any")
    status, said = _run(["-m", "pytest", *command(tests, given.lane)], 10 * SECONDS)
    if status != 0:
        print(said)
        return 1
    counts, missed = Counter[str](), list[str]()
    with ThreadPoolExecutor(given.processes) as pool:
        for (_, each), (result, said) in zip(
            tried, pool.map(lambda one: outcome(one[1], one[0], given.lane), tried), strict=True
        ):
            counts[result] += 1
            print(f"{counts.total():4} of {len(tried)}  {result:9}  {each.name}", flush=True)
            if result != "caught":
                missed.append(f"{result}: {each.name}")
                print(said[-2000:])
    print(*missed, f"{dict(counts)} in {time.monotonic() - began:.0f} s", sep="\n")
    if given.json_out:
        from edgedec_apps.bench.provenance import report

        same = {each.name: each.reason for _, each in chosen if each.reason}
        counted = {"caught": 0, **counts, "seconds": round(time.monotonic() - began)}
        report({"benchmark": "mutations", **counted, "missed": missed, "same": same}, given.json_out)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
