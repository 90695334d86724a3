"""The list of changes that must make a test fail: it fits the code, and every change of it is caught."""

from collections import Counter

import mutations
import pytest

LISTED = mutations.mutations()
CAUGHT = [number for number, each in enumerate(LISTED) if not each.reason]
GUESTS = mutations.ROOT / "methods" / "edgedec_methods"


def test_each_change_fits_the_code() -> None:
    """The text that it changes is in its file once, and its tests exist; one in twenty, at most, has a reason."""
    for each in LISTED:
        assert each.becomes != each.text, each.name
        each.changed()  # raises where the text is not there once
        assert bool(each.tests) != bool(each.reason), each.name
    for test in {test for each in LISTED for test in each.tests}:
        file, _, function = test.partition("::")
        path = mutations.ROOT / file
        assert path.is_file(), test
        assert not function or f"def {function.partition('[')[0]}(" in path.read_text(encoding="utf-8"), test
    assert 20 * (len(LISTED) - len(CAUGHT)) <= len(LISTED)


def test_each_guest_has_two_changes() -> None:
    """Every module of the methods, so that a new one comes with its own."""
    counts = Counter(each.file for each in LISTED)
    files = [path.relative_to(mutations.ROOT).as_posix() for path in GUESTS.rglob("*.py") if path.stem != "__init__"]
    assert {file: counts[file] for file in files if counts[file] < 2} == {}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", CAUGHT, ids=[LISTED[number].name for number in CAUGHT])
def test_a_change_is_caught(number: int) -> None:
    """By one of the tests that the list names for it."""
    result, said = mutations.outcome(LISTED[number], number)
    assert result == "caught", said[-3000:]
