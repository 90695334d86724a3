"""Whole processes on a real model: a cap is kept, a long prompt is refused within it, and what a plan says is held."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from support.processes.command_line import Result, run_process

_ROOT = Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")
_V2 = ("memory.max", "memory.events")


@dataclass(frozen=True)
class Group:
    """One group's folder and the names its files have."""

    folder: Path
    limit: str
    events: str

    def command(self, command: list[str]) -> list[str]:
        """Return the command that joins the group and then becomes `command`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def n_killed(self) -> int:
        """Return how many processes the system ended for want of memory."""
        lines = (self.folder / self.events).read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def own_cgroup(limit_bytes: int) -> Iterator[Group]:
    """Make a group below this process's own, limited to so many bytes; remove it afterwards.

    Raises OSError where no such group can be made.
    """
    parent, names = _parent()
    group = Group(Path(mkdtemp(prefix="edgedec-", dir=parent)), *names)
    try:
        (group.folder / group.limit).write_text(str(limit_bytes), encoding="utf-8")
        yield group
    finally:
        group.folder.rmdir()


def _parent() -> tuple[Path, tuple[str, str]]:
    """Return the folder of this process's memory group and the names of its version's files."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    if "memory" in own:
        return _ROOT / "memory" / own["memory"], _V1
    return _ROOT / own[""], _V2


MB = 1_000_000
REFUSED, CAP_MB = 50, 260
CPU = ("--runtime", "cpu")
# Runs a command and tells the most that the process has held; a child's own count would have its parent's in it.
_RUN = """
import re, sys
from pathlib import Path
from edgedec_apps.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code, re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]


def run(model: Path, cap: int, out: Path, cache: Path | str) -> Result:
    """Read 128 tokens and generate 24 in a context of 512, on the cpu runtime."""
    return run_process(
        *("run", model, "river " * 128, "--raw", "--method", "ignore-end", "-n", "24", "-t", "0", "-c", "512"),
        *("--quiet", "--runtime", "cpu", "--memory", str(cap), "--json-out", out),
        env={"EDGEDEC_CACHE": str(cache)},
    )


@pytest.mark.parametrize(
    ("n_mb", "given_up"),
    [
        (130, {"weights read from storage as needed"}),
        (188, {"common text left out"}),  # the middle of the caps that give up just this
        (260, set()),
    ],
)
def test_a_process_keeps_to_its_cap(smollm_path: Path, tmp_path: Path, n_mb: int, given_up: set[str]) -> None:
    """The first run makes the tiles, the second maps or streams them: neither is over, the text is one text."""
    texts = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        result = run(smollm_path, n_mb * MB, out, tmp_path / "cache")
        assert result.code == 0, result
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        held = document["memory"]
        assert held["peak_bytes"] <= n_mb * MB
        assert held["total_bytes"] <= n_mb * MB
        assert given_up <= set(held["given_up"])
        texts.append(document["token_ids"])
    assert (texts[0], len(texts[0])) == (texts[1], 24)


def test_less_than_the_least_is_refused_before_loading(smollm_path: Path, tmp_path: Path) -> None:
    """60 MB are not enough for anything: exit code 50 and the table, no tiles made."""
    result = run(smollm_path, 60 * MB, tmp_path / "out.json", tmp_path / "cache")
    assert result.code == REFUSED
    assert "over by" in result.err
    assert "interpreter and libraries" in result.err
    assert not list((tmp_path / "cache").rglob("*.tiles*"))


def test_without_a_disk_for_tiles_they_count_as_private(smollm_path: Path, tmp_path: Path) -> None:
    """Nothing can be streamed where the cache can't be written: a cap below the weights is refused, one above kept."""
    blocked = tmp_path / "file"
    blocked.write_text("no directory", encoding="utf-8")
    assert run(smollm_path, 130 * MB, tmp_path / "out.json", blocked).code == REFUSED
    out = tmp_path / "out.json"
    assert run(smollm_path, 230 * MB, out, blocked).code == 0
    assert json.loads(out.read_text(encoding="utf-8"))["memory"]["peak_bytes"] <= 230 * MB


