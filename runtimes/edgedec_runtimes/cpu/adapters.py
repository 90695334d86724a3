"""Low-rank adapters on the cpu runtime: their tiles, what they take of memory, and the scales of a session."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError, counted
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.cpu.library import KERNEL_ROWS, address, check, native
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.weights.adapter_pairs import Floats
from edgedec_runtimes.weights.adapters import adapter_bytes, load_adapters, pair_of


@dataclass(frozen=True, slots=True)
class Attached:
    """The adapters of a native model, in the order in which they are added.

    Attributes:
        names: Their paths.
        sha256: Of the content of each, hex.
        tiles: Their matrices, which the native model borrows.
    """

    names: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()
    tiles: Sequence[NDArray[np.uint8]] = ()


NO_ADAPTERS = Attached()


def attach_adapters(handle: ctypes.c_void_p, gguf: GGUF, network: Network, options: LoadOptions) -> Attached:
    """Give a native model, whose matrices are set, its adapters; what is returned must outlive the model.

    Raises:
        What load_adapters raises.
    """
    adapters = load_adapters([path for path, _ in options.adapters], gguf)
    tiles: list[NDArray[np.uint8]] = []
    for number, adapter in enumerate(adapters):
        unused = set(adapter.pairs)
        for placed in network.matrices:
            name, pair = pair_of(adapter, gguf, placed.tensor)
            if pair is None:
                continue
            unused.discard(name)
            a, b = _tiles(pair.a), _tiles(pair.b)
            tiles += [a, b]
            place, rank = (placed.which, placed.layer), pair.a.shape[0]
            parts = address(a), len(a), address(b), len(b)
            code = native().ec_model_adapt(handle, number, *place, _type_of(pair.a), rank, pair.factor, *parts)
            check(code, f"{adapter.path}: {placed.tensor.name}")
        if unused:
            raise UnsupportedModelError(
                f"{adapter.path}: the pair of {min(unused)!r} changes what is no matrix here; merge it with PEFT "
                "(merge_and_unload), and convert the result"
            )
    return Attached(
        tuple(str(adapter.path) for adapter in adapters), tuple(adapter.sha256 for adapter in adapters), tiles
    )


def adapter_terms(options: LoadOptions, network: Network, path: Path) -> tuple[MemoryTerm, ...]:
    """Return the terms of the adapters that the options name for the model in a file; none where they name none.

    Raises:
        What load_adapters raises, where the header of an adapter does not fit the model's.
    """
    if not options.adapters:
        return ()
    gguf = read_gguf(path)
    n_bytes = sum(adapter_bytes(adapter, gguf) for adapter, _ in options.adapters)
    widest = max(map(network.dense_width, range(network.n_layer)))
    n_q = max(layer.n_q for layer in network.layers)
    floats = KERNEL_ROWS * (network.n_embd + n_q + widest)  # that products read beside what is quantized
    return (MemoryTerm("adapters", n_bytes + 4 * floats, counted(len(options.adapters), "adapter")),)


def set_scales(session: ctypes.c_void_p, scales: Sequence[float]) -> None:
    """Set what a native session multiplies the part of each adapter by."""
    used = scales if any(scales) else ()
    code = native().ec_session_adapt(session, (ctypes.c_float * len(used))(*used), len(used))
    check(code, "the scales of adapters")


def _type_of(matrix: Floats) -> GGMLType:
    return GGMLType.F16 if matrix.dtype == np.float16 else GGMLType.F32


def _tiles(matrix: Floats) -> NDArray[np.uint8]:
    """Return the tiles of a matrix."""
    n_rows, n_cols = matrix.shape
    kind, rows = _type_of(matrix), np.ascontiguousarray(matrix)
    out = np.empty(native().ec_tile_bytes(kind, n_rows, n_cols), np.uint8)
    code = native().ec_tile_pack(kind, n_rows, n_cols, 0, n_rows, address(rows), rows.nbytes, address(out), len(out))
    check(code, "packing an adapter")
    return out
