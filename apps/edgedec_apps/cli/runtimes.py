"""What the installed runtimes say; one that fails is told, and never fatal."""

from collections.abc import Callable
from typing import TypeVar

from edgedec import plugins
from edgedec.errors import EdgedecError, PluginError
from edgedec.model import Runtime

T = TypeVar("T")


def ask_runtimes(question: Callable[[Runtime], T]) -> dict[str, T | EdgedecError]:
    """Return each runtime's answer by its name, or the error that came instead."""
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
