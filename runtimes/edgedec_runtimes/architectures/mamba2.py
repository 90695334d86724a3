"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): layers are mixers with a state of fixed size, and have nothing else.

Other architectures have such mixers in some layers, or beside attention; what theirs have in common is here.
"""

from dataclasses import replace

from edgedec.errors import ModelFormatError
from edgedec_runtimes.architectures.architecture import Architecture, Recurrence, Switches
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import Rope
from edgedec_runtimes.shared.hyperparameters import NO_MIXER, RECURRENT, LayerShape

_SIZES = ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel")
STATE_SPACE_KEYS = frozenset(f"ssm.{name}" for name in _SIZES)
"""The metadata keys of mixers, below the architecture's name."""
STATE_SPACE_VECTORS = frozenset({"ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d"})
STATE_SPACE_NORM = frozenset({"ssm_norm.weight"})


def read_state_space(header: Header) -> Recurrence:
    """Return the sizes of a network's mixers.

    Raises:
        ModelFormatError: A size is missing or 0, or the heads do not share the elements and the groups evenly.
    """
    n_inner, n_head, n_state, n_group, length = (header.whole(f"ssm.{name}", 0) for name in _SIZES)
    if not min(n_inner, n_head, n_state, n_group, length) or n_inner % n_head or n_head % n_group:
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: the sizes {', '.join(f'ssm.{name}' for name in _SIZES)} are {n_inner}, {n_head}, "
            f"{n_state}, {n_group}, {length}; expected positive numbers, inner_size a multiple of time_step_rank, and "
            "that one of group_count: download the file again"
        )
    return Recurrence("space", n_head, n_group, n_state, n_inner // n_head, length)


def mixers_and_blocks(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of layers that are one thing each: attention, a feed-forward block, or else a mixer."""
    return tuple(
        replace(layer, mixer=RECURRENT if layer.mixer == NO_MIXER else layer.mixer, is_mixer=True)
        if not layer.n_ff
        else layer
        for layer in header.hyper.layers
    )


def _switches(header: Header) -> Switches:
    return Switches(rope=Rope(0, 1.0), attention_scale=1.0, recurrence=read_state_space(header))


MAMBA2 = Architecture(
    _switches,
    keys=STATE_SPACE_KEYS,
    needed=frozenset({"attn_norm.weight"}) | STATE_SPACE_VECTORS | STATE_SPACE_NORM,
    layers=mixers_and_blocks,
)
