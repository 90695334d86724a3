"""The filters, tests and methods that a chat template may use, each with the price that it pays before it runs.

The operations are Jinja's and Python's own. A template can't use any that is not in these tables (`attr`, `groupby`,
`str.encode`, ...). A price is a function of the budget and the operation's arguments; an operation that costs more than
reading its arguments has a price of its own.
"""

import json
from collections.abc import Callable, Iterator
from operator import index, length_hint
from string import Formatter
from sys import getsizeof
from typing import Any, cast

import markupsafe
from jinja2 import filters, tests
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.utils import pass_context

from edgedec.exact_json import dumps
from edgedec_runtimes.chat.budget import Budget, check_key, identity, listed, pay_all, pay_items, pay_sorted, pay_step
from edgedec_runtimes.chat.operators import compare, pay_percent, widths

Price = Callable[..., object]  # the result is ignored

CHAR_BYTES = 4  # bytes of the widest character
MAX_INDENT = 16
MAX_DIGITS = 300
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def _pay_percent_filter(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> None:
    pay_percent(budget, text, kwargs or args)


def _pay_format(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    price = budget.weigh(text, args, kwargs)
    for _, field, spec, _ in Formatter().parse(text):
        if spec and "{" in spec:
            raise SecurityError("a format inside a format is not available")
        budget.spend(widths(spec or "") + (0 if field is None else price))


def _pay_escapes(budget: Budget, value: Any) -> None:
    budget.spend(5 * budget.weigh(value))  # a character becomes at most six characters


def _pay_replace(budget: Budget, text: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.weigh(text, old, new)
    budget.spend(str(text).count(str(old)) * len(str(new)) * CHAR_BYTES)


def _pay_join(budget: Budget, items: Any, separator: Any = "", attribute: Any = None) -> None:
    pay_sorted(budget, items, separator, attribute)
    budget.spend(length_hint(items) * len(str(separator)) * CHAR_BYTES)


def _pay_join_method(budget: Budget, separator: str, items: Any) -> None:
    _pay_join(budget, listed(items), separator)


def _pay_width(budget: Budget, text: str, width: Any, *fill: Any) -> None:
    budget.weigh(text, *fill)
    budget.spend(max(index(width), 0) * CHAR_BYTES)


def _pay_product(budget: Budget, text: str, *args: Any) -> None:
    """Pay for len(text) × len(argument): the worst case of stripping and of searching from the right."""
    budget.weigh(text, *args)
    budget.spend(len(str(text)) * max(map(length_hint, args), default=1))


def _pay_split(budget: Budget, text: str, separator: Any = None, maxsplit: Any = -1) -> None:
    budget.weigh(text, separator)
    budget.step(text.count(separator) if isinstance(separator, str) else len(text) // 2)


def _pay_rsplit(budget: Budget, text: str, separator: Any = None, maxsplit: Any = -1) -> None:
    _pay_product(budget, text, separator)
    _pay_split(budget, text, separator)


def _pay_lines(budget: Budget, text: str, keepends: Any = False) -> int:
    budget.weigh(text)
    n_lines = 1 + sum(map(text.count, _LINE_BREAKS))
    budget.step(n_lines)
    return n_lines


def _pay_indent(budget: Budget, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    if not isinstance(text, str):
        raise TypeError(f"indent takes a string, not a {type(text).__name__}")
    n_width = len(width) if isinstance(width, str) else max(index(width), 0)
    budget.spend(_pay_lines(budget, text) * n_width * CHAR_BYTES)


def _pay_title(budget: Budget, value: Any) -> None:
    budget.step(budget.weigh(value))  # the text is taken apart into words


def _pay_arguments(budget: Budget, value: Any, *args: Any) -> None:
    budget.weigh(*args)


def _pay_key(budget: Budget, value: Any, key: Any, default: Any = None) -> None:
    budget.step()
    check_key(key)


def _pay_number(budget: Budget, value: Any, *args: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"a number is expected, not a {type(value).__name__}")
    budget.weigh(value, *args)


def _pay_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    _pay_number(budget, value)
    if abs(index(precision)) > MAX_DIGITS:
        raise SecurityError(f"round takes at most {MAX_DIGITS} digits, not {precision}")


def _pay_sum(budget: Budget, items: Any, attribute: Any = None, start: Any = 0) -> None:
    _pay_number(budget, start)
    pay_sorted(budget, items, attribute)


def _escape(value: Any) -> str:
    return str(markupsafe.escape(str(value)))


def _reverse(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else iter(list(value)[::-1])


@pass_context
def _unique(context: Context, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
    """Yield the first of equal items, as Jinja's own filter does, without hashes that a template can foresee."""
    fold = None if case_sensitive else filters.ignore_case
    key_of = filters.make_attrgetter(context.environment, attribute, postprocess=fold)
    budget = budget_of(context)
    seen = set()
    for item in value:
        budget.step()
        key = identity(key_of(item))
        if key not in seen:
            seen.add(key)
            yield item


def _is_short(mark: Any) -> bool:
    return len(mark) <= MAX_INDENT if isinstance(mark, str) else mark is None or index(mark) <= MAX_INDENT


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without escaping HTML, as transformers does; the indents are paid for one by one."""
    budget = budget_of(context)
    if not all(map(_is_short, (indent, *(separators or ())))):
        raise SecurityError(f"tojson takes indents and separators of at most {MAX_INDENT} characters")
    _pay_escapes(budget, value)
    if indent is None:
        return dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in encoder.iterencode(value):
        budget.spend(getsizeof(chunk))
        chunks.append(chunk)
    return "".join(chunks)


def budget_of(context: Context) -> Budget:
    """Return the budget of the rendering that `context` belongs to."""
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]  # it is a Sandbox
    return budget


def _priced(function: Callable[..., Any], price: Price) -> Callable[..., Any]:
    """Return a filter or test that pays for its arguments, runs, and pays for its result."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        value = listed(value)
        price(budget, value, *args, **kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return budget.made(function(*([first[passed.name]] if passed else []), value, *args, **kwargs))

    return run


def _compared(name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Context, value: Any, other: Any, /) -> Any:
        return compare(budget_of(context), value, name, other)

    return run


def _by_name(*groups: tuple[Price, str]) -> dict[str, Price]:
    return {name: price for price, names in groups for name in names.split()}


_FILTER_PRICES = _by_name(
    (pay_step, "count d default first last length tojson"),
    (pay_items, "items list map reject rejectattr reverse select selectattr"),
    (pay_all, "abs capitalize float int lower safe string upper"),
    (pay_sorted, "dictsort max min sort unique"),
    (_pay_escapes, "e escape"),
    (_pay_percent_filter, "format"),
    (_pay_indent, "indent"),
    (_pay_join, "join"),
    (_pay_product, "trim"),
    (_pay_replace, "replace"),
    (_pay_round, "round"),
    (_pay_sum, "sum"),
    (_pay_title, "title"),
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

_TEST_PRICES = _by_name(
    (pay_step, "boolean callable defined false float integer iterable mapping none number sameas sequence string"),
    (pay_step, "true undefined"),
    (pay_all, "lower upper"),
    (_pay_number, "divisibleby even odd"),
)
_COMPARISONS = {
    "eq": "== eq equalto",
    "ne": "!= ne",
    "gt": "> gt greaterthan",
    "gteq": ">= ge",
    "lt": "< lt lessthan",
    "lteq": "<= le",
    "in": "in",
}
TESTS = {
    **{name: _priced(cast(Callable[..., Any], tests.TESTS[name]), price) for name, price in _TEST_PRICES.items()},
    **{name: _compared(operator) for operator, names in _COMPARISONS.items() for name in names.split()},
}

METHODS: tuple[tuple[type, dict[str, Price]], ...] = (
    (
        str,
        _by_name(
            (pay_all, "capitalize casefold count find index lower partition removeprefix removesuffix swapcase title"),
            (pay_all, "isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper upper"),
            (_pay_arguments, "endswith startswith"),
            (_pay_format, "format"),
            (_pay_join_method, "join"),
            (_pay_lines, "splitlines"),
            (_pay_product, "lstrip rfind rindex rpartition rstrip strip"),
            (_pay_replace, "replace"),
            (_pay_rsplit, "rsplit"),
            (_pay_split, "split"),
            (_pay_width, "center ljust rjust zfill"),
        ),
    ),
    (dict, _by_name((_pay_key, "get"), (pay_step, "items keys values"), (pay_items, "copy"))),
    (list, _by_name((pay_all, "count index"), (pay_items, "copy"))),
    (tuple, _by_name((pay_all, "count index"))),
    (LoopContext, _by_name((_pay_arguments, "changed"), (pay_step, "cycle"))),
)
