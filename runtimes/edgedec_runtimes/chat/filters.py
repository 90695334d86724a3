"""The filters, tests and methods that a chat template may use, each with the price that it pays before it runs.

The operations are Jinja's and Python's own. A template can't use any that is not in these tables (`attr`, `groupby`,
`str.encode`, ...).
"""

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, cast

import markupsafe
from jinja2 import filters, tests
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.utils import pass_context

from edgedec.exact_json import dumps
from edgedec_runtimes.chat.budget import (
    Budget,
    listed,
    pay_format,
    pay_items,
    pay_percent,
    pay_pieces,
    pay_product,
    pay_step,
    plain,
)

MAX_DIGITS = 300
_ESCAPED = 5  # a character becomes at most six characters
Price = Callable[..., object]  # the result is ignored


def _pay_escapes(budget: Budget, value: Any) -> None:
    pay_product(budget, value, _ESCAPED)


def _pay_number(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"a number is expected, not a {type(value).__name__}")
    budget.step()


def _pay_sum(budget: Budget, items: Any, attribute: Any = None, start: Any = 0) -> None:
    _pay_number(budget, start)
    pay_items(budget, items)


def _pay_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    _pay_number(budget, value)
    if abs(index(precision)) > MAX_DIGITS:
        raise SecurityError(f"round takes at most {MAX_DIGITS} digits, not {precision}")


def _pay_rsplit(budget: Budget, text: str, separator: Any = None, maxsplit: Any = -1) -> None:
    pay_product(budget, text, separator)  # a search from the right may take this long
    pay_pieces(budget, text, separator)


def _pay_indent(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> None:
    pay_product(budget, text, *args, **kwargs)
    pay_pieces(budget, text)


def _escape(value: Any) -> str:
    return str(markupsafe.escape(str(value)))


def _reverse(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else iter(list(value)[::-1])


@pass_context
def _unique(context: Context, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
    """Yield the first of equal items, as Jinja's own filter does, without hashes that a template can foresee."""
    fold = None if case_sensitive else filters.ignore_case
    key_of = filters.make_attrgetter(context.environment, attribute, postprocess=fold)
    seen: list[Any] = []
    for item in value:
        budget_of(context).step()
        if (key := key_of(item)) not in seen:
            seen.append(key)
            yield item


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without escaping HTML, as transformers does."""
    pay_product(budget_of(context), value, _ESCAPED, *filter(None, (indent, *(separators or ()))))
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def budget_of(context: Context) -> Budget:
    """Return the budget of the rendering that `context` belongs to."""
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]  # it is a Sandbox
    return budget


def _priced(function: Callable[..., Any], price: Price) -> Callable[..., Any]:
    """Return a filter or test that takes plain data, pays, runs, and pays for its result."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        value = plain(listed(value))
        for each in (*args, *kwargs.values()):
            plain(each)
        price(budget, value, *args, **kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return budget.made(function(*([first[passed.name]] if passed else []), value, *args, **kwargs))

    return run


def _by_name(*groups: tuple[Price, str]) -> dict[str, Price]:
    return {name: price for price, names in groups for name in names.split()}


_FILTER_PRICES = _by_name(
    (pay_step, "abs capitalize count d default first float int last length lower safe string tojson upper"),
    (pay_items, "dictsort items list map max min reject rejectattr reverse select selectattr sort unique"),
    (pay_pieces, "title"),
    (pay_product, "join replace trim"),
    (_pay_indent, "indent"),
    (pay_percent, "format"),
    (_pay_escapes, "e escape"),
    (_pay_round, "round"),
    (_pay_sum, "sum"),
)
# Nothing is escaped automatically, so `safe` has nothing to do.
_FILTER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **filters.FILTERS,
    "e": _escape,
    "escape": _escape,
    "reverse": _reverse,
    "safe": str,
    "tojson": _tojson,
    "unique": _unique,
}
FILTERS = {name: _priced(_FILTER_FUNCTIONS[name], price) for name, price in _FILTER_PRICES.items()}


def _stepped(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that pays for one step and takes any value, as it doesn't print it."""

    @pass_context
    def run(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget_of(context).step()
        return test(value, *args, **kwargs)

    return run


_TEST_PRICES = _by_name((pay_step, "lower upper"), (_pay_number, "divisibleby even odd"))
_MISSING = {"escaped", "filter", "test"}
TESTS: dict[str, Callable[..., Any]] = {
    name: _priced(test, _TEST_PRICES[name]) if name in _TEST_PRICES else _stepped(test)
    for name, test in cast(dict[str, Callable[..., Any]], tests.TESTS).items()
    if name not in _MISSING
}

OWNERS = (str, dict, list, tuple, LoopContext)
"""The types of values that have the methods."""
METHODS = _by_name(
    (pay_step, "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower"),
    (pay_step, "isnumeric isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase"),
    (pay_step, "title upper copy get items keys values changed cycle"),
    (pay_format, "format"),
    (pay_pieces, "split splitlines"),
    (pay_product, "center join ljust lstrip replace rfind rindex rjust rpartition rstrip strip zfill"),
    (_pay_rsplit, "rsplit"),
)
