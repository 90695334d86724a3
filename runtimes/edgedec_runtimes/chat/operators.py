"""Arithmetic and comparisons of chat templates, each with the price that it pays before it runs."""

import operator
import re
from collections.abc import Callable
from sys import getsizeof
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edgedec_runtimes.chat.budget import CONTAINERS, MAX_INT_BITS, STEP_BYTES, Budget, listed, too_large

_STAR_WIDTH = re.compile(r"%[-+ #0-9.]*\*")
_SEQUENCES = (str, list, tuple)
_OPERANDS = (*_SEQUENCES, int, float, Undefined)  # an Undefined raises its own error

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
    """Return the result of a comparison after paying for it; `name` is Jinja's ("eq", "lteq", "notin", ...)."""
    right = listed(right)
    if name in ("in", "notin"):
        budget.weigh(left if isinstance(right, dict) else (left, right))
    elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS) and left and right:
        budget.weigh(left, right)
    else:
        budget.step()
    return _COMPARE[name](left, right)


def widths(text: str) -> int:
    """Return the sum of all numbers in a format, as each of them may be a width."""
    return sum(map(int, re.findall(r"\d+", text)))


def pay_percent(budget: Budget, text: Any, args: Any) -> None:
    """Pay for `text % args`, in which any % may print all of the arguments."""
    budget.weigh(text)
    text = str(text)
    if _STAR_WIDTH.search(text):
        raise SecurityError("'*' as a width is not available")
    budget.spend(widths(text))
    budget.spend(text.count("%") * budget.weigh(args))


def _content_bytes(value: Any) -> int:
    return getsizeof(value) - getsizeof(type(value)()) if isinstance(value, _SEQUENCES) else 0


def pay_arithmetic(budget: Budget, left: Any, name: str, right: Any) -> None:
    """Pay for the operation `left name right` and its result; `name` is one of + - * / // % **."""
    if name == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):  # the most frequent case
        budget.spend(getsizeof(left) + getsizeof(right))
    elif name == "%" and isinstance(left, str):
        pay_percent(budget, left, right)
    elif not isinstance(left, _OPERANDS) or not isinstance(right, _OPERANDS):
        raise TypeError(f"unsupported operands of {name}: {type(left).__name__} and {type(right).__name__}")
    elif isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
        times = max(0, next((n for n in (left, right) if isinstance(n, int)), 1))
        budget.spend(2 * STEP_BYTES + times * (_content_bytes(left) + _content_bytes(right)))
    elif isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
        if n_bits > MAX_INT_BITS:
            raise too_large()
        budget.spend(STEP_BYTES + max(0, n_bits) // 8)
    else:
        budget.step()
