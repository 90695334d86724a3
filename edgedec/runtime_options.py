"""Options that one runtime has and others do not: the runtime declares them, and what a user gave is checked by them.

A runtime names in its attribute `own_options` a frozen dataclass, with a default for each field:

    @dataclass(frozen=True, slots=True)
    class CpuOptions:
        mmap: bool = True
        huge_pages: Literal["auto", "on", "off"] = "auto"

Users give `load(..., runtime_options={"huge_pages": "off"})`, or `--runtime-option huge_pages=off`. A field is a truth
value, a number, a text or a Literal of texts, each perhaps or None; numbers and truth values may be given as text.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from edgedec.errors import OptionError, RequestError, argument

T = TypeVar("T")
_WORDS = {**dict.fromkeys(("1", "yes", "true", "on"), True), **dict.fromkeys(("0", "no", "false", "off"), False)}


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a runtime that has none of its own."""


@dataclass(frozen=True, slots=True)
class Sacrifice:
    """An option that a memory plan may set to save memory, when nothing better is left to give up.

    A runtime's dataclass of options names them in the class attribute `sacrifices`, in their order.

    Attributes:
        kind: What is given up, in a word; of two sacrifices of one kind the later one is told.
        phrase: What is given up, in words for a person.
        name: The option.
        value: The value that it is set to.
        with_devices: Whether this saves memory only where layers are on devices.
    """

    kind: str
    phrase: str
    name: str
    value: object
    with_devices: bool = False


@runtime_checkable
class OtherMachines(Protocol):
    """Own options by which a runtime puts layers of a model on other machines.

    Their class attribute `of_other_machines` names the options that a model on this machine alone goes without.
    """

    @property
    def machines(self) -> tuple[str, ...]:
        """The other machines; none where all layers stay on this one."""

    @property
    def warning(self) -> str:
        """What a person should know before layers are put there; may be empty."""

    @property
    def wait_s(self) -> float:
        """Most seconds for which a text waits for a machine that is lost."""

    def require_no_layers_here(self, *, layer_skip: bool, draft_head: bool) -> None:
        """Raise RequestError where other machines take the layers, and one of these needs them on this one."""


def own_options(runtime: object) -> type[Any]:
    """Return the dataclass of the options that only this runtime has."""
    found: type[Any] = getattr(runtime, "own_options", NoOptions)  # other packages' runtimes need not have it
    return found


def known_to(runtime: object, given: Mapping[str, object]) -> dict[str, object]:
    """Return those of the given options that a runtime has for a model on this machine."""
    kind = own_options(runtime)
    known = {field.name for field in fields(kind)} - set(getattr(kind, "of_other_machines", ()))
    return {name: value for name, value in given.items() if name in known}


def read_options(kind: type[T], given: Mapping[str, object], owner: str) -> T:
    """Return the options of a runtime or of a method: what is given, and the defaults of the others.

    Args:
        kind: The dataclass of the options.
        given: Values by the names of options.
        owner: Whose options they are, for errors: "the cpu runtime".

    Raises:
        RequestError: There is no option of a name.
        OptionError: An option does not take the value.
    """
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
    for name in given:
        if name not in known:
            has = f"; its own are {', '.join(known)}" if known else ""
            raise RequestError(
                f"{owner} has no option {name!r}{has}; leave it out, or name what has it ({argument('runtime')})"
            )
    return kind(**{name: _read(name, hints[name], value) for name, value in given.items()})


def _read(name: str, hint: Any, value: object) -> object:
    """Return the value of an option of this type, read from a text where it is one."""
    kinds = [hint] if get_origin(hint) is Literal else [*(get_args(hint) or (hint,))]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if value in choices or (value is None and NoneType in kinds):
        return value
    if str in kinds and isinstance(value, str | os.PathLike):
        return value
    if isinstance(value, str):
        if bool in kinds and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        for kind in (int, float):
            if kind in kinds:
                try:
                    return kind(value)
                except ValueError:
                    break
    elif isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, int | float) and (float in kinds or (int in kinds and isinstance(value, int))):
        return value
    raise OptionError(name, value, f"it must be {_expected(kinds, choices)}")


def _expected(kinds: list[Any], choices: list[str]) -> str:
    """Return in words what an option of these types takes."""
    words = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}
    found = choices or [words[kind] for kind in kinds if kind in words]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
