"""onnxruntime reports sessions to its makers unless it is told not to; here it is told."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

if find_spec("onnxruntime") is None:  # importing it here would be what must not be
    pytest.skip("onnxruntime is not installed", allow_module_level=True)

_ROOT = Path(__file__).parents[3]

_LOADED = "import os; from edgedec_runtimes.onnx.library import load_library as l; l(); print(os.environ[{!r}])"
_VARIABLE = "ORT_DISABLE_TELEMETRY"


def loaded(home: Path, said: str | None) -> str:
    """Load the library in a process with a home of its own; return what its variable was then."""
    unwanted = {_VARIABLE, "CI", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | {"HOME": str(home)}
    environment |= {} if said is None else {_VARIABLE: said}
    command = [sys.executable, "-c", _LOADED.format(_VARIABLE)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_nothing_is_reported(tmp_path: Path) -> None:
    """The variable is set before the import, and no id of the device is left in the home."""
    assert loaded(tmp_path, None) == "1"
    assert [path.name for path in tmp_path.rglob("*")] == []


def test_who_wants_it_may_have_it(tmp_path: Path) -> None:
    """What the person set stays."""
    assert loaded(tmp_path, "0") == "0"


def test_only_the_library_module_imports_it() -> None:
    """Tests and benchmarks, too, get it where its telemetry is switched off."""
    importing = re.compile(r"^\s*(?:import|from) onnxruntime\b|importorskip\(.onnxruntime\b", re.MULTILINE)
    folders = ("apps", "benchmarks", "edgedec", "examples", "export", "models", "runtimes", "tests")
    files = [path for folder in folders for path in (_ROOT / folder).rglob("*.py")]
    found = [path.relative_to(_ROOT).as_posix() for path in files if importing.search(path.read_text(encoding="utf-8"))]
    assert found == ["runtimes/edgedec_runtimes/onnx/library.py"]
