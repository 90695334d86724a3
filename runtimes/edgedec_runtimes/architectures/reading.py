"""From a GGUF's header to its architecture, shape and switches, for the runtimes that run a model themselves."""

from dataclasses import dataclass

from edgedec.errors import PluginError, UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec.plugins import ARCHITECTURES, is_own, load_plugin, plugins
from edgedec_runtimes.architectures.architecture import Architecture, Switches
from edgedec_runtimes.architectures.fused import unfused
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.shared.hyperparameters import Hyperparameters, read_hyperparameters


@dataclass(frozen=True, slots=True)
class Described:
    """What a header says of a network.

    Attributes:
        gguf: The header, with the parts of fused matrices in their place.
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
    info = describe(gguf)
    hyper = read_hyperparameters(gguf, info, runtime, architecture.keys)
    switches = architecture.switches(Header(gguf, info, hyper))
    return Described(unfused(gguf, hyper), architecture, hyper, switches)
