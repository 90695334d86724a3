"""From a GGUF to a native model's weights: which tiles it needs, how they are packed, and how it gets them."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError
from edgedec.gguf.file import GGUF, floats, read_gguf
from edgedec.gguf.places import standing
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.tile_form import UNTILED
from edgedec.gguf.tile_header import HEADER_NAME
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm, format_bytes
from edgedec_runtimes.architectures.architecture import Recurrence
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.architectures.rope import turns_in
from edgedec_runtimes.cpu.library import (
    KERNEL_ROWS,
    Config,
    LayerShape,
    address,
    check,
    forced_instruction_set,
    keep_to_cores,
    native,
    new_handle,
)
from edgedec_runtimes.cpu.native_tables import NUMBERS, numbers
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.options import cpu_options
from edgedec_runtimes.cpu.tensor_places import DISTANCES, EMBEDDING, MIXERS, OUTPUT, PER_LAYER_ROWS, ROUTER_NORM, Placed
from edgedec_runtimes.cpu.tiles.cache import Job, Tiles, TileTensor, can_be_mapped, known_tile_file, open_tiles
from edgedec_runtimes.cpu.tiles.placing import planned_pages
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.cpu.tiles.streaming import StreamPlan, plan_streaming
from edgedec_runtimes.shared.cpu_count import cores_to_pin, usable_cores
from edgedec_runtimes.shared.hyperparameters import ENCODER
from edgedec_runtimes.shared.pages import native_handle

LAYOUT = "1"
"""The version of the arrangement in tiles (native/weights/tiles.h): another version has other tile files."""

_PIECE_BYTES = 8 << 20
_TILE_ROWS = 16
_FARTHEST = 128  # distances from here on are one range, in all models that have ranges of them


def tile_job(gguf: GGUF, network: Network, options: LoadOptions) -> Job:
    """Return the job of a network's tiles: one tensor for each matrix, in the order in which a forward reads them."""
    whole, chosen = read_gguf(gguf.paths[0]), cpu_options(options)
    gguf, library = usual_tensors(gguf, network), native()
    matrices = {placed.tensor.name: placed.tensor for placed in network.matrices}  # layers of several passes share them
    tensors = tuple(
        TileTensor(
            t.name,
            library.ec_tile_bytes(t.type, t.shape[1], t.shape[0]),
            unit_bytes=library.ec_tile_bytes(t.type, _TILE_ROWS, t.shape[0]),
        )
        for t in matrices.values()
    )
    return Job(
        gguf,
        tensors,
        LAYOUT,
        partial(_fill, gguf, frozenset(tensor.name for tensor in tensors)),
        cache_dir=options.cache_dir if chosen.tile_cache else None,
        tiles_only=options.tiles_only and chosen.tile_cache,
        mapped=chosen.mmap,
        huge_pages=chosen.huge_pages,
        rows_only=frozenset(placed.tensor.name for placed in rarely_read(network)),
        on_progress=options.on_progress,
        cancel=options.cancel,
        plain=_plain(whole, tensors) if whole.tensors == gguf.tensors else (),
    )


def _plain(gguf: GGUF, tiles: Sequence[TileTensor]) -> tuple[TileTensor, ...]:
    """Return what a tile file needs beside the tiles to take the place of a GGUF; () where it can't.

    It can't where a type's tiles can't be turned back, and where a model is split.
    """
    with_tiles = {tensor.name for tensor in tiles}
    if len(gguf.paths) > 1 or any(gguf.tensors[name].type not in UNTILED for name in with_tiles):
        return ()
    others = (TileTensor(t.name, t.n_bytes) for t in gguf.tensors.values() if t.name not in with_tiles)
    return (TileTensor(HEADER_NAME, gguf.n_header_bytes), *others)


