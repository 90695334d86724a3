"""Tasks with a checker, made from a seed: nobody can have trained on them, and every answer is right or wrong.

Three kinds: "arithmetic" (word problems of two to four steps), "dates" (days between, and so many days later), and
"functions" (a small Python function of a list of numbers, with public tests and hidden ones).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise
from random import Random

ANSWER = r"Answer:\W*(-?\d[\d,]*(?:-\d\d-\d\d)?)"
"""The regular expression of an answer to arithmetic and dates; its last match in a text counts."""

_ARITHMETIC = """Work it out in short steps, one line a step, as in this example.

Ana has 3 boxes with 14 pens each. Then 2 bags with 5 pens each are added. Then all pens are shared equally by 4 \
people, and only one share is kept. Then 7 pens are sold. How many pens does Ana have now?
Boxes: 3 * 14 = 42
Added: 2 * 5 = 10, 42 + 10 = 52
Shared: 52 / 4 = 13
Sold: 13 - 7 = 6
Answer: 6

"""
_DATES = """Work it out in short steps, one line a step, as in these examples.

Which date is 40 days after 20 January 2024?
January has 31 days: 31 - 20 = 11 days are left, 40 - 11 = 29
February has 29 days in 2024: 29 - 29 = 0
Answer: 2024-02-29

Which date is 25 days before 10 May 2023?
May: 10 days back is 30 April, 25 - 10 = 15
April: 30 - 15 = 15
Answer: 2023-04-15

How many days are there from 20 June 2023 to 4 August 2023, not counting the first day?
June: 30 - 20 = 10
July: 31, 10 + 31 = 41
August: 4, 41 + 4 = 45
Answer: 45

