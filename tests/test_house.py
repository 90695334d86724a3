"""The size of the house: what tests/house.toml allows, counted in the files that git tracks.

A limit is today's value; beside it stands the goal. What is above its limit fails, and so does what is more than a
hundredth below it, so that a limit falls with the house: EDGEDEC_WRITE_TABLE=1 lowers the limits, and raises none.
"""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import get_args, get_type_hints

import pytest
import test_layers

import edgedec
from edgedec import plugins
from edgedec.api.engine import Engine
from edgedec.drafter import DraftContext
from edgedec.model import ForwardItem, Session
from edgedec_apps.cli.app import app

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "house.toml"
SLACK = 0.01

CODE = {".py", ".cpp", ".c", ".h", ".hpp", ".inl", ".js", ".css", ".html"}
TABLES = {".toml", ".json"}  # in a package they stand in the place of code
NO_TABLES = {"pyproject.toml", "catalogue.toml"}
OUTSIDE = ("tests", "benchmarks", "docs")

TOKEN = re.compile(
    r'''\n[ \t]*[rR]?"""(?:[^\\"]|\\.|"(?!""))*"""'''  # a docstring, or a text that stands as one does
    r"""|\#[^\n]*"""
    r'''|[rRbBuUfF]{0,2}(?:"""(?:[^\\"]|\\.|"(?!""))*"""|\'\'\'(?:[^\\']|\\.|'(?!''))*\'\'\')'''
    r"""|[rRbBuUfF]{0,2}(?:"(?:[^\\"\n]|\\.)*"|'(?:[^\\'\n]|\\.)*')"""
    r"""|[^\W\d]\w*|\d\w*(?:\.\w*)?(?:(?<=[eE])[-+]\d+)?|\.\d\w*"""
    r"""|\*\*=?|//=?|>>=?|<<=?|\.\.\.|->|:=|[-!=<>+*/%&|^@]=?|[][(){},:;.~]""",
    re.DOTALL,
)
"""The tokens of Python that `tokenize` gives, but for those of the layout; an f-string is one, as in Python 3.11."""

VAGUE = ("given", "wanted", "known", "kept", "named", "told", "own")
UPPER = re.compile(r"\bedgedec_(?:runtimes|apps|export|models|methods)\b")
PACKAGE = re.compile(r"edgedec(_\w+)?")  # of ours, wherever it is installed
SMALL = 40  # lines
SMALL_ANYWHERE = ("__init__.py", "__main__.py", "conftest.py")

# Types of fields that count as one: the span of layers, what a row sees, and values that are read as one thing.
WHOLE = {"LayerSet", "Span", "Block", "SamplingParams", "Noise", "Floor", "SortedText", "TreeShape"}


