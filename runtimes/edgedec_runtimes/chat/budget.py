"""What one rendering of an untrusted chat template may cost: a budget of bytes and steps, and a deadline.

Every operation of a template pays before it runs, for what it reads and for what it makes. So nothing larger than
the budget can be built, nothing is read through more often than the budget allows, and no single operation takes
long, however the template goes about it. A step (an iteration, a call, a comparison) costs 32 bytes.

A price holds only where the time of an operation is in proportion to it. So there are bounds on what makes Python's
own operations take longer than that: large integers (division), deep nesting (hashing overflows the stack), and
numbers with equal hashes (sets and dicts search them one by one; see `identity`).
"""

from operator import length_hint
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

_ATOMS = (str, int, float, type(None), Undefined)
# Any, for isinstance: types of the standard library that have no public name.
_LIST_ITERATOR: Any = type(iter([]))
CONTAINERS: Any = (list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items()))


class Budget:
    """What is left for one rendering, in bytes, until when, and what ends it earlier."""

    __slots__ = ("_cancel", "_deadline_s", "left_bytes")

    def __init__(self, cancel: CancelToken | None = None) -> None:
        self.left_bytes = LIMIT_BYTES
        self._deadline_s = perf_counter() + LIMIT_S
        self._cancel = cancel or CancelToken()

    def spend(self, n_bytes: int) -> None:
        """Take `n_bytes` from the budget (SecurityError when it or the time is used up; CancelledError)."""
        left_bytes = self.left_bytes - n_bytes
        if not 0 <= left_bytes <= self.left_bytes:  # written so that a negative price and a NaN are refused too
            raise SecurityError(
                f"it needs more than {LIMIT_BYTES >> 20} MiB or {LIMIT_BYTES // STEP_BYTES:,} steps; "
                f"shorten the conversation or check the template"
            )
        self.left_bytes = left_bytes
        if perf_counter() > self._deadline_s:
            raise SecurityError(f"it ran for more than {LIMIT_S:g} s; shorten the conversation or check the template")
        self._cancel.check("render the chat template")

    def step(self, n_steps: int = 1) -> None:
        """Pay for that many steps."""
        self.spend(STEP_BYTES * n_steps)

    def weigh(self, *values: Any) -> int:
        """Pay for reading all of the values, what is reached twice counting twice, and return the price.

        Lists that contain a list twice, ten or a hundred levels deep, are small in memory and endless to print,
        compare or hash. Refuses (SecurityError) anything that is no plain data: macros, namespaces, functions; and
        what is nested so deep that hashing it could overflow the stack.
        """
        before = self.left_bytes
        level: list[Any] = list(values)
        for _ in range(MAX_DEPTH):
            deeper: list[Any] = []
            for value in level:
                self.spend(STEP_BYTES + getsizeof(value))
                if isinstance(value, _ATOMS):
                    continue
                if not isinstance(value, CONTAINERS):
                    raise SecurityError(f"a {type(value).__name__} is no text or plain data")
                deeper.extend(value)
                if isinstance(value, dict):
                    deeper.extend(value.values())
            if not deeper:
                return before - self.left_bytes
            level = deeper
        raise SecurityError(f"data nested more than {MAX_DEPTH} deep is not available")

    def made(self, value: Any) -> Any:
        """Pay for a value just made, not for what it refers to, and return it.

        Generators are run, so that they cannot be chained; what comes back can be iterated once, as they can.
        """
        if isinstance(value, GeneratorType):
            value = list(value)
            self.spend(getsizeof(value))
            return iter(value)
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise too_large()
        self.spend(getsizeof(value))
        return value


def too_large() -> SecurityError:
    """Return the error for an integer with which arithmetic could take for ever."""
    return SecurityError("integers of more than 10,000 digits are not available")


def identity(value: Any) -> Any:
    """Return what is equal for equal values, and can be looked up in a set in a moment, whatever a template made.

    Hashes of numbers, and of tuples of them, are known beforehand: a template can make as many as it likes that are
    all the same, and a set then compares each with all. A number's text has a hash that nobody knows.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return "integer", hex(value)
    if isinstance(value, float):
        return "number", repr(value)
    if isinstance(value, tuple):
        return "tuple", *map(identity, value)
    return check_key(value)


def listed(value: Any) -> Any:
    """Return the items that `made` turned into an iterator as a list again; anything else as it is."""
    return list(value) if isinstance(value, _LIST_ITERATOR) else value


def check_key(value: Any) -> Any:
    """Return a key of a dict or a list; tuples as keys, whose hash can take for ever, are a SecurityError."""
    if not isinstance(value, _ATOMS):
        raise SecurityError(f"a {type(value).__name__} cannot be a key")
    return value


def pay_items(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step per item of `value`, and per character of the arguments (dotted attribute names)."""
    budget.step(1 + sum(map(length_hint, (value, *args, *kwargs.values()))))


def pay_all(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for reading `value` and the arguments to the bottom."""
    budget.step(sum(map(length_hint, (*args, *kwargs.values()))))
    budget.weigh(value, *args, *kwargs.values())


def pay_sorted(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay as pay_all, and for a list of keys, one for each item (of a string too)."""
    budget.step(4 * length_hint(value))
    pay_all(budget, value, *args, **kwargs)


def pay_step(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step, for operations that take the same time whatever they are given."""
    budget.step()
