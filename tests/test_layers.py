"""Imports go one way: between the packages, between the rooms of the core, and between files."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each package may import of ours; `edgedec` alone stands on the standard library, numpy, and two small libraries.
ALLOWED = {
    "edgedec": {"edgedec"},
    "runtimes/edgedec_runtimes": {"edgedec", "edgedec_runtimes"},
    "models/edgedec_models": {"edgedec", "edgedec_models", "edgedec_runtimes"},  # a model may be kept as tiles
    "export/edgedec_export": {"edgedec", "edgedec_export", "edgedec_runtimes", "edgedec_models"},
    "apps/edgedec_apps": {"edgedec", "edgedec_apps", "edgedec_models", "edgedec_runtimes", "edgedec_export"},
    # Only the training of methods imports the export.
    "methods/edgedec_methods": {"edgedec", "edgedec_methods", "edgedec_runtimes", "edgedec_export"},
}
CORE_MAY_IMPORT = {"numpy", "platformdirs", "psutil"}
COMPOSES = "edgedec/api/load.py"  # the one exception: it imports, within functions, what it composes an engine of
NAMES_ALL = "apps/edgedec_apps/pyinstaller/hook-edgedec.py"  # for PyInstaller, which looks for each package

# The rooms of the core: a file imports its own room and those before it. "top" is the files of edgedec/ itself.
ROOMS = tuple(
    "top gguf storage verification sessions drafters scheduler loading memory decoding choosing api testing".split()
)

pytestmark = pytest.mark.skipif(not (ROOT / "edgedec").is_dir(), reason="the sources are not beside the tests")


@cache
def import_statements(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return for each import of a file, wherever in it, the module and the names that are taken from it, if any."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", tuple(alias.name for alias in node.names)))
    return tuple(found)


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    return {module.split(".")[0] for module, _ in import_statements(path)}


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by the name that an import gives them."""
    root = package.parent
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in sorted(package.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def modules_imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules among those known that a file imports: anywhere in it, for type checking too."""
    found: set[str] = set()
    for module, names in import_statements(path):
        whole = {f"{module}.{name}" for name in names}
        found |= (whole & known.keys()) or {module}
    return found & known.keys()


def room_of(module: str) -> str:
    """Return the room of one of the core's modules."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "top"


def test_a_room_imports_only_the_rooms_before_it() -> None:
    """The core's rooms stand in one order; the names that `import edgedec` gives are found when they are asked for."""
    known = modules(ROOT / "edgedec")
    assert {room_of(module) for module in known} == set(ROOMS)
    for module, path in known.items():
        if module == "edgedec":
            continue
        above = ROOMS[ROOMS.index(room_of(module)) + 1 :]
        wrong = {name for name in modules_imported(path, known) if room_of(name) in above}
        assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("package", ALLOWED)
def test_no_two_files_import_each_other(package: str) -> None:
    """The files of a package can be put in an order in which each imports only files before it."""
    known = modules(ROOT / package)
    known.pop("edgedec", None)  # its imports are for type checkers and for whoever asks for a name
    waiting = {module: modules_imported(path, known) - {module} for module, path in known.items()}
    while ready := {module for module, needed in waiting.items() if not needed & waiting.keys()}:
        waiting = {module: needed for module, needed in waiting.items() if module not in ready}
    assert not waiting, f"in or before a cycle: {waiting}"


def strings(path: Path) -> set[str]:
    """Return the strings of a file, those within f-strings too, but no docstrings: nothing is found by these."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said)
    return {node.value for node in constants if isinstance(node.value, str)}


def above(package: str) -> set[str]:
    """Return the packages that a package may not import."""
    return {each.rpartition("/")[2] for each in ALLOWED} - ALLOWED[package]


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_names_none_above_it(package: str) -> None:
    """Neither by an import nor in a string, by which it could import it; one file composes, within functions."""
    names = re.compile(rf"\b({'|'.join(sorted(above(package)))})\b") if above(package) else None
    for path in sorted((ROOT / package).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        wrong = {text for text in strings(path) if names is not None and names.search(text)}
        assert not wrong or place == NAMES_ALL, f"{place} names what is above it: {wrong}"
        wrong = imports(path) & above(package)
        if place == COMPOSES:
            head = path.read_text(encoding="utf-8").partition("\ndef ")[0]
            wrong = {name for name in wrong if re.search(rf"(?m)^ *(import|from) {name}\b", head)}
        assert not wrong, f"{place} imports {wrong}"


@pytest.mark.parametrize("room", ["memory", "decoding", "choosing", "api"])
def test_a_room_above_the_scheduler_names_no_drafter(room: str) -> None:
    """A drafter declares what it needs, holds and loses; no constant, string or import knows one of them by name."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    drafters: dict[str, str] = entries["edgedec.drafters"]
    names = {*drafters, *map(str.upper, drafters), *(target.partition(":")[0] for target in drafters.values())}
    for path in sorted((ROOT / "edgedec" / room).rglob("*.py")):
        imported = {each for module, taken in import_statements(path) for each in (module, *taken)}
        assert not (wrong := names & (strings(path) | imported)), f"{path} names {wrong}"


def test_the_core_names_no_rule_or_shape_of_a_guest() -> None:
    """A rule is opened by the name that a request has, and says how drafts are drawn: the core has `coupled` alone."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    guests = {name.removeprefix("tree_shape."): target for name, target in entries.pop("edgedec.rules").items()}
    names = {*guests, *map(str.upper, guests)}.difference(*entries.values())  # a beam is a search, too
    names |= {target.partition(":")[0] for target in guests.values()}
    for path in sorted((ROOT / "edgedec").rglob("*.py")):
        imported = {each for module, taken in import_statements(path) for each in (module, *taken)}
        assert not (wrong := names & (strings(path) | imported)), f"{path} names {wrong}"


def test_the_core_imports_few_libraries() -> None:
    """Others would be a part of each start, and of each package that is built on the core."""
    for path in sorted((ROOT / "edgedec").rglob("*.py")):
        others = imports(path) - sys.stdlib_module_names - {each.rpartition("/")[2] for each in ALLOWED}
        assert others <= CORE_MAY_IMPORT, f"{path} imports {others - CORE_MAY_IMPORT}"


def test_the_core_reads_one_variable_of_the_environment() -> None:
    """It names the cache's root. The core takes all other settings as arguments."""
    reads = {}
    for path in sorted((ROOT / "edgedec").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if found := re.findall(r"(?:os\.environ|getenv).*", text):
            reads[path.relative_to(ROOT).as_posix()] = found
    assert reads == {"edgedec/storage/cache_files.py": ['os.environ.get("EDGEDEC_CACHE"):']}


def test_only_the_training_imports_torch() -> None:
    """No other file imports torch, and of the training only the files that its docstring names."""
    found = {path for package in ALLOWED for path in (ROOT / package).rglob("*.py") if "torch" in imports(path)}
    training = ROOT / "export/edgedec_export/training"
    said = (training / "__init__.py").read_text(encoding="utf-8")
    assert found == {path for path in training.rglob("*.py") if f"`{path.relative_to(training).as_posix()}`" in said}


def test_the_short_run_imports_nothing_that_takes_seconds() -> None:
    """A test file that imports torch, a client of the server or the driver of a browser is marked slow as a whole."""
    heavy = re.compile(
        r"^\w+ = pytest\.importorskip\(.(torch|anthropic|openai|ollama)\b|^from support\.processes\.browser", re.M
    )
    slow = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.M)
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [path for path, text in texts.items() if heavy.search(text) and not slow.search(text)]
    assert any(heavy.search(text) for text in texts.values())
