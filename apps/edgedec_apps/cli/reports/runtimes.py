"""A question to all installed runtimes, of which those that fail do not stop the others."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from edgedec import plugins
from edgedec.errors import EdgedecError, PluginError

if TYPE_CHECKING:
    from edgedec.runtime import Runtime

T = TypeVar("T")


def ask_runtimes(question: Callable[["Runtime"], T]) -> dict[str, T | EdgedecError]:
    """Return the answer of each runtime, by the runtime's name; where a runtime fails, an EdgedecError instead."""
    answers: dict[str, T | EdgedecError] = {}
    for name, plugin in plugins.plugins(plugins.RUNTIMES).items():
        try:
            loaded = plugin.load()
            answers[name] = question(loaded() if isinstance(loaded, type) else loaded)
        except EdgedecError as error:
            answers[name] = error
        except Exception as error:  # a plug-in's own
            answers[name] = PluginError(f"{type(error).__name__}: {error} (from {plugin.package})")
    return answers
