"""Ways to write with a further model beside the target, which a package brings by an entry point of `edgedec.sessions`.

What the entry point names is a frozen dataclass: its fields are the method's options, each with a default, and it has
the attributes and the method of `Companion`. The target and the companion are loaded and planned by edgedec; the method
returns a session around a session of each. Nothing is drafted beside it, and requests take turns.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from edgedec import plugins
from edgedec.errors import RequestError
from edgedec.load_options import read_options
from edgedec.model import Session


class Companion(Protocol):
    """A method that writes with a further model of the target's vocabulary."""

    @property
    def role(self) -> str:
        """What the further model is called, as in "small model"."""

    @property
    def what(self) -> str:
        """What both models are, as in "two models that write in turn"."""

    @property
    def model(self) -> str | os.PathLike[str]:
        """The name of the further model."""

    def session(self, target: Session, companion: Session) -> Session:
        """Return a session on which both write (CapabilityError where a runtime can't)."""


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
    ((name, given),) = methods.items()
    found: Companion = read_options(plugins.load_plugin(plugins.SESSIONS, name), given, f"the method {name}")
    return found
