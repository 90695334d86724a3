"""Whether torch is installed: only training needs it."""

from importlib.util import find_spec

from edgedec.errors import RuntimeUnavailableError
from edgedec.extras import install_command


def require_torch() -> None:
    """Raise RuntimeUnavailableError where torch is not installed; nothing is imported."""
    if find_spec("torch") is None:
        raise RuntimeUnavailableError(
            f"training a head needs torch, which is not installed: {install_command('train')}"
        )
