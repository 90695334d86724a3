"""optimum's environment is made once, completely or not at all, and programs that run in it can be ended."""

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from support.processes.command_line import run_here

from edgedec.errors import CancelledError, OfflineError, RuntimeUnavailableError, StorageError
from edgedec.progress import CancelToken, Progress
from edgedec_export.optimum import environment as optimum_environment
from edgedec_export.optimum.child_process import last_line, run_child
from edgedec_export.optimum.environment import (
    ensure_environment,
    environment_folder,
    environments_folder,
    is_ready,
    list_environments,
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which pip looks for packages; it holds the two tiny packages to install."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for variable, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{variable}", value)
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))  # would put them where nobody looks
    monkeypatch.setattr(optimum_environment, "TORCH", "tinytorch==1.0")
    monkeypatch.setattr(optimum_environment, "PACKAGES", ("tinyoptimum==2.0",))
    monkeypatch.setattr(optimum_environment, "NEEDED_BYTES", 1)
    write_wheel(folder, "tinytorch", "1.0")
    write_wheel(folder, "tinyoptimum", "2.0")
    return folder


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a package with one module, which knows its version."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in (files | {f"{about}/RECORD": record}).items():
            wheel.writestr(path, content)


@pytest.mark.slow
def test_it_is_made_once_and_listed(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has the packages; nothing is fetched twice; `edgedec cache` lists and deletes it."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("EDGEDEC_CACHE", str(cache))
    folder, seen, log = environment_folder(cache), list[Progress](), tmp_path / "log"
    with pytest.raises(OfflineError, match="the network may not be used"):
        ensure_environment(folder, offline=True)
    python = ensure_environment(folder, on_progress=seen.append)
    assert [(progress.done, progress.total) for progress in seen] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    code = "import tinytorch, tinyoptimum; print(tinytorch.version, tinyoptimum.version)"
    assert run_child([python, "-I", "-c", code], log, what="") == 0
    assert last_line(log) == "1.0 2.0"
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert ensure_environment(folder, offline=True) == python
    assert len(seen) == 4
    (entry,) = list_environments(cache)
    assert (entry.path, entry.is_current) == (folder, True)
    assert entry.n_bytes > 10**6
    document = {"path": str(folder), "size_bytes": entry.n_bytes, "current": True}
    found = {"tiles": [], "environments": [document], "prompts": [], "graphs": []}
    assert json.loads(run_here("cache", "list", "--json").out) == found
    assert run_here("cache", "list").text.endswith("  optimum, for edgedec export --via optimum\n")
    assert run_here("cache", "prune").err == "0 B freed\n"
    assert is_ready(folder)
    assert "optimum, for edgedec export --via optimum\n" in run_here("cache", "prune", "--all").err
    assert list_environments(cache) == []


def test_what_another_release_left_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of other releases, and incomplete ones, are deleted."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path))
    old = environments_folder(tmp_path) / "0123456789abcdef"
    mine = old.with_name("mine")
    for folder in (old, mine):
        folder.mkdir(parents=True)
        (folder / "pyvenv.cfg").write_bytes(b"home = /usr/bin".ljust(2000))
    name = "optimum, for edgedec export --via optimum (of another release, or unfinished)"
    assert run_here("cache", "list").text == f"   2.0 kB  {name}\n"
    stays = f"not edgedec's, and stays: {mine / 'pyvenv.cfg'}\n"
    assert run_here("cache", "prune").err == f"   2.0 kB  {name}\n{stays}2.0 kB freed\n"
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.long
def test_what_can_not_be_fetched_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    """The error has pip's last line, and the next attempt starts from nothing."""
    (wheels / "tinyoptimum-2.0-py3-none-any.whl").unlink()
    folder = tmp_path / "cache" / "environment"
    with pytest.raises(RuntimeUnavailableError, match=r"No matching distribution found for tinyoptimum==2.0"):
        ensure_environment(folder)
    assert list(folder.parent.iterdir()) == []


def test_making_it_can_be_cancelled(wheels: Path, tmp_path: Path) -> None:
    """Cancelling leaves no files."""
    folder, token = tmp_path / "cache" / "environment", CancelToken()
    with pytest.raises(CancelledError, match="making the environment of optimum: cancelled"):
        ensure_environment(folder, on_progress=lambda _: token.cancel(), cancel=token)
    assert list(folder.parent.iterdir()) == []


def test_a_frozen_application_says_that_it_can_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen application has no interpreter to make an environment with, and says so."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(RuntimeUnavailableError, match="a frozen application"):
        ensure_environment(tmp_path / "environment")


def test_a_program_runs_to_its_end(tmp_path: Path) -> None:
    """Its exit status is returned, and its output is appended to the log."""
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import sys; print('out', flush=True); print('last', file=sys.stderr); print(); sys.exit(3)"
    assert run_child([sys.executable, "-c", code], log, what="it") == 3
    assert log.read_text().startswith("before\n")
    assert last_line(log) == "last"
    assert last_line(log, 2) == "la"
    assert last_line(tmp_path / "none") == "nothing"


@pytest.mark.skipif(sys.platform == "win32", reason="select() takes sockets only there")
def test_a_program_sees_that_its_parent_is_there(tmp_path: Path) -> None:
    """A program's standard input is a pipe that is open as long as its parent runs."""
    code = "import sys, select; print(select.select([sys.stdin], [], [], 0.2)[0], sys.stdin.isatty())"
    assert run_child([sys.executable, "-c", code], tmp_path / "log", what="it") == 0
    assert last_line(tmp_path / "log") == "[] False"


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    """The error names a program that does not exist."""
    with pytest.raises(StorageError, match="no-such-program: the program cannot be started"):
        run_child([tmp_path / "no-such-program"], tmp_path / "log", what="it")
