"""Made tasks: the same for a seed, right answers are taken, wrong ones and harmful code are not."""

import re
import sys
from datetime import date
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "answers"))

from function_runner import code_of, n_passed
from made_tasks import KINDS, Call, given_answer, is_right, made_tasks


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_are_made_from_their_seed(kind: str) -> None:
    """More tasks begin with the same ones; another seed makes others; no two prompts are equal."""
    tasks = made_tasks(kind, 60)
    assert made_tasks(kind, 5) == tasks[:5]
    assert made_tasks(kind, 5, seed=1) != tasks[:5]
    assert len({task.prompt for task in tasks}) == 60


def test_arithmetic_is_right() -> None:
    """Each sentence of a problem is worked out again, from its words."""
    for task in made_tasks("arithmetic", 200):
        problem = task.prompt.split("\n\n")[-1]
        amount = 0
        for sentence in problem.split(". "):
            numbers = [int(number) for number in re.findall(r"\d+", sentence)]
            if "boxes" in sentence:
                amount = numbers[0] * numbers[1]
            elif "bags" in sentence:
                amount += numbers[0] * numbers[1]
            elif "sold" in sentence:
                amount -= numbers[0]
            elif "shared" in sentence:
                amount, rest = divmod(amount, numbers[0])
                assert rest == 0
            elif "found" in sentence:
                amount += numbers[0]
            else:
                assert sentence.startswith("How many")
        assert task.answer == str(amount)
        assert amount >= 0


def test_dates_are_right() -> None:
    """Each question is answered again from its words."""
    months = {f"{date(2000, m, 1):%B}": m for m in range(1, 13)}
    for task in made_tasks("dates", 200):
        question = task.prompt.split("\n\n")[-1]
        days = [date(int(y), months[m], int(d)) for d, m, y in re.findall(r"(\d+) ([A-Z]\w+) (\d{4})", question)]
        if len(days) == 2:
            assert task.answer == str((days[1] - days[0]).days)
        else:
            n = int(re.findall(r"(\d+) days", question)[0])
            assert (date.fromisoformat(task.answer) - days[0]).days == (n if "after" in question else -n)


def test_answers() -> None:
    """The last answer counts, whatever stands around it."""
    (task,) = made_tasks("arithmetic", 1)
    assert is_right(task, f"Answer: 1\nAnswer: **{task.answer}**.")
    assert not is_right(task, f"{task.answer}")
    assert not is_right(task, f"Answer: {task.answer}0")
    assert given_answer("Answer: 2024-03-09 or so") == "2024-03-09"
    assert given_answer("") is None


DOUBLE = (Call((1, 2), 6), Call((), 0))


@pytest.mark.slow
def test_functions_are_run() -> None:
    """Right, wrong, failing and printing functions; the last block of an answer counts."""
    good = "```python\nfrom typing import List\ndef solve(numbers):\n    print(1)\n    return 2 * sum(numbers)\n```"
    assert n_passed(f"First:\n```\nx\n```\nThen:\n{good}", DOUBLE) == 2
    assert n_passed("def solve(numbers):\n    return 6", DOUBLE) == 1
    assert n_passed("def solve(numbers):\n    return 6.0", DOUBLE) == 0
    assert n_passed("def solve(numbers):\n    return numbers[0] + 5", DOUBLE) == 1
    assert n_passed("def other(numbers):\n    return 6", DOUBLE) == 0
    assert n_passed("def solve(:", DOUBLE) == 0
    assert n_passed("", DOUBLE) == 0


@pytest.mark.slow
def test_functions_that_never_end_or_take_all_memory_fail() -> None:
    """They are ended by their limits."""
    assert n_passed("def solve(numbers):\n    while True: pass", DOUBLE) == 0
    assert n_passed("def solve(numbers):\n    return len([0] * 10**11)", DOUBLE) == 0


@pytest.mark.parametrize(
    "code",
    [
        *("import os", "import subprocess", "from typing import sys"),
        *("import collections; collections.abc.sys.exit()", "open('x', 'w')", "().__class__"),
        *("__import__('os')", "eval('1')", "getattr(1, 'x')", "class A: pass", "'{0.__class__}'.format(1)"),
        *("with x: pass", "global x", "(i for i in ()).gi_frame"),
    ],
)
def test_code_that_could_reach_outside_is_not_run(code: str) -> None:
    """It is refused by its syntax tree."""
    assert code_of(code) is None
    assert code_of(f"def solve(numbers):\n    return 1\n{code}") is None


def test_code_that_may_run() -> None:
    """Ordinary functions, with harmless modules."""
    for code in ("import math\ndef solve(n):\n    return math.floor(1.5)", "from itertools import chain\n"):
        assert code_of(code) == code
