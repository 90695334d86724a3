"""This distribution's name, and the command that installs what one of its extras needs.

On the package index, `edgedec` is another project with the same top-level package. So no message tells a person to
install `edgedec` with an extra: it names the packages of the extra, as our own metadata lists them.
"""

import re
from importlib import metadata

DISTRIBUTION = "edgedec-llm"
"""The name that pip knows this package by; it is imported, and run, as `edgedec`."""

_OF_EXTRA = r"""\bextra *== *["']{}["']"""


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra (such as "server").

    Where there is no metadata, or it has no such extra (sources on the path), it is a command for a clone.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = []
    return command_for(packages_of(lines, extra), extra)


def packages_of(requirements: list[str], extra: str) -> list[str]:
    """Return the packages, with their versions, that the lines of a distribution's metadata name for an extra.

    >>> packages_of(["numpy>=1.26", 'uvicorn>=0.30; extra == "server"'], "server")
    ['uvicorn>=0.30']
    """
    wanted = re.compile(_OF_EXTRA.format(re.escape(extra)))
    pairs = [line.partition(";") for line in requirements]
    return [package.strip() for package, _, condition in pairs if wanted.search(condition)]


def command_for(packages: list[str], extra: str) -> str:
    """Return the pip command for these packages; without any, the one that a clone takes.

    >>> command_for(["starlette>=0.40", "uvicorn>=0.30"], "server")
    'pip install "starlette>=0.40" "uvicorn>=0.30"'
    >>> command_for([], "server")
    'pip install ".[server]" in a clone of edgedec'
    """
    if not packages:
        return f'pip install ".[{extra}]" in a clone of edgedec'
    quoted = " ".join(f'"{package}"' for package in packages)
    return f"pip install {quoted}"
