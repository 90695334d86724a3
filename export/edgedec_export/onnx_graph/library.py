"""Whether the package onnx, an extra of edgedec, is there to write graphs with."""

from edgedec.errors import RuntimeUnavailableError
from edgedec.plugins import install_command


def require_onnx() -> None:
    """Import `onnx`, which the files of this folder use; call this before importing one of them.

    Raises:
        RuntimeUnavailableError: The package is not installed, or cannot be imported.
    """
    try:
        import onnx.helper  # noqa: F401  # to see whether it works
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"the export to ONNX needs the package onnx, which can't be imported ({error}); {install_command('export')}"
        ) from error
