"""docs/comparison.md: no cell is empty, what we claim has a test that exists, what is said of others has its source."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "comparison.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not beside the tests")


def rows() -> list[list[str]]:
    """Return the cells of each row of the tables, without the headings."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in found if row[1] not in ("edgedec", "---")]


def test_no_cell_is_empty() -> None:
    """Each row has six cells, and a mark in each of the four columns of programs."""
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 6, row
        assert all(row), row
        assert all(cell[0] in "●◐○?" for cell in row[1:5]), row


def test_what_we_claim_has_a_test() -> None:
    """Where edgedec has ●, the row names a test that exists, and a test that is named anywhere exists."""
    for name, ours, *_, tests in rows():
        found = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", tests)
        assert found or not ours.startswith("●"), f"{name}: no test"
        for path, test in found:
            assert (ROOT / path).is_file(), f"{name}: {path}"
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), f"{name}: {path}::{test}"
            assert test or not path.endswith(".py"), f"{name}: {path} names no test"


def test_what_is_said_of_others_has_a_source() -> None:
    """A mark other than "?" is followed by a letter and number that the page leads to a document."""
    text = PAGE.read_text(encoding="utf-8")
    known = set(re.findall(r"^\[([OLS]\d*)\]: https://", text, re.MULTILINE))
    used = set()
    for name, _, *others, _ in rows():
        for cell in others:
            named = re.findall(r"\[([OLS]\d*)\]", cell)
            assert named or cell == "?", f"{name}: {cell} has no source"
            used |= set(named)
    assert used == known
