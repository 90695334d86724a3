"""Plug-ins by entry point: runtimes, architectures, drafters, resolvers and others; edgedec's own like all others.

edgedec's own plug-ins are listed here too, so that they are found where package metadata is absent (in frozen
applications, or with a checkout on the path). A plug-in that does not import is a line in `edgedec doctor`; others go
on working.
"""

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from edgedec.errors import PluginError
from edgedec.extras import DISTRIBUTION

RUNTIMES = "edgedec.runtimes"
ARCHITECTURES = "edgedec.architectures"
DRAFTERS = "edgedec.drafters"
RESOLVERS = "edgedec.resolvers"
TEMPLATES = "edgedec.templates"
FOLDERS = "edgedec.folders"
GRAMMARS = "edgedec.grammars"
SESSIONS = "edgedec.sessions"

_BUILT_IN = {
    RUNTIMES: {
        "cpu": "edgedec_runtimes.cpu.runtime:Cpu",
        "llamacpp": "edgedec_runtimes.llamacpp.runtime:LlamaCpp",
        "onnx": "edgedec_runtimes.onnx.runtime:Onnx",
        "npu": "edgedec_runtimes.npu.runtime:Npu",
        "reference": "edgedec_runtimes.reference.runtime:Reference",
    },
    ARCHITECTURES: {
        "llama": "edgedec_runtimes.architectures.llama:LLAMA",
        "qwen2": "edgedec_runtimes.architectures.qwen2:QWEN2",
        "qwen3": "edgedec_runtimes.architectures.qwen3:QWEN3",
        "ernie4_5": "edgedec_runtimes.architectures.ernie4_5:ERNIE4_5",
        "exaone4": "edgedec_runtimes.architectures.exaone4:EXAONE4",
        "gemma2": "edgedec_runtimes.architectures.gemma2:GEMMA2",
        "gemma3": "edgedec_runtimes.architectures.gemma3:GEMMA3",
        "glm4": "edgedec_runtimes.architectures.glm4:GLM4",
        "gpt-oss": "edgedec_runtimes.architectures.gpt_oss:GPT_OSS",
        "granite": "edgedec_runtimes.architectures.granite:GRANITE",
        "lfm2": "edgedec_runtimes.architectures.lfm2:LFM2",
        "mistral3": "edgedec_runtimes.architectures.mistral3:MISTRAL3",
        "olmo2": "edgedec_runtimes.architectures.olmo2:OLMO2",
        "phi3": "edgedec_runtimes.architectures.phi3:PHI3",
        "granitemoe": "edgedec_runtimes.architectures.granitemoe:GRANITEMOE",
        "lfm2moe": "edgedec_runtimes.architectures.lfm2moe:LFM2MOE",
        "olmoe": "edgedec_runtimes.architectures.olmoe:OLMOE",
        "qwen2moe": "edgedec_runtimes.architectures.qwen2moe:QWEN2MOE",
        "qwen3moe": "edgedec_runtimes.architectures.qwen3moe:QWEN3MOE",
        "seed_oss": "edgedec_runtimes.architectures.seed_oss:SEED_OSS",
        "smollm3": "edgedec_runtimes.architectures.smollm3:SMOLLM3",
    },
    DRAFTERS: {
        "suffix": "edgedec.drafters.suffix.suffix:SuffixDrafter",
        "common": "edgedec.drafters.suffix.corpus:CommonDrafter",
        "recycling": "edgedec.drafters.ngram.recycling:RecyclingDrafter",
        "learned": "edgedec.drafters.suffix.learned:LearnedDrafter",
        "trigram": "edgedec.drafters.ngram.trigram:TrigramDrafter",
        "stand": "edgedec.drafters.ngram.stand:StandDrafter",
        "model": "edgedec.drafters.draft_model.model:DraftModel",
        "cascade": "edgedec.drafters.draft_model.cascade:CascadeModel",
        "head": "edgedec.drafters.head.head:HeadDrafter",
        "skip": "edgedec.drafters.self_speculation.skip:SkipDrafter",
        "exit": "edgedec.drafters.self_speculation.exit:ExitDrafter",
    },
    RESOLVERS: {"models": "edgedec_models.resolve:resolve"},
    FOLDERS: {"cache": "edgedec_models.folders:cache_folder", "heads": "edgedec_models.folders:shipped_heads"},
    TEMPLATES: {"jinja": "edgedec_runtimes.chat.template:ChatTemplate"},
    GRAMMARS: {"llguidance": "edgedec_runtimes.grammar.compiler:Llguidance"},
    SESSIONS: {"switching": "edgedec_methods.switching:Switching"},
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plug-in, which may or may not import.

    Attributes:
        group: One of RUNTIMES, ARCHITECTURES, DRAFTERS, RESOLVERS, TEMPLATES, FOLDERS, GRAMMARS, SESSIONS.
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


GROUPS = tuple(_BUILT_IN)


def plugins(group: str) -> dict[str, Plugin]:
    """Return the installed plug-ins of a group by name, edgedec's own first; no other package can take their names."""
    found = {name: Plugin(group, name, target, DISTRIBUTION) for name, target in _BUILT_IN[group].items()}
    for entry in metadata.entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown package"
        found.setdefault(entry.name, Plugin(group, entry.name, entry.value, package))
    return found


def is_own(group: str, name: str) -> bool:
    """Return whether the plug-in of that name is edgedec's own."""
    return name in _BUILT_IN[group]


def load_plugin(group: str, name: str) -> Any:
    """Import the plug-in of that name and return the object that it names.

    Raises:
        PluginError: The group has no plug-in of that name, or the plug-in does not import.
    """
    if is_own(group, name):  # without a look at all packages
        return Plugin(group, name, _BUILT_IN[group][name], DISTRIBUTION).load()
    found = plugins(group)
    if name not in found:
        kind = group.removeprefix("edgedec.").removesuffix("s")
        known = ", ".join(found) or "none"
        raise PluginError(f"no {kind} is called {name!r}; installed: {known} (edgedec doctor --all lists them)")
    return found[name].load()
