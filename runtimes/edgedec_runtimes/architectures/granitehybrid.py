"""Granite 4 of IBM: a Granite most of whose layers have a Mamba-2 mixer in place of attention; some are mixtures."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import INPUT_NORMS, Switches
from edgedec_runtimes.architectures.experts import SHARED_KEYS, mixed
from edgedec_runtimes.architectures.granite import GRANITE
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.mamba2 import (
    STATE_SPACE_KEYS,
    STATE_SPACE_NORM,
    STATE_SPACE_VECTORS,
    read_state_space,
)
from edgedec_runtimes.shared.hyperparameters import NO_MIXER, RECURRENT, LayerShape


def _switches(header: Header) -> Switches:
    start = replace(GRANITE.switches(header), recurrence=read_state_space(header))
    return mixed(header, start, normed=True) if header.hyper.n_expert else start


def _layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers; those without key-value heads have a mixer."""
    return tuple(replace(layer, mixer=RECURRENT) if layer.mixer == NO_MIXER else layer for layer in header.hyper.layers)


GRANITEHYBRID = replace(
    GRANITE,
    switches=_switches,
    keys=GRANITE.keys | SHARED_KEYS | STATE_SPACE_KEYS,
    needed=INPUT_NORMS | STATE_SPACE_VECTORS | STATE_SPACE_NORM,
    layers=_layers,
)
