"""The lanes of tests: which tests a run of pytest takes, in which order, and what each test takes of the processor.

`pytest` alone is the quick lane: what is not slow, and the guards, which are the tests that `tests/promises.toml`
names, but for those on llama.cpp. `pytest -m "not long"` is the full lane, and `pytest -m long` the long one. A run
that names files or folders takes all of their tests but the long ones.
"""

import json
import os
import random
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = "guard or not slow"
FULL = "not long"
PROMISES = ROOT / "tests" / "promises.toml"
DURATIONS = ROOT / "tests" / "durations.json"
UNRECORDED_SECONDS = 2
COLLECTED = pytest.StashKey[list[str]]()
"""The ids of the tests of the quick lane, in a run of the whole lane."""

SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


@cache
def promises() -> dict[str, tuple[str, ...]]:
    """Return the promises, each with the tests that hold it."""
    listed = tomllib.loads(PROMISES.read_text(encoding="utf-8"))["promises"]
    return {each["promise"]: tuple(each["tests"]) for each in listed}


@cache
def _forms() -> dict[str, tuple[re.Pattern[str], ...]]:
    """Return by file the ids of the tests that the promises name: of files, of functions, or of single tests."""
    forms: dict[str, list[re.Pattern[str]]] = {}
    for test in (test for tests in promises().values() for test in tests):
        end = "" if test.endswith("]") else r"\[.*" if "::" in test else "::.*"
        form = ".*".join(map(re.escape, test.split("*")))
        pattern = re.compile(f"{form}(?:{end})?" if end else form, re.DOTALL)
        forms.setdefault(test.partition("::")[0], []).append(pattern)
    return {file: tuple(each) for file, each in forms.items()}


@cache
def _named() -> frozenset[str]:
    return frozenset(test for tests in promises().values() for test in tests)


def unmatched(node_ids: Iterable[str]) -> list[str]:
    """Return the tests that the promises name, and that are not among these ids."""
    files: dict[str, list[str]] = {}
    for each in node_ids:
        files.setdefault(each.partition("::")[0], []).append(each)
    forms = [(form, files.get(file, [])) for file, forms in _forms().items() for form in forms]
    return [form.pattern for form, ids in forms if not any(map(form.fullmatch, ids))]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the order and of the durations."""
    group = parser.getgroup("lanes")
    group.addoption("--shuffle", type=int, metavar="SEED", help="files in another order, and the tests of each")
    group.addoption("--durations-out", type=Path, metavar="FILE", help="write what each test took, in CPU seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose the lane where no -m is given; and two processes for `pytest` alone, where pytest-xdist is there.

    A process of pytest-xdist is told the files and the -m of the command line, so it chooses its lane in the same way.
    """
    option = config.option
    if option.markexpr:
        return
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        option.markexpr = FULL
        return
    option.markexpr = QUICK
    is_for_one = option.usepdb or option.collectonly or option.durations_out is not None
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # or a run of pytest that a test begins
    has_workers = config.pluginmanager.has_plugin("xdist") and option.numprocesses is None and option.dist == "no"
    if has_workers and not (is_for_one or is_worker):
        option.numprocesses, option.dist = min(2, os.cpu_count() or 1), "loadfile"


def is_quick_lane(config: pytest.Config) -> bool:
    """Return whether a run is the whole quick lane."""
    return config.option.markexpr == QUICK and [Path(arg).resolve() for arg in config.args] == [ROOT / "tests"]


