"""Plug-ins by entry point: runtimes, architectures, drafters, rules, resolvers and others; edgedec's own as all others.

edgedec's own are the entry points of its own distribution, which are read without a look at any other package. Those of
other packages are read once, when they are first asked for. A plug-in that does not import is a line in `edgedec
doctor`; others go on working.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, TypeVar

from edgedec.errors import PluginError

T = TypeVar("T")
DISTRIBUTION = "edgedec-llm"
"""The name that pip knows this package by; it is imported, and run, as `edgedec`.

On the package index, `edgedec` is another project with the same top-level package. So a message never says `pip install
edgedec[extra]`: it names the packages of the extra, as the metadata of this distribution lists them.
"""

RUNTIMES = "edgedec.runtimes"
ARCHITECTURES = "edgedec.architectures"
RESOLVERS = "edgedec.resolvers"
CONVERTERS = f"{RESOLVERS}:converter"
DRAFTERS = "edgedec.drafters"
DRAFT_MODELS = f"{DRAFTERS}:draft_model"
PREPARED_DRAFTERS = f"{DRAFTERS}:prepared_drafter"
HEAD_KINDS = "edgedec.head_kinds"
HEAD_FOLDERS = f"{HEAD_KINDS}:head_folder"
RULES = "edgedec.rules"
TREE_SHAPES = f"{RULES}:tree_shape"
SEARCHES = "edgedec.searches"
CHOOSERS = f"{SEARCHES}:chooser"
SCORERS = f"{SEARCHES}:scorer"
SESSIONS = "edgedec.sessions"
DENOISING_RULES = f"{SESSIONS}:denoising_rule"
TEXT_METHODS = "edgedec.text_methods"
TEMPLATES = f"{TEXT_METHODS}:template"
GRAMMARS = f"{TEXT_METHODS}:grammar"
_OF_MODELS = (RUNTIMES, ARCHITECTURES, RESOLVERS, CONVERTERS, SESSIONS, TEMPLATES, GRAMMARS)
_OF_DRAFTS = (DRAFTERS, RULES, TREE_SHAPES, HEAD_KINDS, HEAD_FOLDERS, DRAFT_MODELS, PREPARED_DRAFTERS)
_OF_TEXTS = (CHOOSERS, SCORERS, SEARCHES, TEXT_METHODS, DENOISING_RULES)
KINDS = _OF_MODELS + _OF_DRAFTS + _OF_TEXTS
"""What a plug-in can be: GROUP for an entry point NAME of that group, GROUP:TYPE for an entry point TYPE.NAME."""
GROUPS = tuple(dict.fromkeys(kind.partition(":")[0] for kind in KINDS))
"""The groups of entry points. One has what belongs together, such as searches and the choosers of texts."""
_FORMER = {f"edgedec.{kind.partition(':')[2]}s": kind for kind in KINDS if ":" in kind}  # groups, with their kinds now


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plug-in, which may or may not import.

    Attributes:
        kind: One of KINDS.
        name: The name by which users choose the plug-in.
        target: The object that it is, as "module:attribute".
        package: The distribution that it comes from, with its version; DISTRIBUTION for edgedec's own.
        former: The group that it is in, where that is one of earlier versions; else empty.
    """

    kind: str
    name: str
    target: str
    package: str
    former: str = ""

    def load(self) -> Any:
        """Import the target's module and return the target.

        Raises:
            PluginError: The import fails, for whatever reason; or the plug-in is made for an earlier version.
        """
        if self.former:
            group, _, word = self.kind.partition(":")
            place = f'"{word}.{self.name}" of {group}'
            raise PluginError(f"{self.package} has {self.name!r} in {self.former}, which is gone; it must be {place}")
        module_name, _, attribute = self.target.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                value = getattr(value, part)
        except Exception as error:
            raise PluginError(
                f"the plug-in {self.name!r} ({self.target}, from {self.package}) does not import: "
                f"{type(error).__name__}: {error}; reinstall or remove {self.package}"
            ) from error
        return value


def plugins(kind: str) -> dict[str, Plugin]:
    """Return the installed plug-ins of a kind by name, edgedec's own first; no other package can take their names.

    Raises:
        PluginError: edgedec itself is not installed.
    """
    by_name = dict(_own().get(kind, {}))
    for plugin in _of_others(tuple(sys.path)):
        if plugin.kind == kind:
            by_name.setdefault(plugin.name, plugin)
    return by_name


