"""From commands with dataclasses as parameters to functions with one parameter for each option, as typer wants them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from edgedec_apps.cli.help_text import FURTHER, OPTION, show_all

_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all options and exit.")
    ],
)


def is_further(hint: Any) -> bool:
    """Return whether an option, by its annotation, is one that only --help-all shows."""
    return any(str(getattr(one, "rich_help_panel", "")).endswith(FURTHER) for one in get_args(hint)[1:])


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by the options that its fields declare, for typer."""

    def run(**values: Any) -> None:
        values.pop(_HELP_ALL.name, None)
        _build(command, values)

    parameters = list(_parameters(command))
    if any(is_further(parameter.annotation) for parameter in parameters):
        parameters.append(_HELP_ALL)
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function or dataclass; those of a dataclass in the place of a parameter of its type."""
    hints = get_type_hints(function, include_extras=True)
    declared = {each.name: each.metadata.get(OPTION) for each in fields(function)} if is_dataclass(function) else {}
    for parameter in inspect.signature(function).parameters.values():
        hint, option = hints[parameter.name], declared.get(parameter.name)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _parameters(hint)
        else:
            annotation = hint if option is None else Annotated[hint, option]
            yield parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)


def _build(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function or dataclass with the values that `_parameters` names."""
    hints, given = get_type_hints(function), dict[str, Any]()
    for name in inspect.signature(function).parameters:
        hint = hints[name]
        given[name] = _build(hint, values) if isinstance(hint, type) and is_dataclass(hint) else values[name]
    return function(**given)