@pytest.mark.parametrize(
    ("runtime", "text", "code", "words"),
    [
        ("cpu", "a b c d " * 500_000, "41", "the prompt takes about "),
        ("llamacpp", "中" * 1_300_000, "41", "the prompt takes about "),
        (
            "cpu",
            "中" * 21_000_000,
            "40",
            "holds more than 4062500 bytes; give a shorter text, or allow more memory (--memory)",
        ),
    ],
    ids=["many words", "one word", "a file larger than what is read"],
)
def test_a_long_file_is_refused_within_the_cap(
    smollm_path: Path, tmp_path: Path, runtime: str, text: str, code: str, words: str
) -> None:
    """`run --memory 260MB -f FILE` with 4 or 63 MB of text holds less than its cap, and says how long the text is."""
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    options = ("-c", "1024", "--memory", f"{CAP_MB}MB", "--runtime", runtime, "-q")
    child = subprocess.run(
        [sys.executable, "-c", _RUN, "run", smollm_path, "-f", file, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    ended, peak_kb = child.stdout.split()
    assert (ended, words in child.stderr) == (code, True), child.stderr
    assert int(peak_kb) * 1024 < CAP_MB * MB


@pytest.fixture(scope="module")
def settings(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of its own that has the tiles and measurements, as for every run but a model's first."""
    made = {"EDGEDEC_CACHE": str(tmp_path_factory.mktemp("held"))}
    document(made, "run", smollm_path, "A", *CPU, "--raw", "--method=ignore-end", "-n", "8", "-q")
    return made


def document(settings: dict[str, str], *args: Any) -> dict[str, Any]:
    """Return what a command in a process of its own prints with --json."""
    result = run_process(*args, "--json", env=settings)
    assert result.code == 0, result
    found: dict[str, Any] = json.loads(result.out)
    return found


def is_near(held: int, planned: int) -> bool:
    """Return whether it is within what docs/memory.md promises."""
    return abs(held - planned) <= max(16_000_000, planned * 0.05)


@pytest.mark.parametrize(
    ("n_context", "prompt", "n_tokens", "part"),
    [(4096, "Why is the sky blue?", 24, "start_bytes"), (512, "river " * 400, 100, "total_bytes")],
    ids=["a short text", "a full context"],
)
def test_the_plan_of_a_run_is_what_it_holds(
    smollm_path: Path, settings: dict[str, str], n_context: int, prompt: str, n_tokens: int, part: str
) -> None:
    """Without a cap: `plan` tells what is held with a short text, and where the context is full."""
    options = ("-c", str(n_context), *CPU)
    planned = document(settings, "plan", smollm_path, *options)
    run = ("run", smollm_path, prompt, *options, "--raw", "--method=ignore-end", "-t", "0", "-n", str(n_tokens), "-q")
    held = document(settings, *run)["memory"]["peak_bytes"]
    unfilled = ("draft stores", "prompt cache")  # by one text: its blocks go to the disk one by one
    spare = sum(term["n_bytes"] for term in planned["terms"] if term["name"] in unfilled)
    expected = planned[part] - (spare if part == "total_bytes" else 0)
    assert is_near(held, expected), (held, expected)


def in_group(n_bytes: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a group of that limit; nothing may be killed there."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(own_cgroup(n_bytes))
        except OSError as error:
            pytest.skip(f"no control group can be made: {error}")
        command = group.command([sys.executable, "-m", "edgedec_apps.cli", *map(str, arguments)])
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert group.n_killed() == 0
        return done


def grouped(folder: Path, n_mb: int, model: Path) -> dict[str, Any]:
    """Generate 12 tokens behind 100 in a group of so many MB."""
    out = folder / f"{n_mb}.json"
    options = ("--raw", "--method=ignore-end", "-n12", "-t0", "-c", "512", "--quiet", "--runtime", "cpu", "--offline")
    done = in_group(n_mb * MB, "run", model, "river " * 100, *options, "--json-out", out)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_a_groups_limit_is_kept_without_being_told(smollm_path: Path, tmp_path: Path) -> None:
    """What doesn't fit is given up before loading; where all fits, nothing is. The text is one text."""
    small, ample = (grouped(tmp_path, n_mb, smollm_path) for n_mb in (120, 900))
    assert small["memory"]["given_up"]
    assert not ample["memory"].get("given_up")
    assert small["token_ids"] == ample["token_ids"]


@pytest.mark.parametrize(("runtime", "n_mb"), [("cpu", 62), ("llamacpp", 66)])
def test_a_group_too_small_is_refused(smollm_path: Path, runtime: str, n_mb: int) -> None:
    """With the table, not by the system; llama.cpp is not asked for a plan where that alone takes too much."""
    options = ("--offline", "--runtime", runtime)
    done = in_group(n_mb * MB, "run", smollm_path, "A river", "--quiet", *options)
    assert done.returncode == 50, done.stderr
    assert "over by" in done.stderr
    plan = in_group(n_mb * MB, "plan", smollm_path, *options, "--memory", f"{n_mb}MB")
    assert plan.returncode == 50, plan.stderr
    assert "over by" in plan.stdout


def test_a_cap_that_the_group_does_not_have_is_refused_on_llamacpp(smollm_path: Path) -> None:
    """Nothing is killed to find out what is needed; without a cap, the plan says that it is a part, and is refused."""
    options = ("--offline", "--runtime", "llamacpp")
    done = in_group(66 * MB, "run", smollm_path, "A river", "--quiet", *options, "--memory", "400MB")
    assert done.returncode == 50, done.stderr
    assert "more than" in done.stderr
    plan = in_group(66 * MB, "plan", smollm_path, *options)
    assert plan.returncode == 50, plan.stderr
    assert "and more" in plan.stdout
    assert "takes more memory than is free" in plan.stdout