def is_own(kind: str, name: str) -> bool:
    """Return whether the plug-in of that name is edgedec's own (PluginError: edgedec itself is not installed)."""
    return name in _own().get(kind, {})


def is_installed(kind: str, name: str) -> bool:
    """Return whether there is a plug-in of that kind and name; other packages are looked at for others' names only."""
    return is_own(kind, name) or name in plugins(kind)


def load_plugin(kind: str, name: str) -> Any:
    """Import the plug-in of that name and return the object that it names.

    Raises:
        PluginError: There is no plug-in of that kind and name, or the plug-in does not import.
    """
    if is_own(kind, name):  # without a look at all packages
        return _own()[kind][name].load()
    by_name = plugins(kind)
    if name not in by_name:
        names = ", ".join(by_name) or "none"
        raise PluginError(
            f"no {word_for(kind)} is called {name!r}; installed: {names} (edgedec doctor --all lists them)"
        )
    return by_name[name].load()


def load_of_type(kind: str, name: str, expected: type[T]) -> T:
    """Import the plug-in of that name and return the object that it names, an instance of a class.

    Raises:
        PluginError: There is no plug-in of that kind and name, it does not import, or it is something else.
    """
    plugin = load_plugin(kind, name)
    if not isinstance(plugin, expected):
        raise PluginError(
            f"the {word_for(kind)} {name!r} is of the type {type(plugin).__name__}, not {expected.__name__}; remove "
            "its package (edgedec doctor --all names it)"
        )
    return plugin


def word_for(kind: str) -> str:
    """Return what messages call a plug-in of a kind.

    >>> word_for(TREE_SHAPES), word_for(SEARCHES)
    ('tree shape', 'search')
    """
    group, _, word = kind.removeprefix("edgedec.").replace("_", " ").partition(":")
    return word or (group.removesuffix("es") if group.endswith("ches") else group.removesuffix("s"))


def first_made(kind: str, *args: object, **options: object) -> Any:
    """Return what the factories of a kind make of these arguments: the first result that is not None, or None.

    Other packages' factories are asked before edgedec's own. One that fails is passed over, as if its package were not
    installed.

    Raises:
        EdgedecError: As edgedec's own factories.
    """
    candidates = plugins(kind).values()
    if not candidates:
        raise PluginError(f"no {word_for(kind)} is installed; reinstall {DISTRIBUTION}")
    for plugin in sorted(candidates, key=lambda plugin: plugin.package == DISTRIBUTION):
        with nullcontext() if plugin.package == DISTRIBUTION else suppress(Exception):
            if (made := plugin.load()(*args, **options)) is not None:
                return made
    return None


@cache
def _own() -> Mapping[str, Mapping[str, Plugin]]:
    """Return edgedec's own plug-ins, by kind and name."""
    try:
        entries = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError as error:
        raise PluginError(
            f"edgedec is on the path without the metadata of {DISTRIBUTION}, which names its plug-ins, "
            "such as its runtimes; install it: pip install -e . in a clone of edgedec"
        ) from error
    by_group: dict[str, dict[str, Plugin]] = {}
    for plugin in (_plugin(entry, DISTRIBUTION) for entry in entries):
        by_group.setdefault(plugin.kind, {})[plugin.name] = plugin
    return by_group


@lru_cache(maxsize=1)
def _of_others(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Return the plug-ins of the other packages that are installed on a path of imports, sys.path as it is now."""
    others = []
    for package in metadata.distributions(path=list(path)):
        # Most packages have no plug-in of ours: to look for the word first takes a fifth of the time of reading all.
        if "[edgedec." in (package.read_text("entry_points.txt") or "") and package.name != DISTRIBUTION:
            by = f"{package.name} {package.version}"
            with suppress(Exception):  # a damaged file must not keep other packages' plug-ins from working
                others += [_plugin(entry, by) for entry in package.entry_points]
    return tuple(sorted(others, key=lambda plugin: bool(plugin.former)))  # a package may be made for both versions


def _plugin(entry: metadata.EntryPoint, package: str) -> Plugin:
    """Return the plug-in of an entry point; TYPE.NAME has the type of its group, where that is one."""
    before, _, name = entry.name.partition(".")
    kind = f"{entry.group}:{before}"
    kind, name = (kind, name) if kind in KINDS else (_FORMER.get(entry.group, entry.group), entry.name)
    return Plugin(kind, name, entry.value, package, entry.group if entry.group in _FORMER else "")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
