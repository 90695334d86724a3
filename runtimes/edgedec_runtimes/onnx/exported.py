"""Reads the folder that `edgedec export --to onnx` writes, and checks its files against its manifest.

export = read_export(Path("folder"))                # or the .onnx file in it; reads headers only
verify_files(export.folder, export.files, options)  # sizes always; contents where they are not known to be sound
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import DATA, GGUF, GRAPH, MANIFEST, VOCABULARY, foreign_onnx, read_gguf, reading, storage_error
from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions
from edgedec.progress import check_cancelled, report_progress
from edgedec.storage import probe_cache
from edgedec_runtimes.onnx.graph_check import MOST_GRAPH_BYTES, check_graph
from edgedec_runtimes.shared.hyperparameters import in_all_layers, positive

OPTIMUM = "optimum"
"""The kind of an export whose graph optimum made; an export of our own graph has no kind."""
TWO_GRAPHS = "two graphs"
"""The kind of a folder of an encoder and a decoder, which has no manifest (source_model.py)."""

_FORMAT = 1
_MOST_MANIFEST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 22
_CHECKS = 1  # grows when check_graph becomes stricter


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The size of a file in bytes and its SHA-256 in hex, as the manifest has them."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """An exported model.

    Attributes:
        folder: The folder that it lies in.
        gguf: Its metadata: hyperparameters, vocabulary, chat template.
        quant: How its weights are quantized: "exact", "balanced" or "small".
        kv: Element type of keys and values, "f32" or "int8".
        local_layers: The layers that see only the last `window` tokens.
        window: How many tokens these layers see; 0 where there are none.
        files: The files, by name.
        sha256: SHA-256 of the manifest, which holds those of all files.
        kind: OPTIMUM, TWO_GRAPHS, or "" for a graph of our own.
    """

    folder: Path
    gguf: GGUF
    architecture: str
    quant: str
    kv: str
    n_layer: int
    n_vocab: int
    n_embd: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ctx_train: int
    local_layers: tuple[int, ...]
    window: int
    files: Mapping[str, FileFacts]
    sha256: str
    kind: str = ""

    @property
    def graph(self) -> Path:
        """Path of the graph."""
        return self.folder / GRAPH

    @property
    def data_bytes(self) -> int:
        """Size of the weights' file; 0 where the weights lie in the graph."""
        return self.files[DATA].n_bytes if DATA in self.files else 0


def read_export(path: Path) -> Export:
    """Return what the manifest and the vocabulary of an exported folder say; `path` is the folder or the graph in it.

    Raises:
        UnsupportedModelError: The path is an ONNX model of another kind, or an export for another runtime.
        ModelFormatError: The path is no ONNX model, or the manifest contradicts itself.
        ModelNotFoundError, StorageError: A file is missing or can't be read.
    """
    folder = _folder_of(path)
    text = _read_manifest(folder / MANIFEST)
    facts = _parsed(folder, text)
    if facts.get("target") != "cpu":
        raise UnsupportedModelError(
            f"{folder}: exported for the target {_shown(facts.get('target'))}; the onnx runtime runs exports "
            "for 'cpu': take the runtime of that target, or export the model again with --target cpu"
        )
    try:
        files = read_files(facts.get("files"), {GRAPH, VOCABULARY})
    except ValueError as error:
        raise ModelFormatError(f"{folder / MANIFEST}: {error}; it is damaged: export the model again") from error
    gguf = read_gguf(folder / VOCABULARY)
    info = describe(gguf)
    n_layer = _count(folder, facts, "n_layer", 4096)
    local = facts.get("local_layers", [])
    layers_are_whole = isinstance(local, list) and all(type(i) is int and 0 <= i < n_layer for i in local)
    if not layers_are_whole or (local and info.sliding_window < 1):
        raise _contradiction(folder, "local_layers", local)
    if facts.get("architecture") != info.architecture or facts.get("kv") not in ("f32", "int8"):
        raise _contradiction(folder, "architecture or kv", (facts.get("architecture"), facts.get("kv")))
    return Export(
        folder=folder,
        gguf=gguf,
        architecture=info.architecture,
        quant=str(facts.get("quant")),
        kv=facts["kv"],
        n_layer=n_layer,
        n_vocab=_count(folder, facts, "n_vocab", 2**24),
        n_embd=_count(folder, facts, "n_embd", 2**20),
        n_head_kv=_count(folder, facts, "n_head_kv", 2**16),
        head_dim=_count(folder, facts, "head_dim", 2**16),
        n_ff=in_all_layers(gguf, "feed_forward_length", info.n_ff),
        n_ctx_train=positive(gguf, "context_length", info.n_ctx_train),
        local_layers=tuple(local),
        window=info.sliding_window if local else 0,
        files=files,
        sha256=hashlib.sha256(text).hexdigest(),
        kind=_kind(folder, facts),
    )


