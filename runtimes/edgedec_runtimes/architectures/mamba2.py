"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): layers are mixers with a state of fixed size, and have nothing else.

Other architectures have such mixers in some layers, or beside attention; what theirs have in common is here.
"""

from dataclasses import replace

from edgedec.errors import ModelFormatError
from edgedec_runtimes.architectures.architecture import Architecture, StateSpace, Switches
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.rope import Rope
from edgedec_runtimes.shared.hyperparameters import STATE_SPACE, LayerShape

_SIZES = ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel")
STATE_SPACE_KEYS = frozenset(f"ssm.{name}" for name in _SIZES)
"""The metadata keys of mixers, below the architecture's name."""
STATE_SPACE_VECTORS = frozenset({"ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d"})
STATE_SPACE_NORM = frozenset({"ssm_norm.weight"})


def read_state_space(header: Header) -> StateSpace:
    """Return the sizes of a network's mixers.

    Raises:
        ModelFormatError: A size is missing or 0, or the heads do not share the elements and the groups evenly.
    """
    n_inner, n_head, n_state, n_group, length = (header.whole(f"ssm.{name}", 0) for name in _SIZES)
    if not (n_inner and n_head and n_state and n_group) or n_inner % n_head or n_head % n_group:
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: its mixers have {n_inner} elements in {n_head} heads of {n_group} groups, and "
            f"{n_state} numbers for each; expected 1 or more, and multiples: download the file again"
        )
    return StateSpace(n_inner, n_head, n_state, n_group, length)


def mixers_without_attention(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers, where those with neither attention nor a feed-forward block are mixers."""
    return tuple(
        replace(layer, mixer=STATE_SPACE) if not layer.n_head_kv and not layer.n_ff else layer
        for layer in header.hyper.layers
    )


def _switches(header: Header) -> Switches:
    return Switches(rope=Rope(0, 1.0), attention_scale=1.0, state_space=read_state_space(header))


MAMBA2 = Architecture(
    _switches,
    keys=STATE_SPACE_KEYS,
    needed=frozenset({"attn_norm.weight"}) | STATE_SPACE_VECTORS | STATE_SPACE_NORM,
    layers=mixers_without_attention,
)
