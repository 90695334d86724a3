"""What the documents and docstrings name exists: files, modules, commands and options."""

import ast
import doctest
import importlib.util
import json
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from edgedec_runtimes.cpu.tensor_places import TILE_TYPES

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("edgedec", "runtimes", "export", "models", "apps", "methods"),
    *("tests", "docs", "benchmarks", "examples", ".ci"),
)
PACKAGES = tuple(f"{top}/edgedec_{top}" for top in ("runtimes", "export", "models", "apps", "methods"))
DOCUMENTS = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/README.md"))
    if path.exists()
)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

PATH = re.compile(r"(?<![\w./~-])(?:\.\./)*((?:[\w-]+/)+[\w.*-]+|[\w-]+\.(?:py|md|sh))(?![\w-])")
MODULE = re.compile(r"(?<![\w./-])(edgedec(?:_runtimes|_apps|_export|_models|_methods)?(?:\.[A-Za-z_]\w*)+)")
SNIPPET = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z]{3,}")  # models/NAME.gguf
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

# Names of other projects' files, and of files that a command makes.
ELSEWHERE = {"convert_hf_to_gguf.py", "report.md"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "edgedec").is_dir(), reason="the sources are not beside the tests"),
]


def docstrings(path: Path) -> Iterator[str]:
    """Return every docstring of a source file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@cache
def texts() -> tuple[tuple[Path, str], ...]:
    """Return the text of every document, and the docstrings of every source file."""
    documents = [(path, path.read_text(encoding="utf-8")) for path in DOCUMENTS]
    return (*documents, *((path, "\n".join(docstrings(path))) for path in SOURCES))


@cache
def file_names() -> frozenset[str]:
    """Return the names, without folders, of all files of this checkout that documents may name."""
    return frozenset(path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())


@cache
def exists(name: str, folder: Path) -> bool:
    """Tell whether a path exists: from the checkout's root, from a package's folder, or from the document's folder."""
    if "/" not in name:
        return name in file_names() or (ROOT / name).exists()
    roots = [ROOT, *(ROOT / package for package in PACKAGES), *((ROOT / package).parent for package in PACKAGES)]
    return any(any(root.glob(name.rstrip("."))) for root in [*roots, ROOT / "edgedec", folder])


def is_ours(name: str) -> bool:
    """Tell whether a path claims to be one of this checkout: it has no folder, or begins with a folder of ours."""
    first = name.split("/")[0]
    if name in ELSEWHERE or (PLACEHOLDER.search(name) and not name.endswith(".md")):
        return False
    return "/" not in name or first in FOLDERS or first.startswith("edgedec_") or name.endswith(".py")


def test_paths_exist() -> None:
    """Every path of ours that a document or a docstring names is there."""
    wrong = [
        f"{document.relative_to(ROOT)}: {name}"
        for document, text in texts()
        for name in PATH.findall(text)
        if is_ours(name) and not exists(name, document.parent)
    ]
    assert not wrong, "\n".join(wrong)


def named(module: str) -> bool:
    """Tell whether a dotted name is a module or package of ours, or something that a module of ours mentions."""
    parts = module.split(".")
    tops = {"edgedec": ROOT / "edgedec", **{package.split("/")[1]: ROOT / package for package in PACKAGES}}
    place = tops[parts[0]]
    for i, part in enumerate(parts[1:], start=1):
        if (place / part).is_dir():
            place = place / part
            continue
        file = place / f"{part}.py"
        if file.exists():
            rest = parts[i + 1 :]
        else:
            file, rest = place / "__init__.py", parts[i:]
        return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None
    return True


def entry_point_groups() -> set[str]:
    """Return the groups of entry points, which look like modules."""
    return set(re.findall(r'"(edgedec\.\w+)"', (ROOT / "edgedec" / "plugins.py").read_text(encoding="utf-8")))


def test_modules_exist() -> None:
    """Every dotted name of ours that a document or a docstring names is there; names of loggers and groups too."""
    known = entry_point_groups() | {"edgedec.json", "edgedec.service", "edgedec.kept_layers", "edgedec.llamacpp"}
    known |= {"edgedec.head", "edgedec.head.token_ids", "edgedec.mask"}
    wrong = [
        f"{document.relative_to(ROOT)}: {name}"
        for document, text in texts()
        for name in MODULE.findall(text)
        if name not in known and not named(name)
    ]
    assert not wrong, "\n".join(wrong)


def snippets(path: Path) -> Iterator[str]:
    """Return the commands in a document's code: each line of a block, and each piece between backticks."""
    for block, inline in SNIPPET.findall(path.read_text(encoding="utf-8")):
        for line in (block or inline).replace("\\\n", " ").splitlines():
            yield line.split("  #")[0].strip()