def stream_plan(job: Job, network: Network, resident_bytes: int | None) -> StreamPlan | None:
    """Return how the weights share `resident_bytes` of memory; None where all of them may stay in memory.

    Raises:
        RequestError: `resident_bytes` is too little, or there can be no tile file to read from.
    """
    if resident_bytes is None or resident_bytes >= job.n_bytes:
        return None
    if not can_be_mapped(job):
        raise RequestError(
            "resident_bytes is less than the weights take, and there is no tile file to read the rest from, nor can "
            "one be made (tile_cache is off, or its folder can't be written or is full); allow all, or make room"
        )
    return plan_streaming(network, job.header.places(), resident_bytes)


def weights_term(
    job: Job,
    plan: StreamPlan | None,
    *,
    in_file: bool,
    held_as: str = "",
    n_threads: int | None = None,
    most_bytes: int = 0,
) -> MemoryTerm:
    """Return the weights' line of the memory plan.

    Args:
        job: The tiles.
        plan: How the weights are streamed; None where all of them stay in memory.
        in_file: Whether there is a tile file, from which rows of an embedding matrix are read; such a matrix does not
            count (`rarely_read`).
        held_as: How memory holds the weights (Tiles.held_as); "" before they are loaded.
        n_threads: The threads of a forward; None for all cores.
        most_bytes: Memory that may be taken to measure how fast memory is read, if that is not known yet.
    """
    if plan is not None:
        tiles = known_tile_file(job)
        pace = plan.pace(tiles or standing(job.gguf.paths[0]), n_threads or usable_cores(), most_bytes, job.cache_dir)
        return plan.memory_term(pace, "the tiles" if tiles else "the model's file, as there are no tiles yet")
    if not in_file:
        return MemoryTerm("weights (tiles)", job.n_bytes, held_as or "private")
    rows_only_bytes = sum(tensor.n_bytes for tensor in job.tensors if tensor.name in job.rows_only)
    if not held_as:
        held_as = planned_pages(job, rows_only_bytes, known_tile_file(job) or standing(job.gguf.paths[0]))
    tables = sum(tensor.n_bytes for tensor in job.tensors if tensor.name == PER_LAYER_TABLE)
    if tables:
        held_as += f"; {format_bytes(tables)} more stay in the file, of which a token reads a row for each layer"
    return MemoryTerm("weights (tiles)", job.n_bytes - rows_only_bytes, held_as)


def stream_tiles(job: Job, plan: StreamPlan) -> StreamedTiles:
    """Open the tiles in the cache, which are made first if need be, and read the parts that stay in memory.

    Raises:
        StorageError: The tiles can't be kept on the disk, or read.
        CancelledError, MemoryCapError, ModelFormatError: As open_tiles.
    """
    # Mapped and not copied, as mapping takes no memory as long as nothing is read.
    with open_tiles(replace(job, mapped=True, in_memory=False, huge_pages="off")) as tiles:
        assert tiles.path is not None, "they are in a file"
        return StreamedTiles(tiles.path, tiles.label, plan, on_progress=job.on_progress, cancel=job.cancel)


