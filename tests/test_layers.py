"""Imports go one way, and the layout is what the documents say."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each package may import of ours; `edgedec` alone stands on the standard library and numpy.
ALLOWED = {
    "edgedec": {"edgedec"},
    "runtimes/edgedec_runtimes": {"edgedec", "edgedec_runtimes"},
    "models/edgedec_models": {"edgedec", "edgedec_models"},
    "export/edgedec_export": {"edgedec", "edgedec_export", "edgedec_runtimes", "edgedec_models"},
    "apps/edgedec_apps": {"edgedec", "edgedec_apps", "edgedec_models", "edgedec_runtimes", "edgedec_export"},
}
CORE_MAY_IMPORT = {"numpy"}

pytestmark = pytest.mark.skipif(not (ROOT / "edgedec").is_dir(), reason="the sources are not beside the tests")


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    """No package imports one above it."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources in {package}"
    for path in files:
        ours = {name for name in imports(path) if name.startswith("edgedec")}
        assert ours <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[package]}"


def test_the_core_is_numpy_and_the_standard_library() -> None:
    """The core imports nothing but itself, numpy and the standard library."""
    import sys

    for path in sorted((ROOT / "edgedec").rglob("*.py")):
        foreign = imports(path) - set(sys.stdlib_module_names) - CORE_MAY_IMPORT - {"edgedec"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_no_environment_reads_in_the_core() -> None:
    """The core takes its settings as arguments, never from the environment."""
    for path in sorted((ROOT / "edgedec").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "os.environ" not in text, path
        assert "getenv" not in text, path
