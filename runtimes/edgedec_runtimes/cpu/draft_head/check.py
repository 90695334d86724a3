"""Which draft heads the cpu runtime's kernels take, checked before anything is loaded."""

import ctypes
import math

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.cpu.draft_head.parts import place_of
from edgedec_runtimes.cpu.tensor_places import TILE_TYPES
from edgedec_runtimes.trained_heads.head import Head

_MOST = {"n_vocab_draft": 2**24 - 1, "n_embd": 2**17, "n_head": 2**12, "head_dim": 2**12, "n_ff": 2**20}
_MULTIPLE = 16
_MOST_TAPS = 16
_SCALES_OF_BLOCK = ("embedding_scale", "logit_scale")
_MOST_OF_BLOCK = {"n_layer": 64, "size": 128, "rank": 2**14, "conv_length": 16}


def require_runnable(head: Head) -> None:
    """Check sizes and tensor types of a head.

    Raises:
        UnsupportedModelError: The kernels do not take one of them; the message names it.
    """
    card = head.card
    for name, most in _MOST.items():
        if getattr(card, name) > most:
            _refuse(head, f"{name} is {getattr(card, name)}, expected at most {most}")
    for name, most in _MOST_OF_BLOCK.items() if card.block is not None else ():
        if getattr(card.block, name) > most:
            _refuse(head, f"its block's {name} is {getattr(card.block, name)}, expected at most {most}")
    numbers = {"rms_epsilon": card.rms_epsilon, "rope_base": card.rope_base}
    if card.block is not None:
        numbers |= {name: getattr(card.block, name) for name in _SCALES_OF_BLOCK}
        numbers |= {"softcap": card.block.softcap} if card.block.softcap else {}
    for name, number in numbers.items():
        if not 0 < ctypes.c_float(number).value < math.inf:
            _refuse(head, f"{name} is {number}, expected a positive number that float32 holds")
    for name in ("n_embd", "head_dim"):
        if getattr(card, name) % _MULTIPLE:
            _refuse(head, f"{name} is {getattr(card, name)}, expected a multiple of {_MULTIPLE}")
    if len(card.taps) > _MOST_TAPS:
        _refuse(head, f"it has {len(card.taps)} taps, expected at most {_MOST_TAPS}")
    for name, tensor in head.tensors.items():
        if place_of(name, card).is_matrix and tensor.type not in TILE_TYPES:
            _refuse(head, f"its matrix {name!r} is {tensor.type.name}")


def _refuse(head: Head, why: str) -> None:
    raise UnsupportedModelError(
        f"the draft head {head.card.name} can't run on the cpu runtime: {why}; take another head, or none"
    )
