"""Falcon-H1 of TII (Zuo et al. 2025, arXiv:2507.22448): every layer has attention and a Mamba-2 mixer side by side."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import INPUT_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.mamba2 import (
    STATE_SPACE_KEYS,
    STATE_SPACE_NORM,
    STATE_SPACE_VECTORS,
    read_state_space,
)
from edgedec_runtimes.architectures.rope import SCALING_KEYS
from edgedec_runtimes.shared.hyperparameters import ATTENTION_AND_RECURRENT, LayerShape


def _switches(header: Header) -> Switches:
    return replace(plain(header), recurrence=read_state_space(header))


def _layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers; all of them have both mixers."""
    return tuple(replace(layer, mixer=ATTENTION_AND_RECURRENT) for layer in header.hyper.layers)


FALCON_H1 = Architecture(
    _switches,
    keys=SCALING_KEYS | STATE_SPACE_KEYS,
    vectors=STATE_SPACE_NORM,
    needed=INPUT_NORMS | STATE_SPACE_VECTORS,
    renamed={"ffn_norm": "ffn_norm.weight"},
    layers=_layers,
)
