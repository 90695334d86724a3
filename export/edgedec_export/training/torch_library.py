"""Whether torch is installed: only training needs it."""

import sys
from importlib.util import find_spec

from edgedec.errors import RuntimeUnavailableError
from edgedec.plugins import install_command

_CPU_ONLY = "--index-url https://download.pytorch.org/whl/cpu"  # elsewhere the package is for processors already


def require_torch() -> None:
    """Raise RuntimeUnavailableError where torch is not installed; nothing is imported."""
    if find_spec("torch") is None:
        command = install_command("train")
        smaller = f"; for a machine without a GPU: {command} {_CPU_ONLY}" if sys.platform == "linux" else ""
        raise RuntimeUnavailableError(f"training a head needs torch, which is not installed: {command}{smaller}")