def _leaves_slow_out(config: pytest.Config) -> bool:
    """Return whether no slow tests but guards are asked for; a test that is named must be there to be deselected."""
    marks = config.option.markexpr
    return ("guard" in marks or marks == "not slow") and not any("::" in argument for argument in config.args)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that is slow as a whole and has no guards, where no other slow tests are asked for."""
    if not _leaves_slow_out(config) or collection_path.suffix != ".py":
        return None
    marks = config.option.markexpr
    if "guard" in marks and collection_path.relative_to(ROOT).as_posix() in _forms():
        return None
    return True if SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no tests of a function that is slow and no guard, where no other slow tests are asked for."""
    if not _leaves_slow_out(collector.config):
        return None
    marks = collector.config.option.markexpr
    whole = getattr(collector.obj, "pytestmark", [])
    own = getattr(obj, "pytestmark", ()) if callable(obj) else ()  # a module of tests may be imported by another
    marked = [*(whole if isinstance(whole, list) else [whole]), *own]
    if not name.startswith("test_") or not any(mark.name == "slow" for mark in marked):
        return None
    file, _, _ = collector.nodeid.partition("::")
    is_named = any(test == file or f"{test}[".startswith(f"{file}::{name}[") for test in _named())
    return None if is_named and "guard" in marks else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests on llama.cpp and long ones as slow, and the guards; and put the tests in the order asked for."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_on_llamacpp = any(isinstance(value, str) and value == "llamacpp" for value in parameters)
        if is_on_llamacpp:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        forms = _forms().get(item.nodeid.partition("::")[0], ())
        if not is_on_llamacpp and any(form.fullmatch(item.nodeid) for form in forms):  # a promise names the test
            item.add_marker(pytest.mark.guard)
    if is_quick_lane(config):
        config.stash[COLLECTED] = [
            item.nodeid for item in items if item.get_closest_marker("guard") or not item.get_closest_marker("slow")
        ]
    if config.option.shuffle is not None:
        items[:] = shuffled(items, config.option.shuffle)


def shuffled(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return tests with their files in an order drawn by the seed, and the tests of each file, too.

    The tests of a file stay together, as they share engines and processes.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    drawn, order = random.Random(seed), list(files.values())
    drawn.shuffle(order)
    for tests in order:
        drawn.shuffle(tests)
    return [item for tests in order for item in tests]


# Durations: the CPU seconds of this process and of those it waited for, from one phase of a test to the next.


class _Durations:
    """What the tests of a run took, by file and function."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0.0
        self.files: dict[str, dict[str, list[float]]] = {}

    def lap(self) -> float:
        """Return the CPU seconds since the last call, since the beginning of the process at first."""
        before, self.last = self.last, sum(os.times()[:4])
        return self.last - before

    def pytest_collection_finish(self) -> None:
        """Say what the imports took."""
        self.files["collection"] = {"": [1, 1, self.lap()]}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that is skipped as a whole, for want of a package."""
        if report.skipped:
            self.files[report.nodeid] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test to its function: the tests begun, those that passed, and the seconds."""
        file = report.nodeid.partition("::")[0]
        counts = self.files.setdefault(file, {}).setdefault(_function(report.nodeid), [0, 0, 0.0])
        counts[0] += report.when == "setup"
        counts[1] += report.when == "call" and report.passed
        counts[2] += self.lap()

    def pytest_sessionfinish(self) -> None:
        """Write the file, with the commit that the tests are of."""
        say = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(say, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        rows = [
            f"{json.dumps(file)}: {json.dumps({name: [*ns, round(s, 2)] for name, (*ns, s) in sorted(tests.items())})}"
            for file, tests in sorted(self.files.items())
        ]
        total = sum(s for tests in self.files.values() for *_, s in tests.values())
        head = f'"commit": {json.dumps(commit)},\n"seconds": {total:.1f},\n'
        self.path.write_text("{\n" + head + '"files": {\n' + ",\n".join(rows) + "\n}\n}\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record the durations where that is asked for."""
    if config.option.durations_out is not None:
        config.pluginmanager.register(_Durations(config.option.durations_out.absolute()))


@cache
def recorded() -> dict[str, Any]:
    """Return the durations that are committed."""
    record: dict[str, Any] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return record


def seconds(node_ids: Iterable[str]) -> float:
    """Return the CPU seconds of these tests and of the imports by the record; an unrecorded test counts 2.

    A file that is recorded as skipped, for want of a package, is not of the lane.
    """
    files: dict[str, dict[str, list[float]]] = recorded()["files"]
    total = files["collection"][""][-1]
    for (file, name), n in Counter((each.partition("::")[0], _function(each)) for each in node_ids).items():
        n_recorded, _, recorded_seconds = files.get(file, {}).get(name, (0, 0, 0.0))
        if files.get(file) != {}:
            total += recorded_seconds + UNRECORDED_SECONDS * max(0, n - n_recorded)
    return total


def _function(node_id: str) -> str:
    return node_id.partition("::")[2].partition("[")[0]
