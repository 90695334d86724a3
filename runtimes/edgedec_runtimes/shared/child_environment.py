"""The environment of a Python process that this process starts."""

import os
import sys


def child_environment() -> dict[str, str]:
    """Return this process's environment, with its import path: a child imports what this process can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
