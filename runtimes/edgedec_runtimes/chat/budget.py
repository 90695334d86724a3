"""The cost of one rendering of an untrusted chat template: a budget of bytes and steps, and a deadline.

Every operation of a template pays before it runs, for what it reads and for what it makes. So a template can't build
anything larger than the budget, can't read anything more often than the budget allows, and no single operation takes
long. A step (an iteration, a call, a comparison) costs 32 bytes.

A price is right only where the time of an operation is in proportion to it. So there are limits on what makes Python's
own operations take longer: large integers (division), deep nesting (hashing overflows the stack), and numbers with
equal hashes (sets and dicts search them one by one; see `identity`).
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

    def weigh(self, *values: Any) -> int:
        """Pay for reading all of the values, and return the price. What is reached twice counts twice.

        A list that contains another one twice, and so on for a hundred levels, is small in memory and takes for ever
        to print, compare or hash.

        Raises:
            SecurityError: The budget is used up; a value is no plain data (a macro, a namespace, a function); or a
                value is nested so deeply that hashing it could overflow the stack.
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
        """Pay for a value that was just made, without the values that it refers to, and return it.

        A generator is run to its end, so that generators can't be chained, and comes back as an iterator.
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
    """Return a key that is equal for equal values, and is fast to look up in a set, whatever values a template made.

    The hashes of numbers, and of tuples of them, are foreseeable: a template can make many numbers with one hash, each
    of which a set compares with all others. The hash of a number's text is not foreseeable.
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
    """Return an iterator, as `Budget.made` makes it, as a list; any other value as it is."""
    return list(value) if isinstance(value, _LIST_ITERATOR) else value


def check_key(value: Any) -> Any:
    """Return a key of a dict or a list (SecurityError for one that is no atom: hashing a tuple can take for ever)."""
    if not isinstance(value, _ATOMS):
        raise SecurityError(f"a {type(value).__name__} cannot be a key")
    return value


def pay_items(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step for each item of `value` and each character of the arguments (dotted names of attributes)."""
    budget.step(1 + sum(map(length_hint, (value, *args, *kwargs.values()))))


def pay_all(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for reading all of `value` and the arguments."""
    budget.step(sum(map(length_hint, (*args, *kwargs.values()))))
    budget.weigh(value, *args, *kwargs.values())


def pay_sorted(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay as pay_all does, and for a list of keys with one key for each item (or character) of `value`."""
    budget.step(4 * length_hint(value))
    pay_all(budget, value, *args, **kwargs)


def pay_step(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay for one step: the operation takes the same time for all values."""
    budget.step()