def tracked() -> list[str]:
    """Return the files that git tracks; skips where the tests are not in a clone, as in a wheel's or an sdist's."""
    if not (ROOT / ".git").exists():
        pytest.skip("the house is counted in a clone, as git tells its files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"git lists no files: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@dataclass(frozen=True)
class House:
    """The tracked files, and what stands in them."""

    files: list[str]

    @cached_property
    def texts(self) -> dict[str, str]:
        """The product's code and tables, and that of tests and benchmarks."""
        names = (name for name in self.files if Path(name).suffix in CODE or is_product(name))
        return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}

    @cached_property
    def product(self) -> dict[str, str]:
        """The texts of the product's files."""
        return {name: text for name, text in self.texts.items() if is_product(name)}

    @cached_property
    def tokens(self) -> dict[str, list[str]]:
        """The tokens of the product's Python; a docstring begins with the end of the line before."""
        python = ((name, text) for name, text in self.product.items() if name.endswith(".py"))
        return {name: TOKEN.findall("\n" + text) for name, text in python}

    @cached_property
    def names(self) -> Counter[str]:
        """How often each token stands in the product's Python."""
        counted = Counter[str]()
        for tokens in self.tokens.values():
            counted.update(tokens)
        return counted

    def lines(self, *folders: str) -> int:
        """Return the lines of code under these folders."""
        return sum(text.count("\n") for name, text in self.texts.items() if name.startswith(folders))

    def upper_names(self) -> int:
        """Return how often the product names a package above it in a string."""
        n = 0
        for package, allowed in test_layers.ALLOWED.items():
            above = {each.rpartition("/")[2] for each in test_layers.ALLOWED} - allowed
            for name, tokens in self.tokens.items():
                if not name.startswith(f"{package}/"):
                    continue
                n += sum(tokens[i - 1] == "." for i in range(1, len(tokens)) if tokens[i] == "OWN")
                if UPPER.search(self.product[name]):
                    strings = (token for token in tokens if token[-1] in "\"'" and token[0] != "\n")
                    n += sum(each in above for token in strings for each in UPPER.findall(token))
        return n

    def star_tuples(self) -> int:
        """Return how many tuples are written out and unpacked at once."""
        n = 0
        for name, tokens in self.tokens.items():
            if "*(" in self.product[name]:
                starts = (i for i in range(1, len(tokens)) if tokens[i] == "(" and tokens[i - 1] == "*")
                n += sum(tokens[i - 2] in ("(", "[", "{", ",") and is_tuple(tokens, i) for i in starts)
        return n

    def small_files(self) -> int:
        """Return how many files have fewer than 40 lines, architectures and plug-ins apart."""
        targets = {plugin.target for kind in plugins.KINDS for plugin in plugins.plugins(kind).values()}
        modules = tuple(f"{target.partition(':')[0].replace('.', '/')}.py" for target in targets)
        return sum(
            text.count("\n") < SMALL
            and not name.endswith((*SMALL_ANYWHERE, *modules))
            and not name.startswith(("examples/", ".ci/"))
            for name, text in self.product.items()
        )

    def comment_lines(self) -> int:
        """Return how many lines of the product's Python have a comment or a docstring."""
        return sum(n * max(1, token.count("\n")) for token, n in self.names.items() if token[0] in "\n#")


def is_product(name: str) -> bool:
    """Return whether a file counts as the product's."""
    path = Path(name)
    if name.startswith(tuple(f"{folder}/" for folder in OUTSIDE)):
        return False
    is_table = path.suffix in TABLES and path.name not in NO_TABLES and "/" in name
    return path.suffix in CODE or is_table or name.startswith(".ci/")


def is_tuple(tokens: list[str], start: int) -> bool:
    """Return whether the parenthesis at `start` is of a tuple: with a comma, and no generator."""
    depth, has_comma = 0, False
    for token in tokens[start:]:
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        has_comma |= depth == 1 and token == ","
        if depth == 0 or (depth == 1 and token == "for"):
            return has_comma and depth == 0
    return False


