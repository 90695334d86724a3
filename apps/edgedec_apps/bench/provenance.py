"""Where a figure of a benchmark comes from: the commit, the machine, the versions."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import edgedec
from edgedec.plugins import installed_version
from edgedec.processor import cpu_name
from edgedec_runtimes.shared.cpu_count import usable_cores

_PACKAGES = ("numpy", "llama-cpp-python")


def provenance() -> dict[str, Any]:
    """Return the commit of the running script's checkout, the processor's name and the versions.

    The commit ends in "-dirty" where files differ from it.
    """
    return {"commit": _commit(), "cpu": cpu_name(), "versions": versions()}


def versions() -> dict[str, Any]:
    """Return the versions of edgedec, Python and installed packages, the machine and its usable cores."""
    by_name: dict[str, Any] = {"edgedec": edgedec.__version__, "python": platform.python_version()}
    by_name |= {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    return by_name | {"machine": platform.processor() or platform.machine(), "cores": usable_cores()}


def report(figures: dict[str, Any], out: Path | None) -> None:
    """Print figures with where they come from as one line of JSON; write that to the file `out`, too, if given."""
    document = figures | provenance()
    print(json.dumps(document))
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
