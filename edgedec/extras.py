"""The name of this distribution, and the pip command that installs a package of it, or the packages of an extra.

On the package index, `edgedec` is another project with the same top-level package. So a message never says `pip install
edgedec[extra]`: it names the packages of the extra, as the metadata of this distribution lists them.
"""

import re
from importlib import metadata

DISTRIBUTION = "edgedec-llm"
"""The name that pip knows this package by; it is imported, and run, as `edgedec`."""


def install_command(what: str) -> str:
    """Return the pip command that installs a package which edgedec needs, or those of an extra (such as "export").

    Where the sources are on the path without metadata, the command is one for a clone.
    """
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        requirements = []
    return command_for(packages_of(requirements, what), what)


def packages_of(requirements: list[str], what: str) -> list[str]:
    """Return the packages, with their versions, that the requirements of a distribution name for an extra, or as one.

    >>> packages_of(["numpy>=1.26", 'onnx>=1.17; extra == "export"'], "export")
    ['onnx>=1.17']
    >>> packages_of(["numpy>=1.26", 'onnx>=1.17; extra == "export"'], "numpy")
    ['numpy>=1.26']
    """
    condition = re.compile(rf"""\bextra *== *["']{re.escape(what)}["']""")
    pairs = [line.partition(";") for line in requirements]
    of_extra = [package.strip() for package, _, marker in pairs if condition.search(marker)]
    return of_extra or [package.strip() for package, *_ in pairs if re.split(r"[^\w.-]", package)[0] == what]


def command_for(packages: list[str], what: str) -> str:
    """Return the pip command that installs these packages; where there are none, the command for a clone.

    >>> command_for(["onnx>=1.17"], "export")
    'pip install "onnx>=1.17"'
    >>> command_for([], "export")
    'pip install ".[export]" in a clone of edgedec'
    """
    quoted = " ".join(f'"{package}"' for package in packages)
    return f"pip install {quoted}" if packages else f'pip install ".[{what}]" in a clone of edgedec'