def _fill(gguf: GGUF, with_tiles: frozenset[str], name: str, out: NDArray[np.uint8], start: int) -> None:
    """Write a tensor's tiles from byte `start` on to `out`, reading the model's file a few rows at a time.

    The header, and a tensor that is not in `with_tiles`, are written as they are.
    """
    if name == HEADER_NAME:
        out[:] = np.frombuffer(gguf.read_header_bytes(), np.uint8)
        return
    tensor = gguf.tensors[name]
    if name not in with_tiles:
        out[:] = np.frombuffer(gguf.read_tensor_bytes(name, start, len(out)), np.uint8)
        return
    n_cols, n_all_rows = tensor.shape
    unit_bytes = native().ec_tile_bytes(tensor.type, _TILE_ROWS, n_cols)
    first = start // unit_bytes * _TILE_ROWS
    n_rows = min(len(out) // unit_bytes * _TILE_ROWS, n_all_rows - first)
    row_bytes = tensor.n_bytes // n_all_rows
    step = max(_TILE_ROWS, _PIECE_BYTES // row_bytes // _TILE_ROWS * _TILE_ROWS)
    for begin in range(0, n_rows, step):
        end = min(begin + step, n_rows)
        piece = gguf.read_tensor_bytes(name, (first + begin) * row_bytes, (end - begin) * row_bytes)
        data = np.frombuffer(piece, np.uint8)
        rows = (tensor.type, n_rows, n_cols, begin, end)
        code = native().ec_tile_pack(*rows, address(data), len(data), address(out), len(out))
        check(code, f"packing {name}")


def create(network: Network, n_threads: int, n_rows: int = KERNEL_ROWS) -> ctypes.c_void_p:
    """Return a new native model without weights, whose forwards take `n_rows`."""
    cores = cores_to_pin(n_threads)
    if cores:
        keep_to_cores(cores)
    shape = ctypes.byref(config_of(network)), n_threads, n_rows, forced_instruction_set()
    what = f"a network of the shape of {network.architecture}"
    return new_handle(lambda to: native().ec_model_create(*shape, to), what)


def config_of(network: Network) -> ctypes.Structure:
    """Return the sizes and switches of a network as the native library takes them."""
    switches = network.switches
    coded = _state_numbers(switches.recurrence) | {
        "activation": numbers("activations", "EC_")[switches.activation],
        "expert_gating": numbers("gatings", "EC_GATING_")[switches.expert_gating],
    }
    names = [field[0] for field in Config._fields_ if field[0] not in coded]
    plain = {name: getattr(network if hasattr(network, name) else switches, name) for name in names}
    return Config(**plain | coded)


def _state_numbers(recurrence: Recurrence | None) -> dict[str, int]:
    """Return the fields of Config about recurrent states."""
    names = ("state_rule", "n_state_head", "n_state_key_head", "n_state_key", "n_state_value", "state_tiled")
    if recurrence is None:
        return dict.fromkeys(names, 0)
    r = recurrence
    sizes = (numbers("state rules", "EC_RULE_")[r.rule], r.n_head, r.n_key_head, r.n_key, r.n_value, int(r.tiled))
    return dict(zip(names, sizes, strict=True))


def _native_shape(network: Network, layer: int) -> ctypes.Structure:
    """Return a layer's shape and what is special about it."""
    shape, switches = network.layers[layer], network.switches
    flags = NUMBERS["EC_LAYER_SLIDES"] * switches.slides(layer)
    flags += NUMBERS["EC_LAYER_UNROTATED"] * (not switches.rotates(layer))
    role = numbers("roles", "EC_ROLE_")[shape.role]
    sizes = (shape.n_head, shape.n_head_kv, shape.head_dim, network.dense_width(layer), shape.kv_from, role)
    return LayerShape(flags, MIXERS[shape.mixer], *sizes)


def set_weights(
    handle: ctypes.c_void_p, gguf: GGUF, network: Network, tiles: Tiles | StreamedTiles, n_ctx: int
) -> None:
    """Give a native model its weights and rotations, as attach() does, without finishing the model."""
    library = native()
    layers = (LayerShape * network.n_layer)(*(_native_shape(network, layer) for layer in range(network.n_layer)))
    check(library.ec_model_set_layers(handle, layers), str(gguf.paths[0]))
    if isinstance(tiles, StreamedTiles):
        tiles.attach(handle, network)
    else:
        _set_matrices(handle, network, tiles)
    for placed in network.vectors:
        data = np.frombuffer(gguf.read_tensor_bytes(placed.tensor.name), np.uint8)
        values = floats(placed.tensor.type, data)
        if not np.isfinite(values).all():
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {placed.tensor.name!r} holds what is no number; download the file again"
            )
        if placed.which == DISTANCES:
            is_encoder = network.layers[placed.layer].role == ENCODER
            values = _by_distance(values.reshape(placed.tensor.shape[::-1]), both_ways=is_encoder).ravel()
        if placed.which == ROUTER_NORM:  # a router reads normed states over the root of their length
            values *= np.float32(network.n_embd**-0.5)
        if placed.tensor.name.endswith("ssm_a") and (values > 0).any():
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {placed.tensor.name!r} holds {values.max()}, expected rates of at most 0; "
                "download the file again"
            )
        code = library.ec_model_set_vector(handle, placed.which, placed.layer, address(values), len(values))
        check(code, placed.tensor.name)
    _set_ropes(handle, gguf, network, n_ctx)