def verify_files(folder: Path, files: Mapping[str, FileFacts], options: LoadOptions) -> None:
    """Refuse an export whose files have changed since the export, or whose graph reads any other file.

    Sizes are compared at every load. Contents are read once: files that were found sound are remembered in the options'
    cache_dir by path, size and time of change, and are read again when one of these differs.

    Raises:
        ModelFormatError: A file is truncated, changed, missing or a link that leads out of the folder.
        StorageError: A file can't be read.
        CancelledError: options.cancel was set.
    """
    listed: list[Any] = [_CHECKS]
    for name, facts in files.items():
        status = _own_file(folder, name)
        if status.st_size != facts.n_bytes:
            raise _changed(folder / name, f"{status.st_size} bytes, expected {facts.n_bytes}")
        listed.append([str((folder / name).absolute()), status.st_size, status.st_mtime_ns, facts.sha256])
    key = json.dumps(listed)
    if probe_cache.get(options.cache_dir, "onnx", key) is True:
        return
    _check_graph(folder, files)
    done, total = 0, sum(facts.n_bytes for facts in files.values())
    for name, facts in files.items():
        if _sha256(folder / name, options, done, total) != facts.sha256:
            raise _changed(folder / name, f"other contents than were exported (SHA-256 {facts.sha256})")
        done += facts.n_bytes
    probe_cache.put(options.cache_dir, "onnx", key, True)


def _folder_of(path: Path) -> Path:
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    if not is_folder and path.suffix != ".onnx":
        raise ModelFormatError(f"{path}: no ONNX model; the onnx runtime runs folders that `edgedec export` wrote")
    if (folder / MANIFEST).is_file() and (is_folder or path.name == GRAPH):
        return folder
    if is_folder and not any(folder.glob("*.onnx")):
        raise ModelFormatError(f"{path}: a folder without an ONNX model; pass one that `edgedec export` wrote")
    raise foreign_onnx(path)


def _read_manifest(path: Path) -> bytes:
    with reading(path), path.open("rb") as file:
        text = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(text) > _MOST_MANIFEST_BYTES:
        raise ModelFormatError(f"{path}: over {_MOST_MANIFEST_BYTES} bytes; export the model again")
    return text


def _parsed(folder: Path, text: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{folder / MANIFEST}: damaged ({error}); export the model again") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        form = facts.get("format") if isinstance(facts, dict) else facts
        raise UnsupportedModelError(
            f"{folder / MANIFEST}: format {_shown(form)}, expected {_FORMAT}; export the model again with this edgedec"
        )
    return facts


def read_files(listed: Any, needed: set[str]) -> dict[str, FileFacts]:
    """Return the files that a manifest lists, by name.

    Args:
        listed: The manifest's "files", which may be anything.
        needed: Names that must be among them.

    Raises:
        ValueError: A name is no plain file name, a size or a SHA-256 is none, or a needed file is missing.
    """
    files: dict[str, FileFacts] = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        n_bytes, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        is_plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\\" not in name
        if not is_plain or type(n_bytes) is not int or n_bytes < 0 or not isinstance(sha256, str) or len(sha256) != 64:
            raise ValueError(f"files[{name[:80]!r}] is {_shown(entry)}")
        files[name] = FileFacts(n_bytes, sha256)
    if not needed <= files.keys():
        raise ValueError(f"files is {_shown(sorted(files))}, without {min(needed - files.keys())!r}")
    return files


def _kind(folder: Path, facts: dict[str, Any]) -> str:
    kind = facts.get("kind", "")
    if kind in ("", OPTIMUM):
        return str(kind)
    raise UnsupportedModelError(
        f"{folder}: an export of the kind {_shown(kind)}, expected {OPTIMUM!r} or none; update edgedec"
    )


def _count(folder: Path, facts: dict[str, Any], key: str, most: int) -> int:
    value = facts.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise _contradiction(folder, key, value)
    return value


def _contradiction(folder: Path, key: str, value: object) -> ModelFormatError:
    return ModelFormatError(f"{folder / MANIFEST}: {key} is {_shown(value)}; it is damaged: export the model again")


def _shown(value: object) -> str:
    return repr(value)[:100]


def _own_file(folder: Path, name: str) -> os.stat_result:
    """Return the status of a file; refuse one that is not a regular file in the folder itself."""
    path = folder / name
    try:
        real, status = path.resolve(strict=True), path.stat()
        inside = real.parent == folder.resolve(strict=True)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: missing, but part of the export; copy the whole folder again") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise storage_error(path, error if isinstance(error, OSError) else OSError(str(error))) from error
    if not inside or not stat.S_ISREG(status.st_mode):
        raise ModelFormatError(
            f"{path}: a link out of the folder, or no regular file; nothing outside an export is read: copy the file "
            "into the folder"
        )
    return status


def _changed(path: Path, what: str) -> ModelFormatError:
    return ModelFormatError(f"{path}: {what}; it was cut short or changed: export the model again, or copy it anew")


def _check_graph(folder: Path, files: Mapping[str, FileFacts]) -> None:
    path = folder / GRAPH
    if files[GRAPH].n_bytes > MOST_GRAPH_BYTES:
        raise _changed(path, f"a graph of over {MOST_GRAPH_BYTES} bytes")
    sizes = {DATA: files[DATA].n_bytes} if DATA in files else {}
    try:
        check_graph(path.read_bytes(), sizes)
    except OSError as error:
        raise storage_error(path, error) from error
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from error


def _sha256(path: Path, options: LoadOptions, done: int, total: int) -> str:
    digest = hashlib.sha256()
    with reading(path), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            check_cancelled(options.cancel, f"checking {path.name}")
            report_progress(options.on_progress, "verify", min(done, total), total, "bytes", path.name)
    return digest.hexdigest()
