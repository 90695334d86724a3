"""From a GGUF's header to its architecture, shape and switches, for the runtimes that run a model themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from edgedec.errors import PluginError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec.plugins import ARCHITECTURES, is_own, load_plugin, plugins
from edgedec_runtimes.architectures.architecture import Architecture, Switches
from edgedec_runtimes.architectures.fused import unfused
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.nextn import without_nextn
from edgedec_runtimes.shared.hyperparameters import Hyperparameters, read_hyperparameters


@dataclass(frozen=True, slots=True)
class Described:
    """What a header says of a network.

    Attributes:
        gguf: The header, with its tensors as `usual_tensors` returns them.
        architecture: The family of the network.
        hyper: Its shape.
        switches: How it differs from others of that shape.
    """

    gguf: GGUF
    architecture: Architecture
    hyper: Hyperparameters
    switches: Switches


def read_description(gguf: GGUF, runtime: str) -> Described:
    """Return what the header of a GGUF says of its network.

    Args:
        gguf: The model's header.
        runtime: The runtime's name, for messages.

    Raises:
        UnsupportedModelError: No architecture of that name is installed, or the file has a key that it does not know.
        ModelFormatError: The file contradicts itself.
        PluginError: The architecture is another package's, and does not import, or it is no Architecture.
    """
    name = get_text(gguf, "general.architecture") or "none"
    if not is_own(ARCHITECTURES, name) and name not in plugins(ARCHITECTURES):
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {name[:60]!r}; the {runtime} runtime runs "
            f"{', '.join(plugins(ARCHITECTURES))}; use the llamacpp runtime"
        )
    architecture = load_plugin(ARCHITECTURES, name)
    if not isinstance(architecture, Architecture):
        raise PluginError(
            f"the plug-in {name!r} is no architecture but of the type {type(architecture).__name__}; remove its package"
        )
    gguf = without_nextn(gguf)
    info = describe(gguf)
    hyper = read_hyperparameters(gguf, info, runtime, architecture.keys, is_hybrid=architecture.is_hybrid)
    switches = architecture.switches(Header(gguf, info, hyper))
    return Described(usual_tensors(gguf, hyper), architecture, hyper, switches)


def usual_tensors(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return a header in which the tensors of the layers have their usual names, and fused ones are their parts.

    Layers that only predict further tokens (nextn) are left out.
    """
    architecture: Architecture = load_plugin(ARCHITECTURES, hyper.architecture)
    return unfused(_renamed(without_nextn(gguf), architecture.renamed), hyper)


def _renamed(gguf: GGUF, names: Mapping[str, str]) -> GGUF:
    """Return a header with other names of tensors; one whose new name is taken keeps its own."""
    found: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        *place, short = name.split(".", 2)
        other = names.get(name, ".".join((*place, names.get(short, short))))
        is_taken = other in gguf.tensors
        found[name if is_taken else other] = tensor if is_taken else replace(tensor, name=other)
    return replace(gguf, tensors=MappingProxyType(found)) if names else gguf
