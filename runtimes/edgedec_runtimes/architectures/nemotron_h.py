"""Nemotron-H of NVIDIA (2025, arXiv:2504.03624): a layer is attention, a Mamba-2 mixer, or a feed-forward block.

Positions are not rotated. A feed-forward block has no gate: its activation is the square of ReLU (So et al. 2021,
arXiv:2109.08668).
"""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import (
    BIASES,
    INPUT_NORMS,
    OUTPUT_BIAS,
    Architecture,
    Switches,
    plain,
)
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.mamba2 import (
    STATE_SPACE_KEYS,
    STATE_SPACE_NORM,
    STATE_SPACE_VECTORS,
    mixers_and_blocks,
    read_state_space,
)
from edgedec_runtimes.architectures.rope import SCALING_KEYS


def _switches(header: Header) -> Switches:
    return replace(
        plain(header),
        unrotated=(True,) * header.hyper.n_layer,
        activation="relu2",
        ungated=True,
        recurrence=read_state_space(header),
    )


NEMOTRON_H = Architecture(
    _switches,
    keys=SCALING_KEYS | STATE_SPACE_KEYS | {"attention.layer_norm_epsilon"},
    vectors=BIASES | {OUTPUT_BIAS},
    needed=INPUT_NORMS | STATE_SPACE_VECTORS | STATE_SPACE_NORM,
    layers=mixers_and_blocks,
)
