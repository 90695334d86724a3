"""Export a GGUF for NPUs: a quantized ONNX graph of static shapes, calibrated on a text.

    folder = export_npu("model.gguf", "model-npu", contexts=(128, 512, 1024))

Matrices are int8, activations have 16 bits, cached keys and values have two parts of 8 bits. docs/export.md describes
the folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgedec import __version__
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import DATA, GGUF, VOCABULARY, read_gguf
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.library import require_onnx
from edgedec_export.positions import frequencies, local_layers, require_architecture, sliding_frequencies
from edgedec_export.quantizing import bundled_text
from edgedec_export.source import rope_factors, source_facts
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.npu.facts import KV, ROWS, TARGET, Facts, to_json

CONTEXTS = (128, 512, 1024)
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Vectors of the cpu runtime that these graphs have no operation for.
_LACKED = ("attn_output.bias", "attn_sinks.weight")


def export_npu(
    path: str | Path,
    out: str | Path,
    *,
    contexts: Sequence[int] = CONTEXTS,
    calibration: str | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Export a GGUF for NPUs and return the path of the folder that was written.

    Args:
        path: A GGUF, or the first part of a split one.
        out: The folder to write. It must not exist, or with `force` it may hold an earlier export, which is replaced.
        contexts: Numbers of cached tokens that a forward can be compiled for, ascending multiples of 64; the largest
            one is the longest session.
        calibration: A text to measure activations on, best of the kind that the model is used for; None for the bundled
            one.
        force: Replace an earlier export.
        on_progress: Called with the bytes of the source that are converted, then with the tokens of the calibration.
        cancel: Stops between two tensors or two forwards; nothing is left on the disk.

    Raises:
        RequestError: The contexts are not as described, the text is too short, or `out` may not be written.
        ModelNotFoundError, ModelFormatError: The file does not exist, or is damaged.
        UnsupportedModelError: This export does not know the architecture, a tensor or a metadata key.
        RuntimeUnavailableError: The package onnx is missing.
        StorageError: A file cannot be read or written, or the disk is full.
        CancelledError: `cancel` was cancelled.
    """
    require_onnx()
    from edgedec_export.npu.writer import GraphWriter  # here, because these files import onnx
    from edgedec_export.onnx_graph.parts import Initializers

    gguf = read_gguf(path)
    require_text_decoder(gguf, may_embed=True, may_denoise=True)
    network = read_network(gguf)
    _check(gguf, network, contexts)
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder / DATA) as data:
            text = bundled_text() if calibration is None else calibration
            writer = GraphWriter(gguf, network, folder, Initializers(data), text, cancel)
            facts = writer.write(_facts(gguf, network, contexts), on_progress)
        write_vocabulary(gguf, folder / VOCABULARY)
        write_manifest(folder, _manifest(gguf, network, facts), {DATA: data.sha256})
    return Path(out)


def _check(gguf: GGUF, network: Network, contexts: Sequence[int]) -> None:
    """Check architecture and contexts."""
    require_architecture(gguf, network, ARCHITECTURES)
    for placed in network.vectors:
        if placed.tensor.name.endswith(_LACKED):
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: graphs for NPUs lack {placed.tensor.name!r}; export the model to ONNX "
                "(--target cpu), or run the GGUF itself"
            )
    usable = [n for n in contexts if n > 0 and n % ROWS[-1] == 0]
    if not usable or list(contexts) != sorted(set(usable)):
        raise RequestError(
            f"contexts are {list(contexts)}; expected ascending multiples of {ROWS[-1]}, such as {list(CONTEXTS)}"
        )


def _facts(gguf: GGUF, network: Network, contexts: Sequence[int]) -> Facts:
    """Return the facts of the graph without those that only calibration gives."""
    n = network
    turns = {"": frequencies(n, rope_factors(gguf))}
    if n.switches.sliding_window:
        turns["_local"] = sliding_frequencies(n)
    return Facts(
        architecture=n.architecture,
        n_ctx_train=n.n_ctx_train,
        n_vocab=n.n_vocab,
        n_embd=n.n_embd,
        n_layer=n.n_layer,
        n_head=n.n_head,
        n_head_kv=n.n_head_kv,
        head_dim=n.head_dim,
        contexts=tuple(contexts),
        embedding_scale=n.switches.embedding_scale,
        sliding_window=n.switches.sliding_window,
        frequencies=turns,
        quantizers={},
        zeros=(),
    )


def _manifest(gguf: GGUF, network: Network, facts: Facts) -> dict[str, Any]:
    """Return what the manifest says of the model and the export, beside its list of files."""
    return {
        "quant": "balanced",
        "kv": KV,
        "source": source_facts(gguf),
        "edgedec": __version__,
        "local_layers": local_layers(network),
        "target": TARGET,
        **to_json(facts),
    }
