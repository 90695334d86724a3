"""Installing: our distribution's name, what messages tell people to install, and another project's package edgedec."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.processes.command_line import run_here

from edgedec.plugins import DISTRIBUTION, install_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "apps", "benchmarks", "docs", "edgedec", "examples", "export", "models", "runtimes", "tests")
TEXTS = (".py", ".md", ".sh", ".toml", ".html", ".service")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of packages with the metadata of another project that has a package `edgedec`."""
    folder = tmp_path / "site" / "edgedec-0.4.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: edgedec\nVersion: 0.4\n")
    (folder / "top_level.txt").write_text("edgedec\n")
    return folder.parent


def test_the_distribution_is_not_called_as_a_foreign_one() -> None:
    """pip knows this package by a name of its own; what is imported and run is `edgedec`."""
    command = next(iter(metadata.entry_points(group="console_scripts", name="edgedec")))
    assert (DISTRIBUTION, command.value) == ("edgedec-llm", "edgedec_apps.cli:main")
    assert metadata.metadata(DISTRIBUTION)["Name"] == DISTRIBUTION


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("export", 'pip install "onnx>=1.17"'),
        ("llguidance", 'pip install "llguidance>=1.9"'),
        ("npu", 'pip install "onnxruntime-qnn>=2.0"'),
        ("no-such-extra", 'pip install ".[no-such-extra]" in a clone of edgedec'),
    ],
)
def test_messages_name_the_packages_of_an_extra(extra: str, command: str) -> None:
    """What a message tells a person to type installs an extra's packages, or one, with the versions of our metadata."""
    assert install_command(extra) == command


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the sources are not beside the tests")
def test_nothing_tells_people_to_install_the_foreign_project() -> None:
    """No page, message or script asks pip for `edgedec`, with or without extras."""
    asks = re.compile(r"""pip install (-\S+ )*["']?edgedec([\["'`\s)]|$)|["']edgedec\[""")
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != "CHANGELOG.md"]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS and path != Path(__file__)]
    found = []
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [f"{path}: {line}" for line in lines if asks.search(line)]
    assert found == []


def test_doctor_names_another_project_in_our_package(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another distribution owns files of the package edgedec, doctor names it and says how to get out of it."""
    assert "clash" not in run_here("doctor").text
    monkeypatch.syspath_prepend(str(elsewhere))
    found = run_here("doctor")
    assert found.code == 0
    clash = next(line for line in found.text.splitlines() if line.startswith("clash"))
    assert "another project, edgedec 0.4, has files in the folder edgedec" in clash
    assert "pip uninstall edgedec edgedec-llm" in clash


def test_a_replaced_package_is_named_without_a_traceback(elsewhere: Path) -> None:
    """Where the other project's files took the place of ours, so that nothing imports, the command still names it."""
    script = "import sys; sys.modules['edgedec'] = None; from edgedec_apps.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "doctor"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (70, "")
    assert ended.stderr.startswith("edgedec: ModuleNotFoundError")
    assert "another project, edgedec 0.4, has files" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("given", [(), ("--memory", "900MB")])
def test_a_run_of_a_model_that_is_here_imports_nothing_for_the_net_or_the_server(
    tiny_path: Path, given: tuple[str, ...]
) -> None:
    """Start-up is paid for by every text, and what is imported counts against a cap on memory."""
    heavy = ("httpx", "huggingface_hub", "rich", "starlette", "uvicorn", "llguidance", "pypdf")
    script = (
        "import atexit, sys; from edgedec_apps.cli import main; "
        f"atexit.register(lambda: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)); main()"
    )
    run = ("run", str(tiny_path), "hi", "--raw", "-n", "1", "--quiet", "--offline", "--runtime", "cpu", *given)
    done = subprocess.run([sys.executable, "-c", script, *run], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (0, ["[]"]), done.stderr
