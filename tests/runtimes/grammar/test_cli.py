"""--json-schema and --grammar, which are one: the text keeps to them, and what is wrong with them is said."""

import json
from pathlib import Path

import pytest
from support.processes.command_line import run_here

COMMON = ("--runtime", "cpu", "-t", "0", "-n", "40", "-c", "128", "--draft", "off", "-q")


@pytest.mark.slow
def test_the_text_keeps_to_what_is_asked(tiny_path: Path, tmp_path: Path) -> None:
    """A schema and a Lark grammar from files, an expression from the command line."""
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps({"enum": ["gr\u00fcn", "rot"]}), encoding="utf-8")
    lark.write_text('start: "<" /[ab]{2}/ ">"\n', encoding="utf-8")
    result = run_here("run", tiny_path, "x", *COMMON, "--json-schema", schema)
    assert json.loads(result.text) in ("gr\u00fcn", "rot")
    for args in (("--grammar", str(lark)), ("--grammar", "regex:<[ab]{2}>")):
        result = run_here("run", tiny_path, "x", *COMMON, *args)
        assert result.text in ("<aa>\n", "<ab>\n", "<ba>\n", "<bb>\n"), result
    answers = run_here(
        "chat", tiny_path, *COMMON, "--grammar", "regex:yes|no", stdin=b"Is it?\nAnd now?\n"
    ).text.split()
    assert len(answers) == 2
    assert set(answers) <= {"yes", "no"}


def test_what_is_wrong_is_said(tiny_path: Path, tmp_path: Path) -> None:
    """Two of them, one with ignore-end, a file that is not there or no JSON, a keyword that is not supported."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "contains": {"const": 1}}', encoding="utf-8")
    run = ("run", tiny_path, "x", *COMMON)
    run_here(*run, "--grammar", "regex:a", "--method=ignore-end").failed(40, "--method ignore-end")
    run_here(*run, "--grammar", tmp_path / "none").failed(60, "none")
    run_here(*run, "--json-schema", schema).failed(40, "contains")
    schema.write_text("{", encoding="utf-8")
    run_here(*run, "--json-schema", schema).failed(40, "no JSON")


@pytest.mark.slow
def test_a_cut_text_is_told_by_the_exit_code(tiny_path: Path, tmp_path: Path) -> None:
    """45 and a sentence where a text was cut before it was whole, in JSON too; 0 where it is whole."""
    schema, out = tmp_path / "schema.json", tmp_path / "out.json"
    schema.write_text(json.dumps({"const": {"first": 1, "second": 2}}), encoding="utf-8")
    run = ("run", tiny_path, "x", *COMMON, "--json-schema", schema)
    cut = run_here(*run, "-n", "9")
    assert (cut.code, cut.text) == (45, '{"first":\n')
    assert cut.err.startswith("edgedec: the text was cut after 9 tokens, before its grammar allowed an end")
    assert len(cut.err.splitlines()) == 1
    full = run_here("run", tiny_path, "x" * 100, *COMMON, "--json-schema", schema, "--raw")
    assert full.code == 0
    full = run_here("run", tiny_path, "x" * 119, *COMMON, "--json-schema", schema, "--raw", "--json-out", out)
    assert full.code == 45
    assert json.loads(out.read_text(encoding="utf-8"))["is_whole"] is False
    node = {"type": "object", "properties": {"first": {"const": 1}}, "required": ["first"]}
    for further in ({}, {"additionalProperties": False}):
        schema.write_text(json.dumps(node | further), encoding="utf-8")
        assert run_here(*run, "-n", "9", "--json-out", out).code == 45
        notes = json.loads(out.read_text(encoding="utf-8"))["stats"]["notes"]
        assert any("additionalProperties" in note for note in notes) == (not further), notes
    assert run_here("run", tiny_path, "x", *COMMON, "-n", "9").code == 0
    assert run_here("run", tiny_path, "x", *COMMON, "-n", "3", "--grammar", "regex:[ab]{1,9}").code == 0
    chat = run_here("chat", tiny_path, *COMMON, "--grammar", "regex:abc", "-n", "2", stdin=b"Hi\nAgain\n")
    assert chat.err.count("before its grammar allowed an end") == 2


@pytest.mark.slow
def test_a_text_is_closed_in_time(tiny_path: Path, tmp_path: Path) -> None:
    """json-close: the JSON is whole at every length that is enough; too few are refused first."""
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 2}), encoding="utf-8")
    run = ("run", tiny_path, "x", *COMMON, "--json-schema", schema)
    for n in (12, 20):
        result = run_here(*run, "-n", str(n), "--method", "json-close")
        assert result.code == 0
        assert len(json.loads(result.text)) >= 2
    run_here(*run, "-n", "5", "--method", "json-close").failed(
        40, "--method json-close must have room", "more with --max-tokens"
    )
    run_here("run", tiny_path, "x", *COMMON, "--method", "json-close").failed(
        40, "--method json-close needs a grammar; give --json-schema"
    )
