"""Plug-ins by entry point: runtimes, drafters, resolvers, templates, grammars; ours by the same door as all others.

Ours are listed here too, so that they are found where package metadata is absent (frozen applications, a checkout
on the path). A plug-in that fails to import is a line in `edgedec doctor`, never fatal.
"""

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from edgedec.errors import PluginError
from edgedec.extras import DISTRIBUTION

RUNTIMES = "edgedec.runtimes"
DRAFTERS = "edgedec.drafters"
RESOLVERS = "edgedec.resolvers"
TEMPLATES = "edgedec.templates"
FOLDERS = "edgedec.folders"
GRAMMARS = "edgedec.grammars"

_BUILT_IN = {
    RUNTIMES: {
        "cpu": "edgedec_runtimes.cpu.runtime:Cpu",
        "llamacpp": "edgedec_runtimes.llamacpp.runtime:LlamaCpp",
        "onnx": "edgedec_runtimes.onnx.runtime:Onnx",
        "npu": "edgedec_runtimes.npu.runtime:Npu",
        "reference": "edgedec_runtimes.reference.runtime:Reference",
    },
    DRAFTERS: {
        "suffix": "edgedec.drafters.suffix.suffix:SuffixDrafter",
        "common": "edgedec.drafters.suffix.corpus:CommonDrafter",
        "recycling": "edgedec.drafters.ngram.recycling:RecyclingDrafter",
        "trigram": "edgedec.drafters.ngram.trigram:TrigramDrafter",
        "stand": "edgedec.drafters.ngram.stand:StandDrafter",
        "model": "edgedec.drafters.draft_model.model:DraftModel",
        "cascade": "edgedec.drafters.draft_model.cascade:CascadeModel",
        "skip": "edgedec.drafters.self_speculation.skip:SkipDrafter",
        "exit": "edgedec.drafters.self_speculation.exit:ExitDrafter",
    },
    RESOLVERS: {"models": "edgedec_models.resolve:resolve"},
    FOLDERS: {"cache": "edgedec_models.folders:cache_folder"},
    TEMPLATES: {"jinja": "edgedec_runtimes.chat.template:ChatTemplate"},
    GRAMMARS: {"llguidance": "edgedec_runtimes.grammar.compiler:Llguidance"},
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that may or may not import.

    Attributes:
        group: One of RUNTIMES, DRAFTERS, RESOLVERS, TEMPLATES, FOLDERS, GRAMMARS.
        name: What users call it.
        target: "module:attribute".
        package: The distribution it comes from, with its version; DISTRIBUTION for ours.
    """

    group: str
    name: str
    target: str
    package: str

    def load(self) -> Any:
        """Import it and return the object named.

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


GROUPS = tuple(_BUILT_IN)


def plugins(group: str) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, ours first; a name of ours can't be taken over."""
    found = {name: Plugin(group, name, target, DISTRIBUTION) for name, target in _BUILT_IN[group].items()}
    for entry in metadata.entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown package"
        found.setdefault(entry.name, Plugin(group, entry.name, entry.value, package))
    return found


def is_own(group: str, name: str) -> bool:
    """Return whether the plug-in of that name is ours; no other package's can take the name."""
    return name in _BUILT_IN[group]


def load_plugin(group: str, name: str) -> Any:
    """Return the object that the named plug-in of a group is.

    Raises:
        PluginError: There is none of that name, or it does not import.
    """
    found = plugins(group)
    if name not in found:
        kind = group.removeprefix("edgedec.").removesuffix("s")
        known = ", ".join(found) or "none"
        raise PluginError(f"no {kind} is called {name!r}; installed: {known} (edgedec doctor lists them)")
    return found[name].load()
