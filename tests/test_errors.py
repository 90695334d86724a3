"""Errors travel whole, their messages are plain, and numbers of JSON keep their digits."""

import ast
import copy
import importlib
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgedec.drafter import DraftLateError
from edgedec.errors import EdgedecError, OptionError, RuntimeLostError, ScorerError, argument
from edgedec.exact_json import ExactFloat, decimal_of, dumps, exact_float
from edgedec.grammar import Grammar
from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.cli.interrupts import TerminatedError
from edgedec_apps.server.anthropic.api import _shown
from edgedec_apps.server.core.answer import json_line, sse
from edgedec_apps.server.core.bodies import parse_object
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.parts import Block
from edgedec_apps.server.registry.models import CrowdedError
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.fetching.remote_file import WholeFilesOnlyError
from edgedec_runtimes.chat.template import ChatTemplate
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


EXACT = ["0.12345678901234567890", "1e400", "-1e-400", "123456789012345678.5", "1E99999999999999999999999999"]
PLAIN = ["0.5", "1e5", "-0.0", "0.1", "123456789.12345679", "1.50", "5e-324"]


@pytest.mark.parametrize("text", EXACT + PLAIN)
def test_a_number_keeps_its_digits(text: str) -> None:
    """It acts as a float; only a text that no float has is remembered."""
    number = exact_float(text)
    assert isinstance(number, ExactFloat) == (text in EXACT)
    assert number == float(text)
    if text != EXACT[-1]:
        assert decimal_of(number) == Decimal(text)
    value = {"a": [number, {"b": (number,)}], "<": "x"}
    assert dumps(value) == json.dumps(value if text in PLAIN else value | {"a": ["?", {"b": ["?"]}]}).replace(
        '"?"', text
    )


DIGITS = '{"x": [0.12345678901234567890, 1e400], "n": 12345678901234567890}'


def test_digits_pass_through_requests_and_answers() -> None:
    """A body's schema, a call's arguments as an object in an answer, and a template's tojson."""
    value = parse_object(DIGITS.encode())
    assert Grammar.json_schema({"const": value}).source == f'{{"const": {DIGITS}}}'
    assert json_line(value) == DIGITS.encode() + b"\n"
    assert sse(value) == f"data: {DIGITS}\n\n".encode()
    call = ToolCall("f", DIGITS)
    assert DIGITS in dumps(_shown(Block(kind="call", index=0, text=DIGITS, call=call)))
    assert DIGITS in dumps(call.for_template())
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", bos_token="", eos_token="")
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call.for_template()]}]
    assert template.render(messages) == DIGITS
