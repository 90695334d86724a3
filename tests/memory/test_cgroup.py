"""In a control group with a hard limit, where the system ends what needs more: nothing said, and the text is the same.

Needs the right to make a group below this process's own (root's, or a delegated folder). Both versions of control
groups work (the kernel's Documentation: admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
"""

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

MB = 1_000_000
_ROOT = Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")
_V2 = ("memory.max", "memory.events")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]


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


def document(folder: Path, n_mb: int, model: Path) -> dict[str, Any]:
    """Generate 12 tokens behind 100 in a group of so many MB."""
    out = folder / f"{n_mb}.json"
    options = ("--raw", "--method=ignore-end", "-n12", "-t0", "-c", "512", "--quiet", "--runtime", "cpu", "--offline")
    done = in_group(n_mb * MB, "run", model, "river " * 100, *options, "--json-out", out)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_a_groups_limit_is_kept_without_being_told(smollm_path: Path, tmp_path: Path) -> None:
    """What doesn't fit is given up before loading; where all fits, nothing is. The text is one text."""
    small, ample = (document(tmp_path, n_mb, smollm_path) for n_mb in (120, 900))
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
