"""From a GGUF's header to its architecture, shape and switches, for the runtimes that run a model themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec.plugins import ARCHITECTURES, is_installed, load_of_type, load_plugin, plugins
from edgedec_runtimes.architectures.architecture import Architecture, Switches
from edgedec_runtimes.architectures.fused import unfused
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.nextn import without_nextn
from edgedec_runtimes.shared.hyperparameters import (
    ATTENTION,
    NO_MIXER,
    OF_TARGET,
    Hyperparameters,
    read_hyperparameters,
)


@dataclass(frozen=True, slots=True)
class Described:
    """What a header says of a network.

    Attributes:
        gguf: The header, with its tensors as `usual_tensors` returns them.
        architecture: The family of the network.
        switches: How it differs from others of that shape.
    """

    gguf: GGUF
    architecture: Architecture
    hyper: Hyperparameters
    switches: Switches


def read_description(gguf: GGUF, runtime: str) -> Described:
    """Return what the header of a GGUF says of its network.

    Args:
        runtime: The runtime's name, for messages.

    Raises:
        UnsupportedModelError: No architecture of that name is installed, or the file has a key that it does not know.
        ModelFormatError: The file contradicts itself.
        PluginError: The architecture is another package's, and does not import, or it is no Architecture.
    """
    name = get_text(gguf, "general.architecture") or "none"
    if not is_installed(ARCHITECTURES, name):
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {name[:60]!r}; the {runtime} runtime runs "
            f"{', '.join(plugins(ARCHITECTURES))}; use the llamacpp runtime"
        )
    architecture = load_of_type(ARCHITECTURES, name, Architecture)
    gguf = without_nextn(gguf)
    info = describe(gguf)
    said = read_hyperparameters(gguf, info, runtime, architecture.keys, architecture.ignored)
    layers = architecture.layers(Header(gguf, info, said))
    hyper = replace(said, layers=layers, n_layer=len(layers))
    switches = architecture.switches(Header(gguf, info, hyper))
    _check_layers(gguf, hyper, switches)
    return Described(usual_tensors(gguf, hyper), architecture, hyper, switches)


def _check_layers(gguf: GGUF, hyper: Hyperparameters, switches: Switches) -> None:
    """Refuse layers whose numbers contradict each other."""
    path = gguf.paths[0]
    for number, layer in enumerate(hyper.layers):
        if not layer.has(ATTENTION):
            continue
        n_rot, source = switches.rope_of(number).n_rot, hyper.layers[layer.kv_from]
        are_heads = 1 <= layer.n_head_kv <= layer.n_head and layer.n_head % layer.n_head_kv == 0
        if not are_heads or n_rot % 2 or not 1 <= n_rot <= layer.head_dim:
            raise ModelFormatError(
                f"{path}: layer {number} has {layer.n_head} heads on {layer.n_head_kv} key-value heads, {n_rot} "
                f"rotated elements of {layer.head_dim}; expected a multiple and an even number of at most the head: "
                "download the file again"
            )
        if layer.kv_from == OF_TARGET:
            continue
        has_source = layer.kv_from <= number and hyper.stores_kv(layer.kv_from)
        if not has_source or (source.n_head_kv, source.head_dim) != (layer.n_head_kv, layer.head_dim):
            raise ModelFormatError(
                f"{path}: layer {number} reads the keys and values of layer {layer.kv_from}, which has none of its "
                "shape; download the file again"
            )


def usual_tensors(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return a header in which the tensors of the layers have their usual names, and fused ones are their parts.

    What no layer reads is left out: layers that only predict further tokens (nextn), a head for ranking, tensors of
    other parts of the file, and keys and values of layers that read those of another one.
    """
    architecture: Architecture = load_plugin(ARCHITECTURES, hyper.architecture)
    placed = architecture.placed(without_nextn(gguf), hyper)
    whole = unfused(_with_ffn_norms(_renamed(placed, architecture.renamed), hyper), hyper)
    sharing = [number for number, layer in enumerate(hyper.layers) if layer.kv_from != number]
    unread = {f"blk.{layer}.{short}.weight" for layer in sharing for short in ("attn_k", "attn_v", "attn_k_norm")}
    tensors = {
        name: tensor
        for name, tensor in whole.tensors.items()
        if name not in unread and not name.startswith((*architecture.ignored, "cls."))
    }
    return whole if len(tensors) == len(whole.tensors) else replace(whole, tensors=MappingProxyType(tensors))


def _with_ffn_norms(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return a header in which the norm of a layer without a mixer is that before its feed-forward block."""
    alone = [number for number, layer in enumerate(hyper.layers) if layer.mixer == NO_MIXER]
    return _renamed(gguf, {f"blk.{number}.attn_norm.weight": f"blk.{number}.ffn_norm.weight" for number in alone})


def _renamed(gguf: GGUF, names: Mapping[str, str]) -> GGUF:
    """Return a header with other names of tensors; one whose new name is taken keeps its own."""
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        *place, short = name.split(".", 2)
        other = names.get(name, ".".join((*place, names.get(short, short))))
        is_taken = other in gguf.tensors
        tensors[name if is_taken else other] = tensor if is_taken else replace(tensor, name=other)
    return replace(gguf, tensors=MappingProxyType(tensors)) if names else gguf
