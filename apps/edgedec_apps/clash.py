"""Finds another distribution with files in the folder `edgedec`.

On the package index, `edgedec` is another project, which installs into a folder of the same name. This file imports
nothing of `edgedec`, as those files may be that project's.
"""

from importlib import metadata

_COMMAND = "edgedec_apps.cli:main"


def clash() -> str:
    """Return a sentence that names the other distributions and what to do; an empty text where there is none."""
    commands = metadata.entry_points(group="console_scripts")
    ours = {command.dist.name for command in commands if command.value == _COMMAND and command.dist is not None}
    foreign = sorted(set(metadata.packages_distributions().get("edgedec", ())) - ours)
    if not foreign:
        return ""
    versions = " and ".join(f"{name} {metadata.version(name)}" for name in foreign)
    return (
        f"another project, {versions}, has files in the folder edgedec, as this program does, and may have replaced "
        f"some; remove both (pip uninstall {' '.join([*foreign, *sorted(ours)])}), and install this one again"
    )
