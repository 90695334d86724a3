"""Plug-ins by entry point: runtimes, architectures, drafters, rules, resolvers and others; edgedec's own as all others.

edgedec's own are the entry points of its own distribution, which are read without a look at any other package. Those of
other packages are read once, when they are first asked for. A plug-in that does not import is a line in `edgedec
doctor`; others go on working.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

from edgedec.errors import PluginError

DISTRIBUTION = "edgedec-llm"
"""The name that pip knows this package by; it is imported, and run, as `edgedec`.

On the package index, `edgedec` is another project with the same top-level package. So a message never says `pip install
edgedec[extra]`: it names the packages of the extra, as the metadata of this distribution lists them.
"""

RUNTIMES = "edgedec.runtimes"
ARCHITECTURES = "edgedec.architectures"
DRAFTERS = "edgedec.drafters"
RULES = "edgedec.rules"
TREE_SHAPES = "edgedec.tree_shapes"
RESOLVERS = "edgedec.resolvers"
HEAD_KINDS = "edgedec.head_kinds"
HEAD_FOLDERS = "edgedec.head_folders"
TEMPLATES = "edgedec.templates"
GRAMMARS = "edgedec.grammars"
CHOOSERS = "edgedec.choosers"
SEARCHES = "edgedec.searches"
TEXT_METHODS = "edgedec.text_methods"
SESSIONS = "edgedec.sessions"
DRAFT_MODELS = "edgedec.draft_models"
PREPARED_DRAFTERS = "edgedec.prepared_drafters"
DENOISING_RULES = "edgedec.denoising_rules"
GROUPS = (
    *(RUNTIMES, ARCHITECTURES, DRAFTERS, RULES, TREE_SHAPES, RESOLVERS),
    *(HEAD_KINDS, HEAD_FOLDERS, TEMPLATES, GRAMMARS, CHOOSERS, SEARCHES, TEXT_METHODS, SESSIONS),
    *(DRAFT_MODELS, PREPARED_DRAFTERS, DENOISING_RULES),
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plug-in, which may or may not import.

    Attributes:
        group: One of GROUPS.
        name: The name by which users choose the plug-in.
        target: The object that it is, as "module:attribute".
        package: The distribution that it comes from, with its version; DISTRIBUTION for edgedec's own.
    """

    group: str
    name: str
    target: str
    package: str

    def load(self) -> Any:
        """Import the target's module and return the target.

        Raises:
            PluginError: The import fails, for whatever reason.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise PluginError(
                f"the plug-in {self.name!r} ({self.target}, from {self.package}) does not import: "
                f"{type(error).__name__}: {error}; reinstall or remove {self.package}"
            ) from error
        return found


def plugins(group: str) -> dict[str, Plugin]:
    """Return the installed plug-ins of a group by name, edgedec's own first; no other package can take their names.

    Raises:
        PluginError: edgedec itself is not installed.
    """
    found = dict(_own().get(group, {}))
    for plugin in _of_others(tuple(sys.path)):
        if plugin.group == group:
            found.setdefault(plugin.name, plugin)
    return found


def is_own(group: str, name: str) -> bool:
    """Return whether the plug-in of that name is edgedec's own (PluginError: edgedec itself is not installed)."""
    return name in _own().get(group, {})


def load_plugin(group: str, name: str) -> Any:
    """Import the plug-in of that name and return the object that it names.

    Raises:
        PluginError: The group has no plug-in of that name, or the plug-in does not import.
    """
    if is_own(group, name):  # without a look at all packages
        return _own()[group][name].load()
    found = plugins(group)
    if name not in found:
        known = ", ".join(found) or "none"
        raise PluginError(
            f"no {kind_of(group)} is called {name!r}; installed: {known} (edgedec doctor --all lists them)"
        )
    return found[name].load()


def kind_of(group: str) -> str:
    """Return what messages call a plug-in of a group.

    >>> kind_of(TREE_SHAPES), kind_of(SEARCHES)
    ('tree shape', 'search')
    """
    name = group.removeprefix("edgedec.").replace("_", " ")
    return name.removesuffix("es") if name.endswith("ches") else name.removesuffix("s")


def first_made(group: str, *args: object, **options: object) -> Any:
    """Return what the factories of a group make of these arguments: the first result that is not None, or None.

    Other packages' factories are asked before edgedec's own. One that fails is passed over, as if its package were not
    installed.

    Raises:
        EdgedecError: As edgedec's own factories.
    """
    found = plugins(group).values()
    if not found:
        raise PluginError(f"no {kind_of(group)} is installed; reinstall {DISTRIBUTION}")
    made = None
    for plugin in sorted(found, key=lambda plugin: plugin.package == DISTRIBUTION):
        if plugin.package == DISTRIBUTION:
            made = plugin.load()(*args, **options)
        else:
            with suppress(Exception):  # one package's fault must not keep a model from answering
                made = plugin.load()(*args, **options)
        if made is not None:
            break
    return made


@cache
def _own() -> Mapping[str, Mapping[str, Plugin]]:
    """Return edgedec's own plug-ins, by group and name."""
    try:
        entries = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError as error:
        raise PluginError(
            f"edgedec is on the path without the metadata of {DISTRIBUTION}, which names its plug-ins, "
            "such as its runtimes; install it: pip install -e . in a clone of edgedec"
        ) from error
    found: dict[str, dict[str, Plugin]] = {}
    for entry in entries:
        found.setdefault(entry.group, {})[entry.name] = Plugin(entry.group, entry.name, entry.value, DISTRIBUTION)
    return found


@lru_cache(maxsize=1)
def _of_others(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Return the plug-ins of the other packages that are installed on a path of imports, sys.path as it is now."""
    found = []
    for package in metadata.distributions(path=list(path)):
        # Most packages have no plug-in of ours: to look for the word first takes a fifth of the time of reading all.
        if "[edgedec." in (package.read_text("entry_points.txt") or "") and package.name != DISTRIBUTION:
            by = f"{package.name} {package.version}"
            found += [Plugin(entry.group, entry.name, entry.value, by) for entry in package.entry_points]
    return tuple(found)


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
