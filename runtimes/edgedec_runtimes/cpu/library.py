"""Finds and loads the native library, and declares its functions to ctypes. The interface is native/edgedec_cpu.h."""

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from edgedec.errors import CancelledError, MemoryCapError, RuntimeUnavailableError, SessionError, StorageError
from edgedec.plugins import DISTRIBUTION
from edgedec_runtimes.shared.native import library_name

ABI_VERSION = 29
ARITHMETIC = "2"
"""The version of what the kernels compute, raised when a sum changes its order: KV caches and measurements that were
stored under another version belong to other bits, and are not used."""
OK, INVALID, NO_MEMORY, CANCELLED, UNREADABLE, NOT_FINITE = range(6)
OPERATIONS = ("norm", "q, k, v", "rope and KV", "attention", "attention out", "gate and up", "down", "logits", "other")
ACTIVATIONS = {"silu": 0, "gelu": 1, "relu": 2, "relu2": 3}
"""What a gate becomes before it multiplies (Switches.activation)."""
GATINGS = {"softmax": 0, "sigmoid": 1, "chosen": 2}
"""How scores of experts become weights (Switches.expert_gating)."""
STATE_RULES = {"delta": 1, "space": 2}
"""How rows change recurrent states (Recurrence.rule)."""
KV_TYPES = {"f16": 0, "q8_0": 1, "q4_0": 2, "gear": 3}
KERNEL_ROWS = 256
"""Most rows that go through the layers together; also the most rows of a tree."""

_NAME = library_name("edgedec_cpu")


class Config(ctypes.Structure):
    """ec_config: the switches by which architectures differ."""

    _fields_ = (
        *((name, c_int32) for name in ("n_vocab", "n_embd", "n_layer", "rope_interleaved", "activation", "ungated")),
        *((name, c_int32) for name in ("wide_norms", "value_norm", "n_per_layer")),
        *((name, c_int32) for name in ("sliding_window", "temperature_tokens")),
        *((name, c_float) for name in ("temperature_scale", "rms_epsilon", "embedding_scale", "residual_scale")),
        *((name, c_float) for name in ("logit_scale", "attention_scale", "attention_softcap", "logit_softcap")),
        *((name, c_int32) for name in ("n_expert", "n_expert_used", "n_ff_expert")),
        *((name, c_int32) for name in ("expert_gating", "norm_experts")),
        *((name, c_float) for name in ("expert_scale", "glu_limit", "glu_slope")),
        *((name, c_int32) for name in ("attention_gate", "state_rule", "n_state_head", "n_state_key_head")),
        *((name, c_int32) for name in ("n_state_key", "n_state_value", "state_tiled")),
        *((name, c_int32) for name in ("norms_after_rope", "early_router", "norm_period", "scaled_vectors")),
    )


class Item(ctypes.Structure):
    """ec_item: one session's rows of a forward."""

    _fields_ = (
        ("session", c_void_p),
        ("n_past", c_int32),
        ("n_rows", c_int32),
        ("tokens", c_void_p),
        ("hidden", c_void_p),
        ("first_layer", c_int32),
        ("n_wanted", c_int32),
        ("wanted", c_void_p),
        ("parents", c_void_p),
        ("attn", c_void_p),
        ("mlp", c_void_p),
        ("taps", c_void_p),
        ("tapped", c_void_p),
        ("n_taps", c_int32),
        ("block", c_int32),
        ("n_added", c_int32),
        ("places", c_void_p),
        ("mass_layers", c_void_p),
        ("mass_weights", c_void_p),
        ("mass", c_void_p),
        ("n_mass", c_int32),
        ("n_mass_heads", c_int32),
        ("n_mass_slots", c_int32),
    )


MUTUAL_BLOCK = 3
"""EC_BLOCK_MUTUAL: all rows of an item see one another."""
LAYER_SLIDES, LAYER_UNROTATED = 1, 2
"""What is special about a layer (LayerShape.flags)."""


class LayerShape(ctypes.Structure):
    """ec_layer: the shape of a layer."""

    _fields_ = tuple(
        (name, c_int32) for name in ("flags", "mixer", "n_head", "n_head_kv", "head_dim", "n_ff", "kv_from")
    )


