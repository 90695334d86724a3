"""The list of changes that must make a test fail: it fits the code, and every change of it is caught."""

import ast
from collections import Counter

import mutations
import pytest
from support import lanes

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


def is_in_quick(test: str) -> bool:
    """Return whether the quick lane runs a test, or one of a file: a guard, or one that is not marked slow."""
    file, _, name = test.partition("::")
    promised = [each for tests in lanes.promises().values() for each in tests if each.partition("::")[0] == file]
    if any(each.startswith(test) or test.startswith(each) for each in promised):
        return True
    text = (mutations.ROOT / file).read_text(encoding="utf-8")
    return not lanes.SLOW_FILE.search(text) and any(
        isinstance(function, ast.FunctionDef)
        and function.name.startswith("test_")
        and function.name.startswith(name.partition("[")[0])
        and not any("mark.slow" in ast.unparse(decorator) for decorator in function.decorator_list)
        for function in ast.parse(text).body
    )


def test_the_quick_lane_alone_catches_three_quarters() -> None:
    """Of the changes: those that `mutations.py --lane quick` caught, as the list says, by tests still in that lane."""
    caught = [number for number in CAUGHT if LISTED[number].quick and any(map(is_in_quick, LISTED[number].tests))]
    assert len(caught) >= 0.75 * len(CAUGHT)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", CAUGHT, ids=[LISTED[number].name for number in CAUGHT])
def test_a_change_is_caught(number: int) -> None:
    """By one of the tests that the list names for it."""
    result, said = mutations.outcome(LISTED[number], number)
    assert result == "caught", said[-3000:]