def test_commands_and_options_exist() -> None:
    """Every `edgedec COMMAND` of the documents is a command; its options, and those of benchmarks, are declared."""
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^### edgedec ([a-z-]+)", reference, re.MULTILINE))
    options = {option.replace("[no-]", "") for option in re.findall(r"--(?:\[no-\])?[a-z-]+", reference)}
    options |= {f"--no-{option[2:]}" for option in options} | {"--help", "--version"}
    wrong = []
    for document in DOCUMENTS:
        for line in snippets(document):
            where = f"{document.relative_to(ROOT)}: {line}"
            if (command := re.match(r"(?:\S+/)?edgedec ([a-z][a-z-]*)(?: |$)", line)) is not None:
                wrong += [where] * (command[1] not in commands)
                wrong += [where] * (not set(OPTION.findall(line)) <= options)
            elif (benchmark := re.match(r"(?:python )?(benchmarks/[\w/]+\.py)", line)) is not None:
                source = (ROOT / benchmark[1]).read_text(encoding="utf-8")
                wrong += [where] * any(f'"{option}"' not in source for option in OPTION.findall(line))
    assert not wrong, "\n".join(wrong)


def test_sentences_about_drafting_are_what_the_program_says() -> None:
    """Every sentence that docs/why-drafting-is-off.md explains is in the sources of the core, a runtime or a method."""
    page = (ROOT / "docs" / "why-drafting-is-off.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    explained = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    sources = (path for folder in ("edgedec", "runtimes", "methods") for path in (ROOT / folder).rglob("*.py"))
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources)
    said = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    missing = [words for words in explained if not any(words in constant for constant in said)]
    assert len(explained) > 5
    assert not missing


def test_pages_agree_on_the_types_that_the_cpu_runtime_lacks() -> None:
    """docs/which-model.md names what docs/models.md has as lacking, and the cpu runtime has all others."""
    models, choosing = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("models.md", "which-model.md"))
    rows = re.findall(r"^\| ([A-Z][\w, ]+) \| (yes|no) \|", models, re.MULTILINE)
    runs, lacks = ({name for names, its in rows if its == has for name in names.split(", ")} for has in ("yes", "no"))
    assert runs == {kind.name for kind in TILE_TYPES}
    sentence = re.search(r"cpu runtime runs\*\* all types but ([\w, ]+), and files", choosing)
    assert sentence is not None
    assert set(re.split(", | and ", sentence[1])) == lacks


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Every link of a document to another document, or to a heading, leads there."""
    wrong = []
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{document.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def picture_script(name: str) -> ModuleType:
    """Import a script of benchmarks/speed that draws a picture."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "speed" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    ("script", "constant"), [("tokens_per_second_picture", "RESULT"), ("readme_recording", "RECORDING")]
)
def test_pictures_are_what_their_scripts_draw(script: str, constant: str) -> None:
    """Each picture is drawn from its committed result, byte for byte."""
    module = picture_script(script)
    drawn = module.draw(json.loads(getattr(module, constant).read_text(encoding="utf-8")))
    assert module.PICTURE.read_text(encoding="utf-8") == drawn


def test_the_picture_shows_the_first_command() -> None:
    """The recording is of the command that the README begins with, and loads nothing."""
    module = picture_script("readme_recording")
    recording = json.loads(module.RECORDING.read_text(encoding="utf-8"))
    assert recording["command"] == module.first_command()
    assert recording["lines"][0]
    assert "tokens/s" in "".join(recording["lines"])
    assert "http" not in re.sub(
        r"http://www.w3.org\S*|https://www.textualize.io", "", module.PICTURE.read_text("utf-8")
    )


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("one\ntwo\n", ["one", "two", ""]),
        ("load 1\rload 2\r\x1b[2Ktext", ["text"]),
        ("bar\nbar\n\x1b[1A\x1b[2K\x1b[1A\x1b[2Ktext\n", ["text", "", ""]),
        ("\x1b[?25l\x1b[91mred\x1b[0m\x1b[?25h", ["\x1b[91mred\x1b[0m"]),
    ],
)
def test_a_recording_has_what_the_screen_shows_at_the_end(output: str, shown: list[str]) -> None:
    """Bars that were drawn over and erased are left out, colours stay."""
    assert picture_script("readme_recording").screen(output) == shown


