"""LFM2 of Liquid AI (2025): most layers have a gated short convolution in place of attention."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import CONVOLUTION_KERNELS, QK_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import SCALING_KEYS
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION, NO_MIXER, LayerShape


def _switches(header: Header) -> Switches:
    return replace(plain(header), convolution_length=header.whole("shortconv.l_cache", 0))


def _layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers; those without key-value heads have a convolution."""
    return tuple(
        replace(layer, mixer=CONVOLUTION) if layer.mixer == NO_MIXER else layer for layer in header.hyper.layers
    )


LFM2 = Architecture(
    _switches,
    keys=SCALING_KEYS | {"shortconv.l_cache"},
    vectors=QK_NORMS | CONVOLUTION_KERNELS,
    renamed={"token_embd_norm.weight": "output_norm.weight"},
    layers=_layers,
)