"""
_NAMES = ("Mara", "Ivo", "Nadia", "Tomas", "Lena", "Omar", "Ruth", "Piet")
_THINGS = ("pencils", "stamps", "apples", "tiles", "bolts", "cups", "cards", "bricks")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the function that a task asks for: solve(numbers) must return `expected`."""

    numbers: tuple[int, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class MadeTask:
    """A task.

    Attributes:
        id: Its kind and number.
        kind: "arithmetic", "dates" or "functions".
        prompt: What the model is asked, as a user's message.
        answer: The right answer as text; empty for functions.
        public: For functions: tests that the prompt names.
        hidden: For functions: tests that only the checker knows.
    """

    id: str
    kind: str
    prompt: str
    answer: str = ""
    public: tuple[Call, ...] = ()
    hidden: tuple[Call, ...] = ()


def made_tasks(kind: str, n: int, seed: int = 0) -> list[MadeTask]:
    """Return n tasks of a kind; task i of a seed is the same whatever n is (KeyError for an unknown kind)."""
    make = _MAKERS[kind]
    return [make(f"{kind}-{seed}-{i}", Random(f"{kind} {seed} {i}")) for i in range(n)]


def given_answer(text: str) -> str | None:
    """Return the last answer that a text states, without thousands' commas; None where it states none.

    >>> given_answer("So 3 are left.\\nAnswer: **1,205**"), given_answer("Answer: 2024-03-09"), given_answer("12")
    ('1205', '2024-03-09', None)
    """
    found = re.findall(ANSWER, text)
    return found[-1].replace(",", "") if found else None


def is_right(task: MadeTask, text: str) -> bool:
    """Return whether a text states the answer of a task of arithmetic or dates."""
    return given_answer(text) == task.answer


def _arithmetic(id: str, rng: Random) -> MadeTask:
    """Make a word problem: a stock that is packed, added to, given away and shared."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each = rng.randint(3, 12), rng.randint(4, 15)
    amount = boxes * each
    lines = [f"{name} has {boxes} boxes with {each} {thing} each."]
    for _ in range(rng.randint(1, 3)):
        amount, line = _change(rng, amount, thing)
        lines.append(line)
    lines.append(f"How many {thing} does {name} have now?")
    return MadeTask(id, "arithmetic", _ARITHMETIC + " ".join(lines), str(amount))


def _change(rng: Random, amount: int, thing: str) -> tuple[int, str]:
    """Return what is left after a random change, and the sentence about it."""
    kind = rng.randrange(4)
    if kind == 0:
        bags, each = rng.randint(2, 9), rng.randint(3, 12)
        return amount + bags * each, f"Then {bags} bags with {each} {thing} each are added."
    if kind == 1:
        lost = rng.randint(amount // 10, amount // 2)
        return amount - lost, f"Then {lost} {thing} are sold."
    parts = [n for n in range(2, 10) if amount % n == 0]
    if kind == 2 and parts:
        n = rng.choice(parts)
        return amount // n, f"Then all {thing} are shared equally by {n} people, and only one share is kept."
    found = rng.randint(5, 99)
    return amount + found, f"Then {found} {thing} are found."


def _dates(id: str, rng: Random) -> MadeTask:
    """Make a question about dates: so many days later or earlier, or the days between two dates."""
    start = date(2023, 1, 1) + timedelta(days=rng.randrange(1500))
    days = rng.randint(5, 35)
    other = start + timedelta(days=days)
    kind = rng.randrange(3)
    if kind == 0:
        asked = f"Which date is {days} days after {_said(start)}?"
        return MadeTask(id, "dates", _DATES + asked, other.isoformat())
    if kind == 1:
        asked = f"Which date is {days} days before {_said(other)}?"
        return MadeTask(id, "dates", _DATES + asked, start.isoformat())
    asked = f"How many days are there from {_said(start)} to {_said(other)}, not counting the first day?"
    return MadeTask(id, "dates", _DATES + asked, str(days))


def _said(day: date) -> str:
    return f"{day.day} {day:%B %Y}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a function's description, with what it does."""

    words: str
    does: Callable[[Sequence[int]], Sequence[int]]


def _filters(rng: Random) -> _Part:
    """Return a random rule for the numbers that are kept."""
    k, low = rng.randint(2, 5), rng.randint(-3, 8)
    return rng.choice(
        [
            _Part(f"Keep only the numbers that are divisible by {k}.", lambda xs: [x for x in xs if x % k == 0]),
            _Part(f"Keep only the numbers greater than {low}.", lambda xs: [x for x in xs if x > low]),
            _Part("Keep only every second number, the first one included.", lambda xs: list(xs)[::2]),
            _Part("Drop repeated numbers, keeping the first of each.", lambda xs: list(dict.fromkeys(xs))),
            _Part("Keep only the numbers greater than the one directly before them.", _rises),
        ]
    )


def _rises(xs: Sequence[int]) -> list[int]:
    return [b for a, b in pairwise(xs) if b > a]


def _maps(rng: Random) -> _Part:
    """Return a random change of every number."""
    k = rng.randint(2, 9)
    return rng.choice(
        [
            _Part(f"Then add {k} to each of them.", lambda xs: [x + k for x in xs]),
            _Part(f"Then multiply each of them by its position, counted from {k}.", lambda xs: _weighted(xs, k)),
            _Part(
                "Then square the negative ones and leave the others.", lambda xs: [x * x if x < 0 else x for x in xs]
            ),
            _Part(f"Then replace those above {k} by {k}.", lambda xs: [min(x, k) for x in xs]),
        ]
    )


def _weighted(xs: Sequence[int], start: int) -> list[int]:
    return [x * i for i, x in enumerate(xs, start)]


def _ends(rng: Random) -> tuple[str, Callable[[Sequence[int]], int]]:
    """Return a random number that is made of what is left."""
    k = rng.randint(2, 7)
    return rng.choice(
        [
            ("Return their sum, 0 if none are left.", lambda xs: sum(xs)),
            (f"Return how many of them are at least {k}.", lambda xs: sum(x >= k for x in xs)),
            ("Return the largest minus the smallest, 0 if none are left.", lambda xs: max(xs) - min(xs) if xs else 0),
            (f"Return their sum modulo {k}.", lambda xs: sum(xs) % k),
        ]
    )


def _functions(id: str, rng: Random) -> MadeTask:
    """Make a function of three parts, with two public tests and eight hidden ones."""
    first, second, (words, last) = _filters(rng), _maps(rng), _ends(rng)

    def test() -> Call:
        numbers = tuple(rng.randint(-9, 20) for _ in range(rng.randint(4, 9)))
        return Call(numbers, last(second.does(first.does(numbers))))

    public = (test(), test())
    hidden = (*(test() for _ in range(7)), Call((), last(second.does(first.does(())))))
    shown = "\n".join(f"solve({list(each.numbers)}) == {each.expected}" for each in public)
    prompt = (
        "Write a Python function solve(numbers) that takes a list of whole numbers. "
        f"{first.words} {second.words} {words} For example:\n{shown}\n"
        "Answer with the function in one block of code, without explanations."
    )
    return MadeTask(id, "functions", prompt, public=public, hidden=hidden)


_MAKERS: Mapping[str, Callable[[str, Random], MadeTask]] = {
    "arithmetic": _arithmetic,
    "dates": _dates,
    "functions": _functions,
}
KINDS = tuple(_MAKERS)