def test_every_page_is_within_two_clicks_of_the_readme() -> None:
    """From the README every page is reached by two links at the most; what most people look for by one."""
    one = {ROOT / link.split("#")[0] for link in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    two = {
        (page.parent / link.split("#")[0]).resolve()
        for page in one
        if page.suffix == ".md"
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert {ROOT / "docs" / f"{name}.md" for name in ("faster", "clients", "installing", "trouble", "heads")} <= one
    assert set((ROOT / "docs").glob("*.md")) <= one | two


def test_no_address_stands_for_another() -> None:
    """No page, unit or metadata has an address that a reader must replace; OWNER/REPO after hf: is a form."""
    stands_for = re.compile(
        r"\bexample\.(?:com|org|net)|\.example\b|ADDRESS-OF|github\.com/(?:OWNER|USER|you)\b"
        r"|\b(?:your|my)-(?:name|server|host|domain|repo|org|user)\b|<(?:your|url|owner)[^>]*>|/path/to/your",
        re.IGNORECASE,
    )
    files = [*DOCUMENTS, ROOT / "Dockerfile", ROOT / "pyproject.toml", *(ROOT / "apps").glob("*/*.service")]
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in stands_for.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_wrong_package_is_named_before_the_first_installation() -> None:
    """The README says which project is ours, and which is not, before its first `pip install`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    assert readme.index(f"`{project}`") < readme.index("is not ours") < readme.index("pip install")


def test_the_dockerfile_fits_the_checkout() -> None:
    """The image installs the sources in both stages' Python, and what it starts are a command and options of ours."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert len(set(bases)) == 1  # one Python: the environment of the first stage works in the second
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert tuple(map(int, re.findall(r"\d+", bases[0])[:2])) >= tuple(map(int, re.findall(r"\d+", version)))
    (entry,), (command,) = (
        [json.loads(rest) for word, rest in steps if word == name] for name in ("ENTRYPOINT", "CMD")
    )
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert entry == ["edgedec"]
    assert f"\n### edgedec {command[0]} " in reference
    assert all(f"`{option}" in reference for option in command if option.startswith("-"))
    variables = {name for word, rest in steps if word == "ENV" for name in re.findall(r"(EDGEDEC_\w+)=", rest)}
    assert variables
    assert all(f"`{name}`" in reference for name in variables)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", "build"} <= set(ignored)
    assert not [line for line in ignored if (ROOT / line / "__init__.py").exists()]


MOST_HOLDERS = 10  # of an option of load, on its way from the command line to where it is used
HOLDER = re.compile(r"`([\w/]+\.py):(\d+):([\w.]+)`")
LOAD_PATH = ("edgedec/api/*.py", "edgedec/load_*.py", "edgedec/memory/*.py", "apps/edgedec_apps/cli/options.py")
"""Where each field that has an option's name is one of its holders, but for a request's."""


def defined(path: Path) -> dict[str, int]:
    """Return the lines of a file's functions and classes, of their parameters and fields, by dotted names."""
    lines: dict[str, int] = {}

    def walk(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                name = child.target.id
            if isinstance(child, ast.arg):
                name = child.arg
            if name:
                lines[f"{before}{name}"] = child.lineno  # type: ignore[attr-defined]  # what has a name has a line
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.arguments):
                walk(child, f"{before}{name}." if name else before)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return lines


def test_the_holders_of_an_option_are_listed() -> None:
    """With file, line and name, at most ten each; EDGEDEC_WRITE_TABLE=1 writes the lines anew."""
    document = ROOT / "docs" / "architecture.md"
    text = document.read_text(encoding="utf-8")
    written = HOLDER.sub(lambda found: f"`{found[1]}:{defined(ROOT / found[1])[found[3]]}:{found[3]}`", text)
    paths = [path for pattern in LOAD_PATH for path in ROOT.glob(pattern)]
    fields = {(path.relative_to(ROOT).as_posix(), name) for path in paths for name in defined(path)}
    for option in ("draft", "memory", "n_ctx"):
        (line,) = re.findall(rf"(?m)^- `{option}`: .*$", text)
        held = [(file, name) for file, _, name in HOLDER.findall(line)]
        assert 0 < len(held) <= MOST_HOLDERS, option
        named = {each for each in fields if re.fullmatch(rf"[A-Z]\w*\.{option}", each[1])}
        assert named - {*held} <= {("edgedec/api/requests.py", "RequestOptions.draft")}, option
    if os.environ.get("EDGEDEC_WRITE_TABLE"):
        document.write_text(written, encoding="utf-8")
    else:
        assert text == written, "docs/architecture.md lists old lines; EDGEDEC_WRITE_TABLE=1 writes them"


def test_examples_in_docstrings_give_what_they_show() -> None:
    results = dict[str, doctest.TestResults]()
    for package in (ROOT / "edgedec", *(ROOT / each for each in PACKAGES)):
        for path in (each for each in package.rglob("*.py") if ">>> " in each.read_text(encoding="utf-8")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            try:
                results[name] = doctest.testmod(importlib.import_module(name))
            except ModuleNotFoundError as error:  # torch, for one, is in an extra
                if "edgedec" in (error.name or "edgedec"):
                    raise
    assert [name for name, result in results.items() if result.failed] == []
    assert len(results) > 150
