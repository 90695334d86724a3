"""Export a GGUF to a folder with an ONNX graph.

Tensors are converted one at a time, so the model need not fit in memory.

    folder = export_onnx("model.gguf", "model-onnx", quant="exact")

docs/export.md describes the folder. The export refuses what it does not know.
"""

from pathlib import Path
from typing import Any, cast, get_args

from edgedec import __version__
from edgedec.errors import RequestError
from edgedec.gguf.file import DATA, GGUF, GRAPH, VOCABULARY, read_gguf
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.progress import CancelToken, OnProgress, check_cancelled
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.library import require_onnx
from edgedec_export.positions import local_layers, require_operations
from edgedec_export.quantizing import EXACT, Quant, bundled_text
from edgedec_export.source import source_facts, tensor_steps
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.architectures.rope import Turns, turns_in
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.tokenizer import open_tokenizer
from edgedec_runtimes.trained_heads.target import exported_hashes

KV_TYPES = ("f32", "int8")


def export_onnx(
    path: str | Path,
    out: str | Path,
    *,
    quant: str = "exact",
    kv: str = "f32",
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Export a GGUF to ONNX and return the path of the folder that was written.

    Args:
        path: A GGUF file, or the first part of a split one.
        out: The folder to write. It must not exist, or with `force` it may hold an earlier export, which is replaced.
        quant: "exact" keeps the value of every weight; "balanced" and "small" round (see quantizing.py).
        kv: Element type of the graph's KV cache: "f32" or "int8". For "int8" the float graph is loaded and run on a
            short text, to find the scales of keys and values.
        on_progress: Called with the bytes of the source that are converted.
        cancel: Stops the export between two tensors; nothing is left on the disk.

    Raises:
        RequestError: `quant` or `kv` has another value, or `out` exists and may not be replaced.
        ModelNotFoundError, ModelFormatError: The file does not exist, or is damaged.
        UnsupportedModelError: This export does not know the architecture, a tensor or a metadata key.
        RuntimeUnavailableError: The package onnx is missing.
        StorageError: A file cannot be read or written, or the disk is full.
        CancelledError: `cancel` was cancelled.
    """
    for name, value, choices in (("quant", quant, get_args(Quant)), ("kv", kv, KV_TYPES)):
        if value not in choices:
            raise RequestError(f"{name} is {value!r}; it must be {' or '.join(choices)}")
    require_onnx()
    from edgedec_export.onnx_graph.decoder import build_graph  # here, because these files import onnx
    from edgedec_export.onnx_graph.file_weights import FileWeights
    from edgedec_export.onnx_graph.kv_int8 import find_scales, with_int8_cache

    gguf = read_gguf(path)
    require_text_decoder(gguf, may_embed=True, may_denoise=True)
    network = read_network(gguf)
    require_operations(gguf, network)
    gguf = usual_tensors(gguf, network)
    step, what = tensor_steps(gguf, on_progress, cancel), f"exporting {gguf.paths[0].name}"
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder / DATA) as data:
            weights = FileWeights(gguf, data, cast(Quant, quant), step)
            model = build_graph(network, weights, _turns(gguf, network))
        (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        if kv == "int8":
            check_cancelled(cancel, what)
            with_int8_cache(model, find_scales(folder, network, open_tokenizer(gguf).encode(bundled_text())))
            (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        hashes = exported_hashes(gguf, "" if quant == EXACT else quant)
        write_vocabulary(gguf, folder / VOCABULARY, dict(hashes))
        facts = _facts(gguf, network, quant, kv) | {"matrices": weights.matrices}
        write_manifest(folder, facts, {DATA: data.sha256})
        check_cancelled(cancel, what)
    return Path(out)


def _turns(gguf: GGUF, network: Network) -> dict[bool, Turns]:
    """Return how a graph's layers rotate: those that see everything, and those with a sliding window."""
    ropes = {False: network.switches.rope, True: network.switches.rope_sliding or network.switches.rope}
    return {sliding: turns_in(gguf, rope, network.n_ctx_train) for sliding, rope in ropes.items()}


def _facts(gguf: GGUF, network: Network, quant: str, kv: str) -> dict[str, Any]:
    """Return what the manifest says of the model and the export, beside its list of files."""
    return {
        "target": "cpu",
        "quant": quant,
        "kv": kv,
        "edgedec": __version__,
        "source": source_facts(gguf),
        "architecture": network.architecture,
        "n_layer": network.n_layer,
        "n_vocab": network.n_vocab,
        "n_embd": network.n_embd,
        "n_head_kv": network.n_head_kv,
        "head_dim": network.head_dim,
        "local_layers": local_layers(network),
    }
