"""What callers pass and see: arguments are checked by their annotations, results and likely names shown in one line.

A wrong argument raises an OptionError. Three things are not checked: an annotation in quotes (its type is imported only
when it is needed), what a mapping holds, and the numbers of a sequence. A scalar of numpy becomes a number of Python.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, wraps
from inspect import Parameter, iscoroutinefunction, isfunction, signature
from numbers import Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from edgedec.errors import OptionError, RequestError

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type[Any])

_LONGEST = 64  # characters of a value that is shown
_ELSEWHERE = {"context": "n_ctx", "context_length": "n_ctx", "n_predict": "max_tokens", "num_predict": "max_tokens"}
_LEAST_PART = 3  # characters of a name that is looked for in others
_WORDS = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "NoneType": "None",
    "PathLike": "a path",
    "Mapping": "a mapping",
    "Sequence": "a sequence",
    "tuple": "a tuple",
    "Callable": "a function",
    "Grammar": "a Grammar: make one by Grammar.regex, Grammar.lark, Grammar.gbnf or Grammar.json_schema",
}


def one_line(value: Any) -> str:
    """Return a dataclass as one line, for its __repr__: long values are cut, those that are the defaults left out."""
    shown = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        held = getattr(value, field.name)
        if field.repr and not (type(held) is type(default) and held == default):
            text = f"{held:.6g}" if isinstance(held, float) else repr(held).replace("\n", " ")
            text = f"{held.dtype}{[*held.shape]}" if hasattr(held, "dtype") else text
            shown.append(f"{field.name}={text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}")
    return f"{type(value).__name__}({', '.join(shown)})"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a clause with the known names most like `name` in any case, at most three; "" where none is like it.

    First come the names that begin with `name`, or that `name` begins with, in the order of `names`: so it has those
    first that a person is likely to mean. Names that hold `name` elsewhere come after those like it as a whole.

    >>> did_you_mean("SmolLM-135m", ["smollm2-135m", "gemma3-270m"])
    '; did you mean smollm2-135m?'
    >>> did_you_mean("smollm", ["smollm2-135m", "smollm3-3b", "smolvlm-256m"])
    '; did you mean smollm2-135m or smollm3-3b or smolvlm-256m?'
    >>> did_you_mean("coder", ["qwen2.5-coder-0.5b", "gemma3-270m"])
    '; did you mean qwen2.5-coder-0.5b?'
    """
    from difflib import get_close_matches  # here, as few callers are wrong

    lower = name.lower()
    by_lower: dict[str, str] = {}
    for each in names:
        by_lower.setdefault(each.lower(), each)
    holding = [each for each in by_lower if len(name) >= _LEAST_PART and lower in each]
    begun = [each for each in by_lower if lower.startswith(each) or (each in holding and each.startswith(lower))]
    like = get_close_matches(lower, by_lower, n=3, cutoff=0.6)
    likely = [lower] if lower in by_lower else [*begun, *like, *holding]
    close = [by_lower[each] for each in dict.fromkeys(likely)][:3]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def checks_arguments(function: F) -> F:
    """Return a function that raises OptionError for a wrong argument, and RequestError for one that it hasn't."""
    parameters = signature(function).parameters.values()
    arguments = [each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    hints = {each.name: each.annotation for each in parameters if each.annotation is not Parameter.empty}
    options = next((each.annotation for each in parameters if each.kind is Parameter.VAR_KEYWORD), None)
    further = {} if options is None else get_args(options)[0].__annotations__  # of Unpack[...]
    hints |= further
    names = [name for name in (*arguments, *further) if name != "self"]

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        values = [checked_value(name, hints.get(name, ""), value) for name, value in zip(arguments, args, strict=False)]
        for name in keywords:
            if name not in names:
                hint = did_you_mean(_ELSEWHERE.get(name, name), names) or f"; it has {', '.join(names)}"
                raise RequestError(f"{function.__name__}() has no argument {name!r}{hint}")
            keywords[name] = checked_value(name, hints.get(name, ""), keywords[name])
        return function(*values, *args[len(values) :], **keywords)

    return checked  # type: ignore[return-value]  # it has the signature of the function


def checks_methods(kind: K) -> K:
    """Let the public methods of a class check their arguments; the asynchronous ones call these."""
    for name, member in list(vars(kind).items()):
        if isfunction(member) and not name.startswith("_") and not iscoroutinefunction(member):
            setattr(kind, name, checks_arguments(member))
    return kind


def check_fields(options: Any) -> None:
    """Check the fields of a frozen dataclass, for its __post_init__ (OptionError)."""
    for field in fields(options):
        value = checked_value(field.name, field.type, getattr(options, field.name))
        object.__setattr__(options, field.name, value)


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """Return the value of an argument, a scalar of numpy as Python's; raise OptionError unless it is of a type.

    >>> checked_value("n", int | None, 5)
    5
    """
    kinds = _kinds(hint)
    if type(value) in kinds and value == value:  # the usual case; a NaN is none
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if not any(_fits(kind, value) for kind in kinds):
        *words, last = [word for kind in kinds for word in _words(kind)]
        raise OptionError(name, value, f"it must be {' or '.join([*filter(None, [', '.join(words)]), last])}")
    items = [item for kind in kinds if _plain(kind) is Sequence for each in get_args(kind)[:1] for item in _kinds(each)]
    if items and _fits(Sequence, value) and not {int, float, object, Any}.intersection(items):
        for place, item in enumerate(value):
            checked_value(f"{name}[{place}]", Union[tuple(items)], item)  # noqa: UP007  # of a list
    return value


@cache
def _kinds(hint: Any) -> list[Any]:
    """Return the types of a union, one by one."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [kind for part in parts for kind in _kinds(part)] or [hint]


@cache
def _plain(kind: Any) -> Any:
    """Return what a type is without what it holds: a class, Literal, or object for what can't be checked."""
    plain = get_origin(kind) or kind
    if plain is list or (plain is tuple and get_args(kind)[1:] == (...,)):
        return Sequence
    return plain if plain is Literal or isinstance(plain, type) else object


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type that is no union; of a protocol, whether it has what that names."""
    plain = _plain(kind)
    if plain is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if plain is Sequence:
        return hasattr(value, "__len__") and not isinstance(value, str | bytes | bytearray | Mapping)
    if plain is tuple:
        parts = get_args(kind)
        if not isinstance(value, tuple) or len(value) != len(parts):
            return False
        return all(any(_fits(each, item) for each in _kinds(part)) for part, item in zip(parts, value, strict=True))
    if plain in (int, float):
        return isinstance(value, int if plain is int else Real) and not isinstance(value, bool) and value == value
    if getattr(plain, "_is_protocol", False) and plain.__module__.startswith("edgedec"):
        names = [name for name in dir(plain) if name == "__call__" or not name.startswith("_")]
        return all(hasattr(value, name) for name in names)
    return isinstance(value, plain)


def _words(kind: Any) -> list[str]:
    """Return a type in words, the choices of a Literal one by one."""
    plain = _plain(kind)
    name = "Callable" if "__call__" in vars(plain) else plain.__name__  # of a protocol
    return [*map(str, get_args(kind))] if plain is Literal else [_WORDS.get(name, f"an edgedec.{name}")]
