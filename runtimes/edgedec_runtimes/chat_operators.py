"""Arithmetic and comparisons of chat templates, each with the price it pays before it runs."""

import operator
import re
from collections.abc import Callable
from sys import getsizeof
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edgedec_runtimes.chat_budget import CONTAINERS, MAX_INT_BITS, Budget, listed

_STAR_WIDTH = re.compile(r"%[-+ #0-9.]*\*")
_SEQUENCES = (str, list, tuple)

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, holder: item in holder,
    "notin": lambda item, holder: item not in holder,
}


def compare(budget: Budget, left: Any, name: str, right: Any) -> Any:
    """Return `left name right`, `name` as Jinja's parser calls it ("eq", "lteq", "notin", ...)."""
    budget.step()
    right = listed(right)
    if name in ("in", "notin"):
        budget.weigh(left) if isinstance(right, dict) else budget.weigh(left, right)
    elif isinstance(left, str) and isinstance(right, str):
        budget.spend(min(len(left), len(right)))
    elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS) and left and right:
        budget.weigh(left, right)
    return _COMPARE[name](left, right)


def widths(text: str) -> int:
    """Return the sum of the numbers in a format, each of which may be a width."""
    return sum(map(int, re.findall(r"\d+", text)))


def pay_percent(budget: Budget, text: Any, args: Any) -> None:
    """Pay for `text % args`: any % may print all of the arguments."""
    text = str(text)
    if _STAR_WIDTH.search(text):
        raise SecurityError("'*' as a width is not available")
    budget.spend(getsizeof(text) + widths(text))
    budget.spend(text.count("%") * budget.weigh(args))


def pay_arithmetic(budget: Budget, left: Any, name: str, right: Any) -> None:
    """Pay for `left name right`, `name` one of + - * / // % **."""
    if name == "%" and isinstance(left, str):
        pay_percent(budget, left, right)
    elif isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
        repeats = [value for value in (left, right) if isinstance(value, int) and name == "*"]
        budget.spend((getsizeof(left) + getsizeof(right)) * max([0, *repeats] if repeats else [1]))
    elif isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
        if n_bits > MAX_INT_BITS:
            raise SecurityError("integers of more than 10,000 digits are not available")
        budget.step()
    elif not isinstance(left, int | float | Undefined) or not isinstance(right, int | float | Undefined):
        raise TypeError(f"unsupported operands of {name}: {type(left).__name__} and {type(right).__name__}")
