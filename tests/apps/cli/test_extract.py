"""edgedec extract: where the passage comes from, and what is printed where."""

import json
from pathlib import Path

import pytest
from support.processes.command_line import run_here

PASSAGE = "b abc\nab cab"


@pytest.mark.slow
def test_each_line_is_a_probability_and_a_quotation(model: Path, tmp_path: Path) -> None:
    """From a file and from a pipe, as text and as JSON; a quotation stays on its line."""
    file = tmp_path / "passage.txt"
    file.write_text(PASSAGE, encoding="utf-8")
    by_file = run_here("extract", model, "a?", "-f", str(file), "--count", "4", "--span-tokens", "7")
    assert by_file.code == 0
    assert "prompt tokens" in by_file.err
    assert "no effect" not in by_file.err
    drafting = "--draft", "suffix", "--draft-option", "tree=grow"
    unused = run_here("extract", model, "a?", "-f", str(file), "--count", "4", "--span-tokens", "7", *drafting)
    assert "--draft, --draft-option: no effect here" in unused.err
    assert unused.text == by_file.text
    by_pipe = run_here("extract", model, "a?", "--count", "4", "--span-tokens", "7", "--json", stdin=PASSAGE.encode())
    found = json.loads(by_pipe.out)
    lines = by_file.text.splitlines()
    assert len(lines) == len(found["spans"]) == 4
    for line, span in zip(lines, found["spans"], strict=True):
        assert line == f"{span['probability']:.4f}  {span['text']}".replace("\n", "␊")
        assert PASSAGE[span["start"] : span["end"]] == span["text"]


def test_what_is_missing_is_said(model: Path) -> None:
    """A passage of nothing, a question of nothing."""
    assert "no text to quote from" in run_here("extract", model, "a?", stdin=b" \n").err
    assert "the question is empty" in run_here("extract", model, " ", stdin=b"x").err