LOOK_UP = ctypes.CFUNCTYPE(c_int32, POINTER(c_int32), c_int32, c_void_p, c_int64)
"""ec_look_up: finds the embeddings of tokens."""


class Part(ctypes.Structure):
    """ec_part: weights that a stage of a forward reads, and where they lie in a file of tiles."""

    _fields_ = (
        ("stage", c_int32),
        ("layer", c_int32),
        ("row_begin", c_int64),
        ("row_end", c_int64),
        ("offset", c_uint64),
        ("n_bytes", c_uint64),
        ("data", c_void_p),
    )


class DraftHeadConfig(ctypes.Structure):
    """ec_draft_head_config: the shape of a draft head, and the switches by which heads differ."""

    _fields_ = (
        *((name, c_int32) for name in ("n_vocab", "n_embd", "n_layer", "n_head", "n_head_kv", "head_dim", "n_ff")),
        *((name, c_int32) for name in ("n_taps", "fc_norm", "norm_before_residual", "feeds_back_normed")),
        *((name, c_int32) for name in ("block_size", "block_shifted", "block_causal", "markov", "rank", "top_k")),
        *((name, c_int32) for name in ("conv_length", "conv_group", "mask_token")),
        *((name, c_float) for name in ("rms_epsilon", "rope_base", "embedding_scale", "logit_scale", "logit_softcap")),
    )


class DraftRules(ctypes.Structure):
    """ec_draft_rules: when a drafted chain ends."""

    _fields_ = (
        ("n_max", c_int32),
        ("n_edges", c_int32),
        ("edges", c_void_p),
        ("factors", c_void_p),
        ("least_path", c_double),
        ("most_seconds", c_double),
    )


class Drafted(ctypes.Structure):
    """ec_drafted: a node of a drafted chain."""

    _fields_ = (
        ("token", c_int32),
        ("p", c_float),
        ("second_token", c_int32),
        ("second_p", c_float),
        ("sure", c_float),
    )


