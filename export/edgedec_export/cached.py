"""Graphs in the cache: a GGUF is exported once, for a runtime that takes nothing but graphs.

graphs/NAME-KEY/    below the cache's root; KEY stands for the file's place, size, time of change and header
"""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from edgedec.errors import EdgedecError
from edgedec.gguf.file import FLOATS, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.storage.cache_files import cache_folder, delete_folder, is_ours
from edgedec_export.folder import read_manifest
from edgedec_export.packing.weights import pack_levels
from edgedec_export.positions import require_operations
from edgedec_export.temporary import storage_errors
from edgedec_export.to_onnx import export_onnx
from edgedec_models.fetching.lock import locked
from edgedec_models.storage import require_space
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.tile_files.record import read_record
from edgedec_runtimes.weights.levels import LEVELS

_GRAPH_BYTES = 4_000_000  # of the graph and the vocabulary, beside the weights; only for the room on the disk
_RELEASE = 1  # grows when graphs are written otherwise


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A graph in the cache: its folder, its size, and the name of the GGUF's file ("" where it is unknown)."""

    path: Path
    n_bytes: int
    source: str


def refusal(path: Path) -> str | None:
    """Return why a GGUF can't be exported, from its header; None where it can be."""
    try:
        gguf = read_gguf(path)
        require_operations(gguf, read_network(gguf))
    except EdgedecError as error:
        return str(error)
    others = {t.type.name for t in gguf.tensors.values() if t.type not in FLOATS and t.type not in LEVELS}
    return f"{path}: no graph holds weights of the type {min(others)}" if others else None


def graph_folder(path: Path, cache_dir: Path | None) -> Path:
    """Return where the graph of a GGUF lies, or will lie."""
    gguf = read_gguf(path)
    record = None if gguf.form is None else read_record(path)  # of the file whose place a tile file took
    times = [part.stat().st_mtime_ns if record is None else record.mtime_ns for part in gguf.paths]
    state = f"{_RELEASE} {gguf.n_bytes} {times} {gguf.header_hash}"
    return _folder(cache_folder(cache_dir)) / f"{path.stem}-{_hash(os.fspath(path.absolute()))}-{_hash(state)}"


def graph_bytes(path: Path) -> int:
    """Return the bytes of the weights in the graph of a GGUF, before it is made; at most a few percent off."""
    gguf = read_gguf(path)
    sizes = Counter[GGMLType]()
    for tensor in gguf.tensors.values():
        sizes[tensor.type] += tensor.n_elements
    return int(sum(n * _bits(kind) for kind, n in sizes.items()) // 8)


def make_graph(path: Path, options: LoadOptions) -> Path:
    """Return the folder with the graph of a GGUF, which is made where there is none yet, in place of older ones.

    Raises:
        EdgedecError: As export_onnx; the disk has too little room; another process that makes it was waited for in
            vain.
    """
    folder = graph_folder(path, options.cache_dir)
    if read_manifest(folder) is not None:
        return folder
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    waiting = ResolveOptions(on_progress=options.on_progress, cancel=options.cancel)
    with locked(folder, f"the graph of {path.name}", waiting):
        if read_manifest(folder) is None:
            if folder.is_dir():
                remove_graph(folder)  # a damaged one
            require_space(folder.parent, graph_bytes(path) + _GRAPH_BYTES, f"the graph of {path.name}")
            export_onnx(path, folder, on_progress=options.on_progress, cancel=options.cancel)
            for graph in list_graphs(cache_folder(options.cache_dir)):
                if graph.path != folder and graph.path.name.rpartition("-")[0] == folder.name.rpartition("-")[0]:
                    remove_graph(graph.path)  # of what the file was before
    return folder


def list_graphs(root: Path) -> list[CachedGraph]:
    """Return the graphs below the root of the cache, sorted by name."""
    graphs = []
    for folder in sorted(_folder(root).glob("*")):
        ours = [path for path in folder.iterdir() if is_ours(path, folder.parent, "graphs")] if folder.is_dir() else []
        if ours:
            manifest = read_manifest(folder) or {}
            source = manifest.get("source")
            name = source.get("name") if isinstance(source, dict) else ""
            graphs.append(CachedGraph(folder, sum(file.stat().st_size for file in ours), str(name)))
    return graphs


def remove_graph(folder: Path) -> None:
    """Delete a graph's folder, but for files that are not edgedec's."""
    with storage_errors(folder):
        delete_folder(folder, "graphs")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _folder(root: Path) -> Path:
    return root / "graphs"


@cache
def _bits(kind: GGMLType) -> float:
    """Return the bits of a weight of a type in a graph, with its share of scales and minimums."""
    if kind not in LEVELS:
        return 32.0
    n = max(256, kind.block_size)
    blocks = np.zeros((n // kind.block_size, kind.block_bytes), np.uint8)
    return 8 * pack_levels(LEVELS[kind](blocks).by_row(1)).nbytes / n
