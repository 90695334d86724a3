"""JSON whose numbers keep their digits, where a double would not hold them."""

import json
import re
from decimal import Decimal
from secrets import token_hex
from typing import Any

_MARK = f"<{token_hex(8)}>"  # before the digits in the text of a number, until its quotes are taken away


class ExactFloat(float):
    """A number of a JSON text that is no double: it acts as the nearest double.

    Attributes:
        text: The number as it was written.
    """

    text: str


def exact_float(text: str) -> float:
    """Return a number for the parameter `parse_float` of json.loads: a float that has all digits of `text`.

    >>> type(exact_float("0.5")).__name__, type(exact_float("0.12345678901234567890")).__name__
    ('float', 'ExactFloat')
    """
    number = float(text)
    try:
        if Decimal(text) == Decimal(repr(number)):
            return number
    except ArithmeticError:  # an exponent that no Decimal holds
        pass
    exact = ExactFloat(number)
    exact.text = text
    return exact


def decimal_of(number: float) -> Decimal:
    """Return the value of a number of JSON (raises ArithmeticError where no Decimal holds its exponent)."""
    return Decimal(number.text if isinstance(number, ExactFloat) else repr(number))


def dumps(value: Any, **options: Any) -> str:
    """Return the text of a JSON value as json.dumps does, but with all digits of the numbers of exact_float()."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, ExactFloat):
            return re.sub(f'"{_MARK}([^"]*)"', r"\1", json.dumps(_marked(value), **options))
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return json.dumps(value, **options)


def _marked(value: Any) -> Any:
    if isinstance(value, ExactFloat):
        return _MARK + value.text
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    return [_marked(each) for each in value] if isinstance(value, list | tuple) else value
