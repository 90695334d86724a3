"""Facts about the machine for a benchmark: versions, cores."""

import platform
from importlib import metadata
from typing import Any

import edgedec
from edgedec_runtimes.shared.cpu_count import usable_cores

_PACKAGES = ("numpy", "llama-cpp-python")


def versions() -> dict[str, Any]:
    """Return the versions of edgedec, Python and installed packages, the machine and its usable cores."""
    found: dict[str, Any] = {"edgedec": edgedec.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"machine": platform.processor() or platform.machine(), "cores": usable_cores()}