def whole_fields(kind: type) -> Iterator[str]:
    """Yield the fields of a dataclass; in the place of one whose type is a dataclass of ours, the fields of that."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        types = [each for each in (hints[field.name], *get_args(hints[field.name])) if isinstance(each, type)]
        inner = [each for each in types if is_dataclass(each) and each.__name__ not in WHOLE]
        if inner and inner[0].__module__.startswith("edgedec"):
            yield from (f"{field.name}.{name}" for name in whole_fields(inner[0]))
        else:
            yield field.name


def members(kind: type) -> set[str]:
    """Return the public members of a class: what it and its bases define, annotate, or set in their methods."""
    defined = {name for name in dir(kind) if not name.startswith("_")}
    for base in kind.__mro__:
        if base.__module__.startswith("edgedec"):
            lines = re.findall(r"(?m)^\s+((?:self\.\w+, )*self\.\w+)\s*(?:=[^=]|:)", inspect.getsource(base))
            set_here = re.findall(r"self\.([a-z]\w*)", " ".join(lines))
            defined |= {*set_here, *(name for name in vars(base).get("__annotations__", {}) if name[0] != "_")}
    return defined


def without_twins(names: set[str]) -> set[str]:
    """Return the names without those of async methods whose plain ones are there too."""
    return {name for name in names if not (name[0] == "a" and name[1:] in names)}


def options_of_run() -> int:
    """Return how many options `edgedec run` has, hidden ones too."""
    import typer

    group = typer.main.get_command(app)
    command = group.commands["run"]  # type: ignore[attr-defined]
    return sum(param.param_type_name == "option" for param in command.params)


def unformatted(house: House) -> int:
    """Return how often the formatter is switched off, in tests and benchmarks too."""
    return sum(len(re.findall(r"#\s*fmt: (?:off|skip)", text)) for text in house.texts.values())


def exceptions(house: House) -> int:
    """Return how many files are excepted from rules of ruff or mypy as a whole."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    whole = re.compile(r"^# (?:ruff: noqa|flake8: noqa|mypy: )", re.MULTILINE)
    listed = settings["ruff"]["lint"].get("per-file-ignores", {})
    texts = (text for text in house.texts.values() if "noqa" in text or "mypy: " in text)
    return len(listed) + sum(len(whole.findall(text)) for text in texts)


def step_files(model: Path) -> int:
    """Return how many files of Python the third plain step of a text passes on the cpu runtime, with a new token."""
    passed = set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        passed.add(frame.f_code.co_filename)

    with edgedec.load(model, runtime="cpu", n_ctx=64, draft="off") as engine:
        text = engine.stream((5, 6, 7), max_tokens=4, ignore_end=True, temperature=2.0, seed=3)
        ids = [next(text).token_id, next(text).token_id]
        sys.setprofile(note)
        ids.append(next(text).token_id)
        sys.setprofile(None)
        text.close()
    assert len({*ids}) == 3, "a token that was written before is not looked up again; take another seed"
    installed = [Path(module.__file__ or "").parent for name, module in sys.modules.items() if PACKAGE.fullmatch(name)]
    return sum(any(Path(name).is_relative_to(folder) for folder in installed) for name in passed)


