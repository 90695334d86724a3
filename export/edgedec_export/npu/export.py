"""Export a GGUF for NPUs: a quantized ONNX graph of static shapes, calibrated on a text.

    folder = export_npu("model.gguf", "model-npu", contexts=(128, 512, 1024))

Matrices are int8, activations have 16 bits, cached keys and values have two parts of 8 bits. docs/export.md describes
the folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec import __version__
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import DATA, GGUF, GRAPH, VOCABULARY, read_gguf
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.npu.calibration import Statistics, calibrate, calibration_ids, limits, ranges
from edgedec_export.npu.graph import Plan, make_plan
from edgedec_export.npu.qdq import emit, quantizers
from edgedec_export.npu.weights import (
    Weights,
    equalize_keys,
    equalize_values,
    is_rotated,
    write_embedding,
    write_weights,
)
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.library import require_onnx
from edgedec_export.onnx_graph.parts import Initializers
from edgedec_export.positions import frequencies, local_layers, require_architecture, sliding_frequencies
from edgedec_export.quantizing import bundled_text
from edgedec_export.source import rope_factors, source_facts, tensor_steps
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.npu.facts import EMBEDDING, KV, ROWS, TARGET, Facts, to_json
from edgedec_runtimes.tokenizer import open_tokenizer

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


_CALIBRATION_CONTEXT = 512
_FIRST_LOOK = 256
"""Number of tokens of the first look, which compares the channels of keys and values."""

_CALIBRATION_GRAPH = "calibration.onnx"
_BOUNDARY = {"hidden": "hidden", "rotation": "cos", "mask": "mask", "logits": "logits"}
"""By the names of `Facts.quantizers`: the value of the graph that each stands for."""


@dataclass(frozen=True, slots=True)
class GraphWriter:
    """An export in progress.

    Attributes:
        folder: The folder to write into.
        initializers: Where weights and constants go.
        text: The text that activations are measured on.
    """

    gguf: GGUF
    network: Network
    folder: Path
    initializers: Initializers
    text: str
    cancel: CancelToken | None

    def write(self, facts: Facts, on_progress: OnProgress | None) -> Facts:
        """Write embedding, matrices and graph; return the facts, completed by how inputs and outputs are quantized."""
        plan = make_plan(self.network, self.gguf.tensors.__contains__)
        step = tensor_steps(self.gguf, on_progress, self.cancel)
        weights = write_weights(self.gguf, self.network, plan, self.initializers, step)
        lowest, highest = (v * facts.embedding_scale for v in write_embedding(self.gguf, self.folder / EMBEDDING))
        plan, seen = self._calibrate(plan, facts, weights, on_progress)
        how = quantizers(plan, weights, ranges(plan, seen, (lowest, highest)))
        model = emit(plan, weights, self.initializers, how)
        (self.folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        cached = [f"past_{what}_high_{layer}" for layer in range(facts.n_layer) for what in ("key", "value")]
        boundary = {name: how[inner] for name, inner in _BOUNDARY.items()}
        return replace(facts, quantizers=boundary, zeros=tuple(how[name].zero_point for name in cached))

    def _calibrate(
        self, plan: Plan, facts: Facts, weights: Weights, on_progress: OnProgress | None
    ) -> tuple[Plan, Statistics]:
        """Calibrate twice: after a first look, weights and plan are adapted and all is measured anew.

        Returns:
            The adapted plan, and what was seen with it.
        """
        n_context = min(_CALIBRATION_CONTEXT, facts.n_ctx_train)
        sequences = calibration_ids(open_tokenizer(self.gguf), self.text, n_context)
        embedding = np.memmap(self.folder / EMBEDDING, "<f2", "r").reshape(facts.n_vocab, facts.n_embd)
        first = [sequences[0][:_FIRST_LOOK]]
        look = self._run(plan, facts, weights, embedding, first, None)
        for layer in range(self.network.n_layer):
            equalize_keys(self.network, weights, layer, look.channels[f"new_key_high_{layer}"])
            equalize_values(self.network, weights, layer, look.channels[f"new_value_high_{layer}"])
        reaching = limits(look) if is_rotated(self.gguf) else {}  # a norm behind the block forbids splitting it
        plan = make_plan(self.network, self.gguf.tensors.__contains__, reaching)
        return plan, self._run(plan, facts, weights, embedding, sequences, on_progress)

    def _run(
        self,
        plan: Plan,
        facts: Facts,
        weights: Weights,
        embedding: NDArray[np.float16],
        sequences: list[NDArray[np.int32]],
        on_progress: OnProgress | None,
    ) -> Statistics:
        """Write the float graph, calibrate with it, and delete it."""
        model = emit(plan, weights, self.initializers.continued_inside(), None)
        graph = self.folder / _CALIBRATION_GRAPH
        try:
            graph.write_bytes(model.SerializeToString())
            return calibrate(graph, plan, facts, embedding, sequences, on_progress=on_progress, cancel=self.cancel)
        finally:
            graph.unlink(missing_ok=True)
