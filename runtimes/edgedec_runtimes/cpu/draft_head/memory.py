"""The memory that a trained draft head takes on the cpu runtime, from its card."""

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edgedec.errors import UnsupportedModelError, counted
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.cpu.draft_head.parts import place_of
from edgedec_runtimes.cpu.draft_head.weights import read_layers, stored_bytes
from edgedec_runtimes.cpu.library import KERNEL_ROWS
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.tensor_places import TILE_TYPES
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import load_head

_KEPT_ROWS = 96  # rows of taps that native/draft_head/draft_head.h keeps for each session
_BLOCK_BYTES = 1 + 20 / 32  # of a number in native/kernels/kernels.h's ActivationBlock
_PAGE_TOKENS = 64
_USUAL_TAPS = 3  # of a head whose file names none


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the memory plan must know of a head.

    Attributes:
        own_bytes: Bytes of its own matrices when they are loaded.
        layers: The layers of a head that joins pairs; None for other heads.
    """

    card: HeadCard
    own_bytes: int
    layers: Network | None = None


def head_facts(path: Path) -> HeadFacts:
    """Return the facts of the head at a path (raises what load_head and require_runnable raise)."""
    return _facts(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=4)
def _facts(path: Path, modified_ns: int) -> HeadFacts:
    head = load_head(path)
    require_runnable(head)
    matrices = [(name, tensor) for name, tensor in head.tensors.items() if place_of(name, head.card).is_matrix]
    layers = None if head.layers is None else read_layers(head.layers, head.card.n_vocab_draft)
    own_bytes = sum(stored_bytes(name, tensor) for name, tensor in matrices) + (layers.job.n_bytes if layers else 0)
    facts = HeadFacts(head.card, own_bytes, layers.network if layers else None)
    del head, matrices, layers
    return_free_memory()
    return facts


def head_terms(facts: HeadFacts, n_output: int, n_ctx: int, n_parallel: int) -> tuple[MemoryTerm, ...]:
    """Return what a head adds to the memory plan of its target.

    Args:
        facts: The head.
        n_output: Bytes of the rows that it borrows of the target's output matrix.
        n_ctx: Tokens of a session.
        n_parallel: How many sessions there are.
    """
    card, block = facts.card, facts.card.block
    weights = facts.own_bytes + n_output
    if card.rows is not None:
        n_rows, n_embd = card.rows.n * (card.rows.n + 1), card.n_embd
        of_session = 2 * n_rows * n_embd + card.rows.n * card.n_vocab_draft
        shared = KERNEL_ROWS * 2 * n_embd * _BLOCK_BYTES + 4 * n_rows * n_embd
        return (
            MemoryTerm("draft head", weights, f"{card.name}, {card.n_vocab_draft} tokens"),
            MemoryTerm("rows of the draft head", int(shared + 4 * n_parallel * of_session), f"at most {n_rows}"),
        )
    if card.reads_target:  # it has no KV cache
        width, n_embd = card.n_embd_target, card.n_embd
        of_rows = KERNEL_ROWS * ((2 * width + n_embd) * _BLOCK_BYTES + 4 * (3 * width + 2 * n_embd))
        of_session = _KEPT_ROWS * width + card.n_vocab_draft
        return (
            MemoryTerm("draft head", weights, f"{card.name}, {card.n_vocab_draft} tokens"),
            MemoryTerm("taps of the draft head", int(of_rows + 4 * n_parallel * of_session), "hidden states"),
        )
    n_tokens = -(-n_ctx // _PAGE_TOKENS) * _PAGE_TOKENS
    n_layer = 1 if block is None else block.n_layer
    kv_bytes = 4 * n_tokens * n_layer * card.n_head_kv * card.head_dim
    width = (len(card.taps) or _USUAL_TAPS) * card.n_embd_target
    n_q, n_kv = card.n_head * card.head_dim, card.n_head_kv * card.head_dim
    floats = 2 * card.n_embd + 2 * n_q + 2 * n_kv + 2 * card.head_dim
    quantized = (5 if card.joins else 3) * card.n_embd + n_q + card.n_ff + width
    row = 2 * card.n_embd  # what the head makes of a row of a text: a pair, or a feature, its keys and its values
    of_session = _KEPT_ROWS * (width + row) + card.n_vocab_draft
    if block is not None:
        row = card.n_embd + 2 * n_layer * n_kv + card.head_dim
        if block.conv_length:
            row += card.n_embd + 2 * block.conv_length * (card.n_embd // block.conv_group)
        of_session = _KEPT_ROWS * width + block.n_drafts * (2 * card.n_vocab_draft + card.n_embd)
    activations = KERNEL_ROWS * (4 * (floats + row) + quantized * _BLOCK_BYTES)
    prompt = 4 * KERNEL_ROWS * width
    return (
        MemoryTerm("draft head", weights, f"{card.name}, {card.n_vocab_draft} tokens"),
        MemoryTerm(
            "KV cache of the draft head", n_parallel * kv_bytes, f"{counted(n_ctx, 'token')} × {n_parallel}", grows=True
        ),
        MemoryTerm("taps of the draft head", int(activations + 4 * n_parallel * of_session + prompt), "hidden states"),
    )


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
