"""Whether another distribution has files in our top-level package `edgedec`.

On the package index, `edgedec` is another project, whose files lie in a folder of the same name. This file imports
nothing of `edgedec`, which may be that project's by now.
"""

from importlib import metadata

_COMMAND = "edgedec_apps.cli:main"


def clash() -> str:
    """Return a sentence that names the other distributions and says what to do; empty where there is none."""
    commands = metadata.entry_points(group="console_scripts")
    ours = {command.dist.name for command in commands if command.value == _COMMAND and command.dist is not None}
    foreign = sorted(set(metadata.packages_distributions().get("edgedec", ())) - ours)
    if not foreign:
        return ""
    named = " and ".join(f"{name} {metadata.version(name)}" for name in foreign)
    return (
        f"another project, {named}, has files in the same folder edgedec as this program, and each may replace files "
        f"of the other; remove both (pip uninstall {' '.join([*foreign, *sorted(ours)])}), and install this one again"
    )