class DraftItem(ctypes.Structure):
    """ec_draft_item: a text to draft for."""

    _fields_ = (
        ("session", c_void_p),
        ("n_past", c_int32),
        ("token", c_int32),
        ("rules", DraftRules),
        ("nodes", POINTER(Drafted)),
        ("scores", c_void_p),
        ("n_found", c_int32),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ec_abi_version": (c_int32, ()),
    "ec_last_error": (c_char_p, ()),
    "ec_instruction_sets": (c_char_p, ()),
    "ec_read_bandwidth": (c_double, (c_int32, c_uint64)),
    "ec_keep_to_cores": (c_int32, (c_int32, c_void_p, c_void_p)),
    "ec_mapping_open": (c_int32, (c_void_p, c_uint64, c_int64, POINTER(c_void_p))),
    "ec_mapping_check": (c_int32, (c_void_p,)),
    "ec_mapping_close": (None, (c_void_p,)),
    "ec_tile_bytes": (c_uint64, (c_int32, c_int64, c_int64)),
    "ec_tile_pack": (
        c_int32,
        (c_int32, c_int64, c_int64, c_int64, c_int64, c_void_p, c_uint64, c_void_p, c_uint64),
    ),
    "ec_rows_to_q4_0": (c_int32, (c_int32, c_int64, c_int64, c_void_p, c_uint64, c_void_p, c_uint64)),
    "ec_model_create": (c_int32, (POINTER(Config), c_int32, c_int32, c_char_p, POINTER(c_void_p))),
    "ec_model_set_matrix": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int64, c_int64, c_void_p, c_uint64)),
    "ec_model_set_mapping": (None, (c_void_p, c_void_p)),
    "ec_model_set_vector": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_int64)),
    "ec_model_set_layers": (c_int32, (c_void_p, POINTER(LayerShape))),
    "ec_model_set_rope": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_double)),
    "ec_model_set_ahead": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32)),
    "ec_model_time_products": (c_int32, (c_void_p, c_int32, c_int32, c_uint64, c_uint64, POINTER(c_double))),
    "ec_model_adapt": (
        c_int32,
        (c_void_p, *(c_int32,) * 4, c_int64, c_float, c_void_p, c_uint64, c_void_p, c_uint64),
    ),
    "ec_model_finish": (c_int32, (c_void_p,)),
    "ec_model_finish_elsewhere": (c_int32, (c_void_p, LOOK_UP)),
    "ec_model_instruction_set": (c_char_p, (c_void_p,)),
    "ec_model_seconds": (None, (c_void_p, c_void_p)),
    "ec_model_stream_experts": (c_int32, (c_void_p, c_int32)),
    "ec_model_experts": (None, (c_void_p, c_void_p, c_void_p)),
    "ec_model_expert_reads": (None, (c_void_p, c_void_p)),
    "ec_model_destroy": (None, (c_void_p,)),
    "ec_session_open": (c_int32, (c_void_p, c_int32, c_int32, POINTER(c_void_p))),
    "ec_session_fork": (c_int32, (c_void_p, c_int32, POINTER(c_void_p))),
    "ec_session_move": (c_int32, (c_void_p, c_void_p, c_int32, c_int32)),
    "ec_session_saved_bytes": (c_uint64, (c_void_p, c_int32)),
    "ec_session_save": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p, c_uint64)),
    "ec_session_vector_bytes": (c_uint64, (c_void_p, c_int32)),
    "ec_session_save_vectors": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
    "ec_session_load_vectors": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
    "ec_session_load": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
    "ec_session_state_bytes": (c_uint64, (c_void_p, c_int32)),
    "ec_session_save_state": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p, c_uint64)),
    "ec_session_load_state": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
    "ec_session_page_bytes": (c_uint64, (c_void_p,)),
    "ec_session_save_pages": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_uint64)),
    "ec_session_load_pages": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_uint64)),
    "ec_sum": (c_uint64, (c_void_p, c_uint64)),
    "ec_session_adapt": (c_int32, (c_void_p, c_void_p, c_int32)),
    "ec_session_close": (None, (c_void_p,)),
    "ec_forward": (c_int32, (c_void_p, POINTER(Item), c_int32, c_void_p, c_void_p, c_void_p)),
    "ec_find_kernels": (c_void_p, (c_char_p,)),
    "ec_row_total": (c_double, (c_void_p, c_void_p, c_int64, POINTER(c_float))),
    "ec_row_above": (c_int64, (c_void_p, c_void_p, c_int64, c_float, c_void_p, c_int64)),
    "ec_row_top_k": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "ec_row_nucleus": (c_int64, (c_void_p, c_void_p, c_int64, c_double, c_void_p, c_int64)),
    "ec_row_contenders": (c_int64, (c_void_p, c_void_p, c_int64, c_float, c_uint64, c_void_p, c_int64)),
    "ec_file_read": (c_int32, (c_int64, c_uint64, c_uint64, c_uint64, c_void_p)),
    "ec_model_read_rows": (c_int32, (c_void_p, c_int32, c_int64, c_uint64, c_uint64)),
    "ec_model_place_matrix": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int64, c_int64, c_uint64, c_uint64)),
    "ec_model_stream": (c_int32, (c_void_p, c_int64, c_uint64, POINTER(Part), c_int32, c_uint64)),
    "ec_model_streamed_bytes": (c_uint64, (c_void_p,)),
    "ec_draft_head_create": (
        c_int32,
        (c_void_p, POINTER(DraftHeadConfig), POINTER(Config), *(c_void_p,) * 3, POINTER(c_void_p)),
    ),
    "ec_draft_head_layers": (c_void_p, (c_void_p,)),
    "ec_draft_head_set_matrix": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int64, c_int64, c_void_p, c_uint64)),
    "ec_draft_head_set_vector": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_int64)),
    "ec_draft_head_finish": (c_int32, (c_void_p,)),
    "ec_draft_head_destroy": (None, (c_void_p,)),
    "ec_session_follow": (c_int32, (c_void_p, c_void_p)),
    "ec_session_take": (c_int32, (POINTER(Item),)),
    "ec_draft_scores": (c_int32, (c_void_p, c_int32)),
    "ec_draft_chains": (c_int32, (c_void_p, c_int32)),
    "ec_draft_branches": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p, POINTER(c_int32))),
    "ec_draft_read_seconds": (c_double, (c_void_p,)),
    "ec_draft_state_bytes": (c_uint64, (c_void_p,)),
    "ec_draft_saved_bytes": (c_uint64, (c_void_p, c_int32)),
    "ec_draft_save": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
    "ec_draft_load": (c_int32, (c_void_p, c_int32, c_void_p, c_uint64)),
}


