"""The cost of one rendering of an untrusted chat template: a budget of bytes and steps, and a deadline.

Every value that a template makes is paid for and weighed. So a template can't build anything larger than the budget,
however small it is in memory, or nested so deeply that the stack overflows. An operation that makes more than it reads,
or takes longer than reading, pays for that before it runs. So no single operation takes long, and the deadline and the
token that cancels are looked at between two of them. A step (an iteration, a call) costs 32 bytes.
"""

import re
from collections.abc import Iterable
from operator import length_hint
from string import Formatter
from sys import getsizeof
from time import perf_counter
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edgedec.progress import CancelToken

LIMIT_BYTES = 64 << 20
LIMIT_S = 5.0
STEP_BYTES = 32
MAX_INT_BITS = 33_219  # 10,000 digits
MAX_DEPTH = 200  # of lists in lists; tools and messages have a few dozen

_ATOMS = (str, int, float, type(None), range, Undefined)
# Any, for isinstance: types of the standard library that have no public name.
_LIST_ITERATOR: Any = type(iter([]))
_CONTAINERS: Any = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))
_STAR_WIDTH = re.compile(r"%[-+ #0-9.]*\*")
_PLAIN: Any = (*_ATOMS, *_CONTAINERS)


class Budget:
    """The bytes that are left for one rendering, its deadline, and the token that cancels it."""

    __slots__ = ("_cancel", "_deadline_s", "left_bytes")

    def __init__(self, cancel: CancelToken | None = None) -> None:
        self.left_bytes = LIMIT_BYTES
        self._deadline_s = perf_counter() + LIMIT_S
        self._cancel = cancel or CancelToken()

    def spend(self, n_bytes: int) -> None:
        """Take `n_bytes` from the budget.

        Raises:
            SecurityError: The budget or the time is used up.
            CancelledError: The rendering was cancelled.
        """
        left_bytes = self.left_bytes - n_bytes
        if not 0 <= left_bytes <= self.left_bytes:  # refuses a negative price and a NaN, too
            raise SecurityError(
                f"it needs more than {LIMIT_BYTES >> 20} MiB or {LIMIT_BYTES // STEP_BYTES:,} steps; "
                f"shorten the conversation or check the template"
            )
        self.left_bytes = left_bytes
        if perf_counter() > self._deadline_s:
            raise SecurityError(f"it ran for more than {LIMIT_S:g} s; shorten the conversation or check the template")
        self._cancel.check("render the chat template")

    def step(self, n_steps: int = 1) -> None:
        """Pay for `n_steps` steps."""
        self.spend(STEP_BYTES * n_steps)

    def weigh(self, value: Any) -> int:
        """Return the bytes of a value and of all that it holds. What is reached twice counts twice.

        A list that contains another one twice, and so on for a hundred levels, is small in memory and takes for ever
        to print, compare or hash.

        Raises:
            SecurityError: It weighs more than is left; it holds what is no plain data (a macro, a namespace, a
                function); or it is nested so deeply that hashing it could overflow the stack.
        """
        n_bytes, level = 0, [value]
        for _ in range(MAX_DEPTH):
            deeper: list[Any] = []
            for each in level:
                n_bytes += STEP_BYTES + getsizeof(each)
                if isinstance(each, _ATOMS):
                    continue
                if n_bytes > self.left_bytes:
                    break
                deeper.extend(plain(each))
                if isinstance(each, dict):
                    deeper.extend(each.values())
            if n_bytes > self.left_bytes:
                self.spend(n_bytes)
            if not deeper:
                return n_bytes
            level = deeper
        raise SecurityError(f"data nested more than {MAX_DEPTH} deep is not available")

    def made(self, value: Any) -> Any:
        """Pay for a value that was just made, and return it.

        A generator is run to its end, so that generators can't be chained, and comes back as an iterator.
        """
        if isinstance(value, GeneratorType):
            return iter(self.made(list(value)))
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise too_large()
        if isinstance(value, _CONTAINERS):
            self.weigh(value)
        self.spend(getsizeof(value))
        return value

    def size(self, value: Any) -> int:
        """Return the bytes of a text's characters, or of all that a container holds; 1 for anything else."""
        if isinstance(value, str):
            return len(value) * (1 if value.isascii() else 4)
        if isinstance(value, range):
            return STEP_BYTES * len(value)
        return self.weigh(value) if isinstance(value, _CONTAINERS) else 1


def too_large() -> SecurityError:
    """Return the error for an integer with which arithmetic could take for ever."""
    return SecurityError("integers of more than 10,000 digits are not available")


def plain(value: Any) -> Any:
    """Return a value that is plain data (SecurityError for another one, as what it holds was not weighed)."""
    if not isinstance(value, _PLAIN):
        raise SecurityError(f"a {type(value).__name__} is no text or plain data")
    return value


def listed(value: Any) -> Any:
    """Return an iterator, as `Budget.made` makes it, as a list; any other value as it is."""
    return list(value) if isinstance(value, _LIST_ITERATOR) else value


def pay_step(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step: the operation makes nothing larger than what it reads."""
    budget.step()


def pay_items(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step for each item of `value`."""
    budget.step(1 + length_hint(value))


def pay_pieces(budget: Budget, text: Any, separator: Any = None, *args: Any) -> None:
    """Pay for one step for each piece into which `text` is taken apart."""
    budget.step(1 + (text.count(separator) if isinstance(separator, str) else budget.size(text) // 2))


def pay_product(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for the size of `value` times that of the arguments, of which an integer may be a width."""
    others = (*args, *kwargs.values())
    times = sum(abs(each) if isinstance(each, int) else budget.size(each) for each in others)
    budget.spend(budget.size(value) * (1 + times))


def _pay_widths(budget: Budget, text: str, args: Iterable[Any]) -> None:
    """Pay for formatting, in which each number in `text` may be a width, and all of it may print all arguments."""
    widths = sum(map(int, re.findall(r"\d+", text)))
    budget.spend(len(text) * (1 + widths + sum(map(budget.size, args))))


def pay_format(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for `text.format(...)`."""
    if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text)):
        raise SecurityError("a format inside a format is not available")
    _pay_widths(budget, text, (*args, *kwargs.values()))


def pay_percent(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for `text % args`."""
    if _STAR_WIDTH.search(str(text)):
        raise SecurityError("'*' as a width is not available")
    _pay_widths(budget, str(text), (*args, *kwargs.values()))


_SEQUENCES = (str, list, tuple)
_OPERANDS = (*_SEQUENCES, int, float, Undefined)  # an Undefined raises its own error


def pay_arithmetic(budget: Budget, left: Any, name: str, right: Any) -> None:
    """Pay for what the operation `left name right` makes; `name` is one of + - * / // % **."""
    budget.step()
    if name == "%" and isinstance(left, str):
        pay_percent(budget, left, plain(right))
    elif not isinstance(left, _OPERANDS) or not isinstance(right, _OPERANDS):
        raise TypeError(f"unsupported operands of {name}: {type(left).__name__} and {type(right).__name__}")
    elif isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
        if n_bits > MAX_INT_BITS:
            raise too_large()
    elif name == "*":
        times = max(0, next((n for n in (left, right) if isinstance(n, int)), 1))
        budget.spend(times * (budget.size(left) + budget.size(right)))
