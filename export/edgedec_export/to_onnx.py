"""Export of a GGUF to a folder with an ONNX graph, tensor by tensor: memory is needed for one of them, and no torch.

    folder = export_onnx("model.gguf", "model-onnx", quant="exact")

What the folder holds says docs/export.md; what is refused is what the cpu runtime refuses.
"""

from pathlib import Path
from typing import Any, cast, get_args

from edgedec import __version__
from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.formats import DATA, GRAPH, VOCABULARY
from edgedec.progress import CancelToken, OnProgress, check_cancelled
from edgedec_export.calibration_text import bundled_text
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.library import require_onnx
from edgedec_export.positions import local_layers
from edgedec_export.quantizing import Quant
from edgedec_export.source import rope_factors, source_facts, tensor_steps
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.tokenizer import open_tokenizer

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
    """Export a GGUF and return the folder that was made.

    Args:
        path: A GGUF, or the first part of a split one.
        out: Folder to make; nothing, or with `force` an earlier export, may be there.
        quant: "exact" keeps the value of every weight, "balanced" and "small" choose per tensor (`quantizing`).
        kv: Element type of the graph's KV cache: "f32", or "int8", whose scales are found by running the float graph
            on a short text: it is loaded for that.
        on_progress: Told of the bytes of the source that are done.
        cancel: Stops the export between two tensors; nothing is left behind.

    Raises:
        RequestError: There is no such `quant` or `kv`, or something else is at `out`.
        ModelNotFoundError, ModelFormatError: There is no such file, or it is damaged.
        UnsupportedModelError: An architecture, tensor or metadata key that the cpu runtime does not know.
        RuntimeUnavailableError: The package onnx is missing.
        StorageError: Reading or writing failed, or the disk is full.
        CancelledError: It was cancelled.
    """
    for name, value, choices in (("quant", quant, get_args(Quant)), ("kv", kv, KV_TYPES)):
        if value not in choices:
            raise RequestError(f"{name} is {value!r}; it must be {' or '.join(choices)}")
    require_onnx()
    from edgedec_export.onnx_graph.decoder import build_graph  # here: these import onnx
    from edgedec_export.onnx_graph.file_weights import FileWeights
    from edgedec_export.onnx_graph.kv_int8 import find_scales, with_int8_cache

    gguf = read_gguf(path)
    network = read_network(gguf)
    step, what = tensor_steps(gguf, on_progress, cancel), f"exporting {gguf.paths[0].name}"
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder / DATA) as data:
            weights = FileWeights(gguf, data, cast(Quant, quant), step)
            model = build_graph(network, weights, rope_factors(gguf))
        (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        if kv == "int8":
            check_cancelled(cancel, what)
            with_int8_cache(model, find_scales(folder, network, open_tokenizer(gguf).encode(bundled_text())))
            (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        write_vocabulary(gguf, folder / VOCABULARY)
        facts = _facts(gguf, network, quant, kv) | {"matrices": weights.matrices}
        write_manifest(folder, facts, {DATA: data.sha256})
        check_cancelled(cancel, what)
    return Path(out)


def _facts(gguf: GGUF, network: Network, quant: str, kv: str) -> dict[str, Any]:
    """Return what the manifest says beside the files."""
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