def step_files_alone(model: Path) -> int:
    """Return step_files() of a process of its own: what other tests have warmed passes fewer files."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_house; from pathlib import Path; "
    code += f"print(test_house.step_files(Path({str(model)!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    return int(done.stdout)


COUNTS: dict[str, Callable[[House], float]] = {
    "lines of the product": lambda house: sum(text.count("\n") for text in house.product.values()),
    "lines of edgedec/": lambda house: house.lines("edgedec/"),
    "lines of runtimes/": lambda house: house.lines("runtimes/"),
    "lines of apps/": lambda house: house.lines("apps/"),
    "lines of methods/": lambda house: house.lines("methods/"),
    "lines of export/": lambda house: house.lines("export/"),
    "tokens of the product's Python": lambda house: sum(map(len, house.tokens.values())),
    "lines of tests/": lambda house: house.lines("tests/"),
    "lines of benchmarks/": lambda house: house.lines("benchmarks/"),
    "words of docs/": lambda house: sum(
        len((ROOT / name).read_text(encoding="utf-8").split())
        for name in house.files
        if re.match(r"docs/.*\.md$", name)
    ),
    "options of `edgedec run`": lambda house: options_of_run(),
    "public members of Engine, async twins apart": lambda house: len(without_twins(members(Engine))),
    "fields of ForwardItem": lambda house: len(list(whole_fields(ForwardItem))),
    "members of Session": lambda house: len(members(Session)),
    "fields of DraftContext": lambda house: len(list(whole_fields(DraftContext))),
    "groups of plug-ins": lambda house: len(plugins.GROUPS),
    "files of less than 40 lines": House.small_files,
    "star-tuples": House.star_tuples,
    "uses of locals()": lambda house: house.names["locals"],
    "the name `found`, in code": lambda house: house.names["found"],
    "other names that say nothing, in code": lambda house: sum(house.names[name] for name in VAGUE),
    "strings that name a package above": House.upper_names,
    "switches of the formatter": unformatted,
    "files excepted from rules": exceptions,
}
LEAST: dict[str, Callable[[House], float]] = {
    "comments and docstrings, lines of a thousand": lambda house: round(
        1000 * house.comment_lines() / sum(house.product[name].count("\n") for name in house.tokens), 1
    ),
}
"""What may rise, and not fall."""

STEP = "Python files of a plain step"


@cache
def budgets() -> dict[str, dict[str, float]]:
    """Return the table: by what is counted, the limit and the goal."""
    table: dict[str, dict[str, float]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))["budgets"]
    return table


def wrong(name: str, value: float, limit: float) -> str | None:
    """Return what is wrong with a value beside its limit, or None."""
    if name in LEAST:
        return f"{name}: {value} is {limit - value:.1f} below the least, {limit}" if value < limit else None
    if value > limit:
        return f"{name}: {value} is {value - limit} above the limit {limit}; make room first"
    if value < limit * (1 - SLACK):
        return f"{name}: {value} is {limit - value} below the limit {limit}; lower the limit in {TABLE.name}"
    return None


@pytest.mark.parametrize(
    ("name", "value", "limit", "begins"),
    [
        ("lines", 1000, 1000, None),
        ("lines", 990, 1000, None),
        ("lines", 1001, 1000, "lines: 1001 is 1 above the limit 1000"),
        ("lines", 989, 1000, "lines: 989 is 11 below the limit 1000"),
        (next(iter(LEAST)), 90, 100, f"{next(iter(LEAST))}: 90 is 10.0 below the least"),
        (next(iter(LEAST)), 110, 100, None),
    ],
)
def test_a_budget_is_kept_from_both_sides(name: str, value: float, limit: float, begins: str | None) -> None:
    """What is above, and what is a hundredth below, is told with its name and the difference."""
    told = wrong(name, value, limit)
    assert (told is None) == (begins is None)
    assert told is None or told.startswith(begins or "")


def test_tokens_are_those_of_python() -> None:
    """Strings, comments, numbers and operators are one token each; a docstring begins with the line end before it."""
    tokens = TOKEN.findall(
        '\nx = f"{a!r}" + r\'\\d\'  # why\ndef f(*a, b=1.5e-3):\n    """F.\n"""\n    a[...] // 0x1F\n'
    )
    expected = 'x = f"{a!r}" + r\'\\d\' #_why def f ( * a , b = 1.5e-3 ) : \n____"""F.\n""" a [ ... ] // 0x1F'
    assert [token.replace(" ", "_") for token in tokens] == expected.split(" ")


@pytest.mark.slow
def test_the_house_keeps_to_its_budgets(tiny_path: Path) -> None:
    """Every count is at its limit or a little below; and the table has each count, with a goal."""
    house = House(tracked())
    values = {name: count(house) for name, count in (COUNTS | LEAST).items()} | {STEP: step_files_alone(tiny_path)}
    table = budgets()
    assert list(table) == list(values)
    assert all(row.keys() == {"limit", "goal"} for row in table.values())
    if os.environ.get("EDGEDEC_WRITE_TABLE"):
        write(values)
        return
    told = [words for name, value in values.items() if (words := wrong(name, value, table[name]["limit"]))]
    assert not told, "\n".join(told)


def write(values: dict[str, float]) -> None:
    """Write the values into the table where they are better than the limits."""
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, value in values.items():
        (place,) = (i for i, line in enumerate(lines) if line.startswith(f'"{name}"'))
        limit = budgets()[name]["limit"]
        best = max(value, limit) if name in LEAST else min(value, limit)
        lines[place] = re.sub(r"limit = [\d.]+", f"limit = {best}", lines[place])
    TABLE.write_text("".join(lines), encoding="utf-8")
