"""Puts a question to each installed runtime; a runtime that fails does not keep the others from answering."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from edgedec import plugins
from edgedec.errors import EdgedecError, PluginError

if TYPE_CHECKING:
    from edgedec.runtime import Runtime

T = TypeVar("T")


def ask_runtimes(question: Callable[["Runtime"], T]) -> dict[str, T | EdgedecError]:
    """Return each runtime's answer, or the EdgedecError with which the runtime failed, by the runtime's name."""
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
