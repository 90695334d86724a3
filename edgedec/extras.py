"""The name of this distribution, and the pip command that installs the packages of one of its extras.

On the package index, `edgedec` is another project with the same top-level package. So a message never says `pip install
edgedec[extra]`: it names the packages of the extra, as the metadata of this distribution lists them.
"""

import re
from importlib import metadata

DISTRIBUTION = "edgedec-llm"
"""The name that pip knows this package by; it is imported, and run, as `edgedec`."""


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra (such as "server").

    Where the sources are on the path without metadata, the command is one for a clone.
    """
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        requirements = []
    return command_for(packages_of(requirements, extra), extra)


def packages_of(requirements: list[str], extra: str) -> list[str]:
    """Return the packages, with their versions, that the requirements of a distribution name for an extra.

    >>> packages_of(["numpy>=1.26", 'uvicorn>=0.30; extra == "server"'], "server")
    ['uvicorn>=0.30']
    """
    condition = re.compile(rf"""\bextra *== *["']{re.escape(extra)}["']""")
    pairs = [line.partition(";") for line in requirements]
    return [package.strip() for package, _, marker in pairs if condition.search(marker)]


def command_for(packages: list[str], extra: str) -> str:
    """Return the pip command that installs these packages; where there are none, the command for a clone.

    >>> command_for(["starlette>=0.40", "uvicorn>=0.30"], "server")
    'pip install "starlette>=0.40" "uvicorn>=0.30"'
    >>> command_for([], "server")
    'pip install ".[server]" in a clone of edgedec'
    """
    quoted = " ".join(f'"{package}"' for package in packages)
    return f"pip install {quoted}" if packages else f'pip install ".[{extra}]" in a clone of edgedec'
