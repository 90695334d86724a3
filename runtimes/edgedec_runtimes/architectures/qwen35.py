"""Qwen3.5 and Qwen3.6 (2026): three of four layers have the gated delta rule in place of attention.

The gated delta rule: Yang et al. 2024, arXiv:2412.06464. The attention has a gate for each head (Qiu et al. 2025,
arXiv:2505.06708).
"""

from dataclasses import replace

from edgedec.errors import ModelFormatError
from edgedec_runtimes.architectures.architecture import (
    INPUT_NORMS,
    QK_NORMS,
    RECURRENCE_VECTORS,
    Architecture,
    Recurrence,
    Switches,
    plain,
)
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.shared.hyperparameters import ATTENTION, RECURRENT, LayerShape

_INTERVAL = 4  # one layer of so many has attention, the last of each group, where a file does not say
_SIZES = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
DELTA_KEYS = frozenset({"full_attention_interval", "attention.recurrent_layers", *(f"ssm.{name}" for name in _SIZES)})


def delta_switches(header: Header, *, tiled: bool) -> Switches:
    """Return the switches of a network with gated delta rules.

    Args:
        tiled: Which key a head has (Recurrence.tiled).

    Raises:
        ModelFormatError: A size is missing, or the sizes contradict each other.
    """
    length, n_key_head, n_inner, n_state, n_head = (header.whole(f"ssm.{name}", 0) for name in _SIZES)
    if not (min(length, n_key_head, n_state, n_head) and n_inner == n_head * n_state and n_head % n_key_head == 0):
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: the sizes {', '.join(f'ssm.{name}' for name in _SIZES)} are {length}, "
            f"{n_key_head}, {n_inner}, {n_state}, {n_head}; expected positive numbers, inner_size = time_step_rank * "
            "state_size, and time_step_rank a multiple of group_count: download the file again"
        )
    recurrence = Recurrence("delta", n_head, n_key_head, n_state, n_state, length, tiled)
    return replace(plain(header), attention_gate=True, recurrence=recurrence)


def delta_layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers: which have attention, the file says by layer, or by an interval."""
    shapes = header.hyper.layers
    interval = header.whole("full_attention_interval", _INTERVAL) or _INTERVAL
    recurs = header.flags("attention.recurrent_layers") or tuple(not whole for whole in header.every(interval))
    if ATTENTION not in {shape.mixer for shape in shapes}:
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: no block is left that is a layer with heads; download the file again"
        )
    return tuple(replace(shape, mixer=RECURRENT) if recurs[number] else shape for number, shape in enumerate(shapes))


def _switches(header: Header) -> Switches:
    return delta_switches(header, tiled=True)


QWEN35 = Architecture(
    _switches,
    keys=DELTA_KEYS | {"rope.dimension_sections"},  # sections are of pictures: of text, all positions are equal
    vectors=QK_NORMS,
    needed=INPUT_NORMS | RECURRENCE_VECTORS,
    renamed={
        "attn_qkv.weight": "ssm_mix.weight",
        "attn_gate.weight": "ssm_gate.weight",
        "ssm_ba.weight": "ssm_alpha.weight",
        "post_attention_norm.weight": "ffn_norm.weight",
    },
    layers=delta_layers,
)
