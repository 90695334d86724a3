"""Methods that write on a session around the target's, which a package brings by an entry point of `edgedec.sessions`.

What the entry point names is a frozen dataclass: its fields are the method's options, each with a default, and it has
the attributes and the method of `Companion`. Where the method has a further model, edgedec plans and loads that, and
the method returns a session around a session of each; nothing is drafted beside it then, and requests take turns.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from edgedec import plugins
from edgedec.errors import RequestError
from edgedec.load_options import read_options
from edgedec.model import Session


class Companion(Protocol):
    """A method that writes on a session around the target's, perhaps with a further model of the same vocabulary."""

    @property
    def role(self) -> str:
        """What the further model is called, as in "small model"; empty without one."""

    @property
    def what(self) -> str:
        """What the method makes of its models, as in "two models that write in turn"."""

    @property
    def model(self) -> str | os.PathLike[str] | None:
        """The name of the further model; None for a method that has none."""

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session around the target's, and the companion's where there is one, for texts to be written on.

        Without a further model it is called for the session of each of the parallel requests.

        Raises:
            CapabilityError: A runtime can't do what the method needs.
        """


def companion_of(methods: Mapping[str, Mapping[str, object]] | None) -> Companion | None:
    """Return the method that options name, with its options; None for none.

    Args:
        methods: The options of a method by its name, for at most one method.

    Raises:
        RequestError: There are several, an option is unknown, or the method refuses its options.
        PluginError: No method has that name, or the method does not import.
    """
    if not methods:
        return None
    if len(methods) > 1:
        raise RequestError(f"the methods {' and '.join(methods)} are given; one of them can be used at a time")
    ((name, options),) = methods.items()
    companion: Companion = read_options(plugins.load_plugin(plugins.SESSIONS, name), options, f"the method {name}")
    return companion
