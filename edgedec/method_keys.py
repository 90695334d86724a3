"""Keys of methods and of drafting, as a person types them: `--method beam:n=4`, `--draft-option max=8`.

A guest declares its keys beside its code: one that writes on a session by the fields of its dataclass (`keys_of`), a
method of texts by `TextMethod.key`.
"""

import inspect
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edgedec.callers import did_you_mean
from edgedec.errors import OptionError, RequestError
from edgedec.load_options import read_value

_PAIR = re.compile(r"""(?:([a-z][\w-]*)=)?("[^"]*"|'[^']*'|(?:[^,]|,(?![a-z][\w-]*=))*)(?:,|$)""")
_QUOTED = re.compile(r"""(["']).*\1""", re.DOTALL)
_WORDS = {bool: "yes or no", int: "N", float: "X", str: "TEXT", os.PathLike: "NAME"}


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a person gives a value.

    Attributes:
        name: Its name in Python; a person types dashes or underscores.
        takes: The type of its value: bool, int, float, str or a Literal of texts, each perhaps or None.
        help: What it does.
        default: Its value where none is given; MISSING for a key that must be given.
    """

    name: str
    takes: Any
    help: str
    default: object = None

    @property
    def typed(self) -> str:
        """The key as it is typed."""
        return self.name.replace("_", "-")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that it takes, without None."""
        kinds = (self.takes,) if get_origin(self.takes) is Literal else get_args(self.takes) or (self.takes,)
        return tuple(kind for kind in kinds if kind is not NoneType)

    @property
    def names_model(self) -> bool:
        """Whether its value is the name of a model."""
        return any((get_origin(kind) or kind) is os.PathLike for kind in self.kinds)

    @property
    def words(self) -> str:
        """What it takes, for a person: "N", "yes or no", "strict, padded or loose"."""
        if self.names_model:
            return _WORDS[os.PathLike]
        if get_origin(self.kinds[0]) is Literal:
            *others, last = get_args(self.kinds[0])
            return f"{', '.join(others)} or {last}"
        return _WORDS[self.kinds[0]]


def keys_of(kind: type[Any]) -> tuple[Key, ...]:
    """Return the keys that a frozen dataclass declares: its fields, each with its line of the docstring."""
    hints, doc = get_type_hints(kind), inspect.cleandoc(kind.__doc__ or "")
    lines = re.findall(r"(?m)^ {4}(\w+): (.+(?:\n {8}.+)*)$", doc.partition("Attributes:\n")[2])
    said = {name: re.sub(r"\s+", " ", text) for name, text in lines}
    return tuple(Key(each.name, hints[each.name], said.get(each.name, ""), each.default) for each in fields(kind))


def split_pairs(words: str) -> list[tuple[str, str]]:
    """Return the keys and values of "KEY=VALUE,KEY=VALUE"; a value without a key, which may come first, has "".

    A comma ends a value where another key follows. A value in quotes holds any comma.

    >>> split_pairs("threshold:0.9,window:64"), split_pairs("n=4,check='./check --a,b=c'")
    ([('', 'threshold:0.9,window:64')], [('n', '4'), ('check', './check --a,b=c')])
    """
    pairs = [(match[1] or "", match[2]) for match in _PAIR.finditer(words) if match[0]]
    return [(key, value[1:-1] if _QUOTED.fullmatch(value) else value) for key, value in pairs]


def read_keys(owner: str, keys: Sequence[Key], given: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the values of keys, by their names in Python, as a person gave them; a later one takes the place.

    Args:
        owner: What has the keys, as it is typed: "--method beam".
        keys: All that it has; a value without a key is the first one's.
        given: Pairs of split_pairs.

    Raises:
        RequestError: There is no key of a name, or one that must be given is missing.
        OptionError: A key does not take the value.
    """
    by_name, values = {key.typed: key for key in keys}, dict[str, Any]()
    has = f"it has {', '.join(f'{key.typed}={key.words}' for key in keys)}" if keys else "it has none"
    for name, text in given:
        key = by_name.get(name.replace("_", "-")) if name else next(iter(keys), None)
        if key is None:
            what = f"key {name!r:.60}{did_you_mean(name, by_name)}" if name else f"key for {text!r:.60}"
            raise RequestError(f"{owner} has no {what}; {has}")
        values[key.name] = _read(owner + (":" if owner.startswith("--method") else " ") + key.typed, key, text)
    if missing := [key for key in keys if key.default is MISSING and key.name not in values]:
        raise RequestError(f"{owner} needs {missing[0].typed}={missing[0].words}; {has}")
    return values


def _read(name: str, key: Key, text: str) -> object:
    """Return the value that a text stands for (OptionError where the key does not take it)."""
    try:
        value = read_value(name, Union[key.kinds], text)  # noqa: UP007  # of a tuple
    except OptionError as error:
        if bool in key.kinds:
            raise OptionError(name, text, "it must be yes or no") from None
        raise OptionError(name, text, error.accepted) from None
    return value
