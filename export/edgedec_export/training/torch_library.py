"""Whether torch is installed: only training needs it."""

import sys
from importlib.util import find_spec

from edgedec.errors import RuntimeUnavailableError
from edgedec.plugins import install_command

CPU_INDEX = ("--index-url", "https://download.pytorch.org/whl/cpu") if sys.platform == "linux" else ()
"""Arguments of pip, for a torch without CUDA; elsewhere than on Linux the package has none."""


def require_torch() -> None:
    """Raise RuntimeUnavailableError where torch is not installed; nothing is imported."""
    if find_spec("torch") is None:
        command = install_command("train")
        smaller = f"; for a machine without a GPU: {command} {' '.join(CPU_INDEX)}" if CPU_INDEX else ""
        raise RuntimeUnavailableError(f"training a head needs torch, which is not installed: {command}{smaller}")
