"""The tables of opt-ins and studies of docs/methods.md are made of the docstrings of edgedec_methods and a few others.

EDGEDEC_WRITE_TABLE=1 has the test write both instead of comparing them.
"""

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgedec import plugins

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/methods.md"
BEGIN, END = "<!-- table of tests/methods/test_method_table.py -->\n", "<!-- end of the table -->\n"
PACKAGE = ROOT / "methods/edgedec_methods"
ELSEWHERE = (ROOT / "apps/edgedec_apps/extraction.py", ROOT / "edgedec/choosing/sample_count.py")
"""Methods that are no guests, as a part of the core or a command is made of them."""
FIELDS = ("Paper", "Option", "For", "Measured", "Status")
HEAD = "| an opt-in | option | for |\n|---|---|---|\n"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not beside the tests")


def docstring(path: Path) -> str:
    """Return the docstring of a module."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def fields(text: str) -> dict[str, str]:
    """Return the fields that end a docstring, each on one line; none where it has none of them.

    >>> fields('''A: does it.
    ...
    ... Paper: B,
    ...     C
    ... Status: study''')
    {'Paper': 'B, C', 'Status': 'study'}
    """
    found = re.findall(rf"(?m)^({'|'.join(FIELDS)}): (.+(?:\n {{4}}.+)*)$", text)
    return {name: re.sub(r"\s*\n\s*", " ", value) for name, value in found}


def methods() -> Iterator[Path]:
    """Yield the files that stand for a method: the guests in the order of their names, then the others."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "__init__.py" and fields(docstring(path)):
            yield path
    yield from ELSEWHERE


def row(path: Path) -> tuple[str, str]:
    """Return the status and the row of a method, after a look at its docstring's form; paper and figures stay there."""
    text = docstring(path)
    summary = text.splitlines()[0]
    system, colon, what = summary.partition(": ")
    assert colon, (
        f"{path}: the docstring begins with {summary!r}; it must be the system's name, a colon and what it does"
    )
    assert what.endswith("."), f"{path}: the first line must be a whole sentence"
    found = fields(text)
    assert tuple(found) == FIELDS, f"{path}: the fields are {', '.join(found)}; they must be {', '.join(FIELDS)}"
    assert found["Status"] in ("study", "opt-in"), f"{path}: the status must be study or opt-in"
    link = f"[{system}](../{path.relative_to(ROOT).as_posix()})"
    cells = [link, found["Option"].partition(", with ")[0], found["For"]]
    assert "|" not in "".join(cells), f"{path}: a cell of a table has no |"
    line = f"| {' | '.join(cells)} |\n" if found["Status"] == "opt-in" else f"{link} {cells[1]};\n"
    return found["Status"], line


@pytest.mark.slow
def test_every_method_has_a_row() -> None:
    """The table and the list are what the docstrings say."""
    rows = [row(path) for path in methods()]
    opt_ins, studies = ("".join(line for its, line in rows if its == status) for status in ("opt-in", "study"))
    made = f"{HEAD}{opt_ins}\nStudies:\n\n{studies}\n"
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    assert begun, f"{DOCUMENT} lacks the line {BEGIN!r}"
    assert ended, f"{DOCUMENT} lacks the line {END!r}"
    if os.environ.get("EDGEDEC_WRITE_TABLE"):
        DOCUMENT.write_text(before + begun + made + ended + after, encoding="utf-8")
        return
    assert rest.startswith(made + END), "docs/methods.md is old; EDGEDEC_WRITE_TABLE=1 writes its table"


@pytest.mark.slow
def test_what_is_found_by_entry_point_says_what_it_is() -> None:
    """Each plug-in of ours from this package is a method with a docstring of the form, and a test names it."""
    named = {path.stem for path in methods()}
    for group in plugins.KINDS:
        for name, plugin in plugins.plugins(group).items():
            package, _, module = plugin.target.partition(":")[0].partition(".")
            if package == "edgedec_methods":
                assert module.split(".")[-1] in named, f"{group} {name}: {module} has no fields in its docstring"
    works = tomllib.loads((ROOT / "tests/works.toml").read_text(encoding="utf-8"))["methods"]
    for name, row in works.items():
        path = ROOT / row["test"].partition("::")[0]
        names = "|".join([name.rpartition(".")[2], *row.get("plugins", ()), *row.get("imports", ())])
        assert re.search(rf"\b({names})\b", path.read_text(encoding="utf-8")), f"{path} names none of {names}"
