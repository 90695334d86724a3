"""Finds and loads the native library, and declares its functions to ctypes. The interface is native/edgedec_cpu.h."""

import ctypes
import os
import re
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from edgedec.errors import CancelledError, MemoryCapError, RuntimeUnavailableError, SessionError, StorageError
from edgedec.plugins import DISTRIBUTION
from edgedec_runtimes.cpu.native_tables import NAMES, NUMBERS, VERSION, structures, type_of
from edgedec_runtimes.shared.native import library_name

ARITHMETIC = "3"
"""The version of what the kernels compute, raised when a sum changes its order: KV caches and measurements that were
stored under another version belong to other bits, and are not used."""
OK, INVALID, NO_MEMORY, CANCELLED, UNREADABLE, NOT_FINITE = (NUMBERS[name] for name in NAMES["results"])
KV_TYPES = {
    "f16": NUMBERS["EC_KV_F16"],
    "q8_0": NUMBERS["EC_KV_INT8"],
    "q8_0/q4_0": NUMBERS["EC_KV_INT8_INT4"],
    "q4_0": NUMBERS["EC_KV_INT4"],
    "gear": NUMBERS["EC_KV_GEAR"],
}
KERNEL_ROWS = 256
"""Most rows that go through the layers together; also the most rows of a tree."""

_NAME = library_name("edgedec_cpu")


STRUCTURES = structures()
"""The structures of native_tables.py."""
Config, LayerShape, Part = STRUCTURES["ec_config"], STRUCTURES["ec_layer"], STRUCTURES["ec_part"]
Group, Item, EncoderConfig = STRUCTURES["ec_group"], STRUCTURES["ec_item"], STRUCTURES["ec_encoder_config"]
DraftHeadConfig, DraftRules = STRUCTURES["ec_draft_head_config"], STRUCTURES["ec_draft_rules"]
Drafted, DraftItem = STRUCTURES["ec_drafted"], STRUCTURES["ec_draft_item"]
LOOK_UP = ctypes.CFUNCTYPE(c_int32, POINTER(c_int32), c_int32, c_void_p, c_int64)
"""ec_look_up: finds the embeddings of tokens."""

_DECLARED = re.compile(r"EC_API ([^(;]*?)(\w+)\(([^)]*)\);")  # a function: its result, its name, its arguments


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
    header = Path(__file__).with_name("native") / "edgedec_cpu.h"
    declare(library, header.read_text(encoding="utf-8"))
    compare(library)
    return library


def compare(library: Any) -> None:
    """Compare structures and names with those that the library was compiled with.

    Raises:
        RuntimeUnavailableError: They differ.
    """
    for name, structure in STRUCTURES.items():
        theirs, ours = library.ec_size(name.encode()), ctypes.sizeof(structure)
        if theirs != ours:
            raise RuntimeUnavailableError(
                f"{library._name} has {name} with {theirs} bytes, expected {ours}; install edgedec again"
            )
    if library.ec_abi_version() != VERSION:
        raise RuntimeUnavailableError(
            f"{library._name} has interface {library.ec_abi_version()}, expected {VERSION}; install edgedec again"
        )


def declare(library: Any, header: str) -> None:
    """Declare to ctypes the functions of the library that a C header declares.

    Raises:
        RuntimeUnavailableError: The library lacks one.
    """
    for result, name, arguments in _DECLARED.findall(header):
        function = getattr(library, name, None)
        if function is None:
            path = library._name
            raise RuntimeUnavailableError(f"{path} has no {name}: it is of another version; install edgedec again")
        function.restype = None if result.strip() == "void" else type_of(result)
        kinds = [re.sub(r"\w+$", "", each.strip()) for each in arguments.split(",") if each.strip() != "void"]
        function.argtypes = [type_of(kind) for kind in kinds]


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


def new_handle(make: Callable[[Any], int], what: str) -> ctypes.c_void_p:
    """Return the native object that a call makes, given where to put its handle; `what` begins an error's message."""
    handle = ctypes.c_void_p()
    check(make(ctypes.byref(handle)), what)
    return handle


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
