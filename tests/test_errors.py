"""Errors travel: a process pool, and the pipe to a model's process, get each one whole. Messages are plain."""

import ast
import copy
import importlib
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgedec.drafter import DraftLateError
from edgedec.errors import EdgedecError, OptionError, RuntimeLostError, ScorerError, argument
from edgedec_apps.cli.interrupts import TerminatedError
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.registry.models import CrowdedError
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.fetching.remote_file import WholeFilesOnlyError
from edgedec_runtimes.tokenizer.metadata import UncoveredError

ROOT = Path(__file__).parent.parent
MESSAGE = f"leave {argument('n_ctx')} out"


# How each error with a constructor of its own is made; the others take a message.
MADE: dict[type[EdgedecError], Callable[[], EdgedecError]] = {
    OptionError: lambda: OptionError("n_ctx", -1, "it must be positive"),
    RuntimeLostError: lambda: RuntimeLostError("the machine is gone", "start it again"),
    ScorerError: lambda: ScorerError(MESSAGE, ("a text",)),
    ApiError: lambda: ApiError(MESSAGE, status=503, code="closing", param="n", retry_after_s=5),
    CrowdedError: lambda: CrowdedError(MESSAGE, replace),  # type: ignore[arg-type]
    DraftLateError: lambda: DraftLateError(MESSAGE, is_last=True),
    TerminatedError: lambda: TerminatedError(15),
    NeedsDownloadError: lambda: NeedsDownloadError("hf:a/b", "it is a tile file", 2**30),
    WholeFilesOnlyError: lambda: WholeFilesOnlyError(MESSAGE, 2**20),
    UncoveredError: lambda: UncoveredError(SimpleNamespace(paths=["m.gguf"]), "it is new"),  # type: ignore[arg-type]
}


def _subclasses(kind: type[EdgedecError]) -> Iterator[type[EdgedecError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)


def _import_all_errors() -> None:
    """Import each module of the packages in which a class of the name XError is defined."""
    for path in (file for folder in ("edgedec", "*/edgedec_*") for file in ROOT.glob(f"{folder}/**/*.py")):
        text = path.read_text(encoding="utf-8")
        if "Error(" in text and any(
            isinstance(node, ast.ClassDef) and node.name.endswith("Error") for node in ast.parse(text).body
        ):
            parts = path.relative_to(ROOT).with_suffix("").parts
            importlib.import_module(".".join(parts[0 if parts[0] == "edgedec" else 1 :]))


@pytest.mark.slow
def test_every_error_is_the_same_after_pickling_and_copying() -> None:
    _import_all_errors()
    kinds = [kind for kind in _subclasses(EdgedecError) if kind.__module__.startswith("edgedec")]
    assert len(kinds) > 30
    assert {kind for kind in kinds if "__init__" in vars(kind)} <= set(MADE)
    for kind in kinds:
        error = MADE[kind]() if kind in MADE else kind(MESSAGE)
        vars(error)["noticed_by"] = "an application"
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is kind
            assert (again.marked, again.args, vars(again)) == (error.marked, error.args, vars(error)), kind
            assert again.naming({"n_ctx": "--context"}) == error.naming({"n_ctx": "--context"})


def test_a_value_that_does_not_travel_becomes_its_repr() -> None:
    value: Any = lambda: 0  # noqa: E731
    again = pickle.loads(pickle.dumps(OptionError("predicate", value, "it must be named")))
    assert (again.value, again.argument) == (repr(value), "predicate")


# As a word: no option, no name in code.
DRAFT = re.compile(r"(?<![\w.'\"/-])draft[a-z]*(?![\w'\"=/(]|-\w)", re.IGNORECASE)


def _messages(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings; {} stands for a value."""
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    parts = [part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values]
    others = {id(node) for node in (*values, *parts)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.value


@pytest.mark.slow
def test_no_sentence_needs_the_word_draft_twice() -> None:
    """Neither a message nor the help of an option: nobody reads "the draft model that drafts drafts"."""
    files = [file for folder in ("edgedec", "*/edgedec_*") for file in ROOT.glob(f"{folder}/**/*.py")]
    sources = [source for file in files if "draft" in (source := file.read_text(encoding="utf-8"))]
    texts = [text for source in sources for text in _messages(ast.parse(source))]
    sentences = [sentence for text in texts if "draft" in text for sentence in re.split(r"\.\s", text)]
    assert len(sentences) > 100
    assert not [sentence for sentence in sentences if len(DRAFT.findall(sentence)) > 1]