def _by_distance(table: NDArray[np.float32], *, both_ways: bool) -> NDArray[np.float32]:
    """Return float32[n_head, 257], what each head adds to a score by a key's position less its query's, -128 to 128.

    Args:
        table: By range and head. Half of the ranges that one direction has are single distances, the others are cut by
            logarithms up to the farthest one.
        both_ways: Half of the ranges are those of keys behind their queries; else all are those of keys before them.
    """
    behind = np.arange(-_FARTHEST, _FARTHEST + 1)
    n = len(table) // 2 if both_ways else len(table)
    far, single = np.abs(behind) if both_ways else np.maximum(-behind, 0), n // 2
    steps = (
        np.log(np.maximum(far, 1).astype(np.float32) / single) / np.float32(np.log(_FARTHEST / single)) * (n - single)
    )
    ranges = np.where(far < single, far, np.minimum(single + np.maximum(steps, 0).astype(np.int64), n - 1))
    return np.ascontiguousarray(table[ranges + n * (both_ways & (behind > 0))].T)


def _set_ropes(handle: ctypes.c_void_p, gguf: GGUF, network: Network, n_ctx: int) -> None:
    """Set how fast layers rotate queries and keys."""
    switches = network.switches
    for sliding, rope in enumerate((switches.rope, switches.rope_sliding)):
        if rope is not None and rope.n_rot:
            factors = turns_in(gguf, rope, n_ctx)
            speeds = np.ascontiguousarray(factors.frequencies)
            axes = None if factors.axes is None else address(factors.axes)
            code = native().ec_model_set_rope(handle, sliding, address(speeds), axes, len(speeds), factors.magnitude)
            check(code, str(gguf.paths[0]))


def rarely_read(network: Network) -> tuple[Placed, ...]:
    """Return the matrices of which a forward reads a few rows for a token: the table of what layers get of a token.

    So is the embedding matrix if it is not the output matrix as well, or if there is none, as in an encoder.
    """
    names = {matrix.which: matrix.tensor.name for matrix in network.matrices if matrix.which in (EMBEDDING, OUTPUT)}
    is_apart = network.is_encoder or (len(names) == 2 and names[OUTPUT] != names[EMBEDDING])
    kinds = (PER_LAYER_ROWS, EMBEDDING) if is_apart else (PER_LAYER_ROWS,)
    return tuple(matrix for matrix in network.matrices if matrix.which in kinds)


def bytes_by_type(network: Network) -> dict[GGMLType, int]:
    """Return the bytes of the tiles that forwards multiply, by their type."""
    by_type: dict[GGMLType, int] = {}
    rare = {placed.tensor.name for placed in rarely_read(network)}
    for tensor in (placed.tensor for placed in network.matrices):
        if tensor.name not in rare:
            n_bytes = native().ec_tile_bytes(tensor.type, tensor.shape[1], tensor.shape[0])
            by_type[tensor.type] = by_type.get(tensor.type, 0) + n_bytes
    return by_type


def _set_matrices(handle: ctypes.c_void_p, network: Network, tiles: Tiles) -> None:
    for placed in network.matrices:
        tensor, data = placed.tensor, tiles[placed.tensor.name]
        shape, at = tensor.shape[1::-1], address(data)
        code = native().ec_model_set_matrix(handle, placed.which, placed.layer, tensor.type, *shape, at, len(data))
        check(code, tensor.name)
    if tiles.mapping is not None:
        native().ec_model_set_mapping(handle, tiles.mapping.handle)
    if tiles.file is None:
        return
    for placed in rarely_read(network):
        fd, place = tiles.file.fileno(), tiles.header.places()[placed.tensor.name]
        code = native().ec_model_read_rows(handle, placed.which, native_handle(fd), os.fstat(fd).st_size, place)
        check(code, placed.tensor.name)