@cache
def native() -> Any:
    """Return the library, loaded once (RuntimeUnavailableError where this installation has none that fits)."""
    path = _find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeUnavailableError(
            f"the cpu runtime's library {path} does not load ({error}); install edgedec again"
        ) from error
    declare(library, _SIGNATURES)
    if library.ec_abi_version() != ABI_VERSION:
        raise RuntimeUnavailableError(
            f"{path} has interface {library.ec_abi_version()}, expected {ABI_VERSION}; install edgedec again"
        )
    return library


def declare(library: Any, signatures: dict[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Declare functions of the library to ctypes (RuntimeUnavailableError where it lacks one)."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            path = library._name
            raise RuntimeUnavailableError(f"{path} has no {name}: it is of another version; install edgedec again")
        function.restype, function.argtypes = result, arguments


def _find() -> Path:
    """Return the library's path: beside this file, or where an editable install has built it."""
    override = os.environ.get("EDGEDEC_CPU_LIBRARY")
    if override:
        return Path(override)
    beside = Path(__file__).with_name(_NAME)
    if beside.exists():
        return beside
    try:
        installed = Path(str(metadata.distribution(DISTRIBUTION).locate_file(f"edgedec_runtimes/cpu/{_NAME}")))
    except metadata.PackageNotFoundError:
        installed = beside
    if not installed.exists():
        raise RuntimeUnavailableError(
            f"the cpu runtime's library {_NAME} is not installed; install edgedec with pip, which builds it"
        )
    return installed


def last_error() -> str:
    """Return the native library's message for the last call in this thread that failed."""
    return str(native().ec_last_error().decode(errors="replace"))


class _Carried(threading.local):
    error: BaseException | None = None


_carried = _Carried()  # by a callback through native code, in each thread


def carry(error: BaseException) -> int:
    """Return the code by which a callback fails; check() then raises `error` for the native call around it."""
    _carried.error = error
    return UNREADABLE


def check(code: int, what: str) -> None:
    """Raise the error that a native call's code stands for, with `what` in its message; OK raises nothing.

    Where a callback failed, what it raised is raised.
    """
    if code == OK:
        return
    error, _carried.error = _carried.error, None
    if error is not None:
        raise error
    reason = last_error()
    if code == NO_MEMORY:
        raise MemoryCapError(f"{what}: {reason}; close programs, or use a shorter context or a smaller model")
    if code == CANCELLED:
        raise CancelledError(f"{what}: {reason}")
    if code == UNREADABLE:
        raise StorageError(
            f"{what}: {reason}; check the disk, and load the model again, which makes damaged tiles anew"
        )
    raise SessionError(f"{what}: {reason}; this should have been refused earlier, please report it")


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this processor that the library has kernels for, best first."""
    return tuple(native().ec_instruction_sets().decode().split())


def forced_instruction_set() -> bytes | None:
    """Return the instruction set that EDGEDEC_CPU_ISA names, or None for the best one.

    Raises:
        RuntimeUnavailableError: This processor or this build does not have that instruction set.
    """
    name = os.environ.get("EDGEDEC_CPU_ISA")
    if not name:
        return None
    if name not in instruction_sets():
        raise RuntimeUnavailableError(
            f"EDGEDEC_CPU_ISA is {name!r}; here the cpu runtime has {', '.join(instruction_sets())}"
        )
    return name.encode()


def keep_to_cores(cores: Sequence[tuple[int, ...]]) -> None:
    """Have each thread of forwards on len(cores) threads run on the logical processors of one core only."""
    cpus = [cpu for core in cores for cpu in core]
    n_cpus = [len(core) for core in cores]
    code = native().ec_keep_to_cores(len(cores), (c_int32 * len(cpus))(*cpus), (c_int32 * len(n_cpus))(*n_cpus))
    check(code, "threads and cores")


def read_bandwidth(n_threads: int, n_bytes: int = 1 << 30) -> float:
    """Return how many bytes per second `n_threads` threads read from memory, measured on `n_bytes` bytes."""
    return float(native().ec_read_bandwidth(n_threads, n_bytes))


def address(array: Any) -> int:
    """Return the address of a numpy array's data."""
    return int(array.ctypes.data)
