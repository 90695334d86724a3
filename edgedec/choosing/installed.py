"""A chooser or a search by the name that a caller gives."""

from typing import TypeVar

from edgedec.errors import OptionError, PluginError
from edgedec.plugins import load_plugin, plugins

Kind = TypeVar("Kind")


def installed(group: str, option: str, name: object, kind: type[Kind]) -> Kind:
    """Return the plug-in that an option names.

    Args:
        group: The plug-in's group.
        option: The option, for the error.
        name: The option's value.
        kind: What the plug-in must be.

    Raises:
        OptionError: The group has no plug-in of that name; the error lists those that are installed.
        PluginError: The plug-in does not import, or is something else than `kind`.
    """
    try:
        found = load_plugin(group, name) if isinstance(name, str) else None
    except PluginError:
        if name in plugins(group):
            raise
        found = None
    if found is None:
        raise OptionError(option, name, f"it must be one of {', '.join(plugins(group))}")
    if not isinstance(found, kind):
        raise PluginError(
            f"the plug-in {name!r} of {group} is a {type(found).__name__}; it must be a {kind.__name__} "
            "(edgedec doctor --all says which package it is from)"
        )
    return found
