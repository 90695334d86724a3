"""--json-schema, --regex and --grammar: the text keeps to them, and what is wrong with them is said."""

import json
from pathlib import Path

import pytest
from support.command_line import run_here

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

COMMON = ("--runtime", "cpu", "-t", "0", "-n", "40", "-c", "128", "--draft", "off", "-q")


def test_the_text_keeps_to_what_is_asked(tiny_path: Path, tmp_path: Path) -> None:
    """A schema and a Lark grammar from files, an expression from the command line or the environment."""
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps({"enum": ["gr\u00fcn", "rot"]}), encoding="utf-8")
    lark.write_text('start: "<" /[ab]{2}/ ">"\n', encoding="utf-8")
    result = run_here("run", tiny_path, "x", *COMMON, "--json-schema", schema)
    assert json.loads(result.text) in ("gr\u00fcn", "rot")
    for args, env in (
        (("--grammar", str(lark)), {}),
        (("--regex", "<[ab]{2}>"), {}),
        ((), {"EDGEDEC_REGEX": "<[ab]{2}>"}),
    ):
        result = run_here("run", tiny_path, "x", *COMMON, *args, env=env)
        assert result.text in ("<aa>\n", "<ab>\n", "<ba>\n", "<bb>\n"), result
    answers = run_here("chat", tiny_path, *COMMON, "--regex", "yes|no", stdin=b"Is it?\nAnd now?\n").text.split()
    assert len(answers) == 2
    assert set(answers) <= {"yes", "no"}


def test_what_is_wrong_is_said(tiny_path: Path, tmp_path: Path) -> None:
    """Two of them, one with --ignore-end, a file that is not there or no JSON, a keyword that is not supported."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "contains": {"const": 1}}', encoding="utf-8")
    run = ("run", tiny_path, "x", *COMMON)
    run_here(*run, "--regex", "a", "--json-schema", schema).failed(40, "--json-schema and --regex")
    run_here(*run, "--regex", "a", "--ignore-end").failed(40, "--ignore-end")
    run_here(*run, "--grammar", tmp_path / "none").failed(60, "none")
    run_here(*run, "--json-schema", schema).failed(40, "contains")
    schema.write_text("{", encoding="utf-8")
    run_here(*run, "--json-schema", schema).failed(40, "no JSON")
