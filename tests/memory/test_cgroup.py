"""In a control group with a hard limit, where the system ends what needs more: nothing said, and the text is the same.

Needs the right to make a group below this process's own (root's, or a delegated folder).
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.processes.own_cgroup import own_cgroup

MB = 1_000_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]


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
