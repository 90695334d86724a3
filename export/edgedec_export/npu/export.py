"""Export of a GGUF for NPUs: a quantized ONNX graph of static shapes, calibrated on a bundled text.

    folder = export_npu("model.gguf", "model-npu", contexts=(128, 512, 1024))

Matrices are int8, activations 16 bits, cached keys and values twice 8. docs/npu.md says what the folder holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgedec import __version__
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.formats import DATA, GRAPH, VOCABULARY
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.calibration_text import bundled_text
from edgedec_export.folder import new_folder, write_manifest, write_vocabulary
from edgedec_export.npu import qdq as npu_qdq
from edgedec_export.npu.calibration import Statistics, calibrate, calibration_ids, limits, ranges
from edgedec_export.npu.graph import Plan, make_plan
from edgedec_export.npu.weights import (
    Weights,
    equalize_keys,
    equalize_values,
    is_rotated,
    write_embedding,
    write_weights,
)
from edgedec_export.onnx_graph.decoder import frequencies, local_layers, sliding_frequencies
from edgedec_export.onnx_graph.external_data import DataFile
from edgedec_export.onnx_graph.parts import Initializers, require_onnx
from edgedec_export.source import rope_factors, source_facts, tensor_steps
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.npu.facts import EMBEDDING, KV, ROWS, TARGET, Facts, Quantizer, to_json
from edgedec_runtimes.tokenizer import open_tokenizer

if TYPE_CHECKING:
    import onnx

CONTEXTS = (128, 512, 1024)
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CALIBRATION_CONTEXT = 512
_FIRST_LOOK = 256
"""Tokens that the channels of keys and values are compared on, before everything is measured."""

_CALIBRATION_GRAPH = "calibration.onnx"


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
    """Export a GGUF for NPUs and return the folder that was made.

    Args:
        path: A GGUF, or the first part of a split one.
        out: Folder to make; nothing, or with `force` an earlier export, may be there.
        contexts: Numbers of cached tokens that a forward can be compiled for, multiples of 64; the largest is the
            longest session.
        calibration: Text to measure activations on, best of the kind that the model is for; None for a bundled one.
        force: Replace an earlier export.
        on_progress: Told of the bytes of the source that are done, then of the tokens of the calibration.
        cancel: Stops between two tensors or forwards; nothing is left behind.

    Raises:
        RequestError: The contexts are none, the text is too short, or something else is at `out`.
        ModelNotFoundError, ModelFormatError: There is no such file, or it is damaged.
        UnsupportedModelError: An architecture, tensor or metadata key that this export does not know.
        RuntimeUnavailableError: The package onnx is missing.
        StorageError: Reading or writing failed, or the disk is full.
        CancelledError: It was cancelled.
    """
    require_onnx()
    gguf = read_gguf(path)
    network = read_network(gguf)
    _check(gguf, network, contexts)
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder / DATA) as data:
            text = bundled_text() if calibration is None else calibration
            source = _Source(gguf, network, folder, Initializers(data), text, cancel)
            facts = source.write(_facts(gguf, network, contexts), on_progress)
        write_vocabulary(gguf, folder / VOCABULARY)
        write_manifest(folder, _manifest(gguf, network, facts), {DATA: data.sha256})
    return Path(out)


def _check(gguf: GGUF, network: Network, contexts: Sequence[int]) -> None:
    if network.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {network.architecture!r}; the export for NPUs takes "
            f"{', '.join(ARCHITECTURES)}: export it with --target cpu"
        )
    usable = [n for n in contexts if n > 0 and n % ROWS[-1] == 0]
    if not usable or list(contexts) != sorted(set(usable)):
        raise RequestError(
            f"contexts are {list(contexts)}; they must be ascending multiples of {ROWS[-1]}, such as {list(CONTEXTS)}"
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """An export on its way.

    Attributes:
        folder: Where it goes.
        initializers: The data file.
        text: What activations are measured on.
    """

    gguf: GGUF
    network: Network
    folder: Path
    initializers: Initializers
    text: str
    cancel: CancelToken | None

    def write(self, facts: Facts, on_progress: OnProgress | None) -> Facts:
        """Write embedding, matrices and graph; return the facts with how inputs and outputs are quantized."""
        plan = make_plan(self.network, self.gguf.tensors.__contains__)
        weights = write_weights(
            self.gguf, self.network, plan, self.initializers, tensor_steps(self.gguf, on_progress, self.cancel)
        )
        lowest, highest = (v * facts.embedding_scale for v in write_embedding(self.gguf, self.folder / EMBEDDING))
        plan, seen = self._calibrate(plan, facts, weights, on_progress)
        quantized = self._network(plan, weights)
        how = npu_qdq.quantizers(quantized, ranges(plan, seen, (lowest, highest)))
        model = npu_qdq.emit(quantized, self.initializers, how)
        model.graph.initializer.extend(self.initializers.tensors)
        (self.folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        cached = [f"past_{what}_high_{layer}" for layer in range(facts.n_layer) for what in ("key", "value")]
        zeros = [how[name].zero_point for name in cached]
        return replace(facts, quantizers=_boundary(how), zeros=tuple(zeros))

    def _network(self, plan: Plan, weights: Weights) -> npu_qdq.Network:
        return npu_qdq.Network(plan, weights.scales, weights.vectors)

    def _calibrate(
        self, plan: Plan, facts: Facts, weights: Weights, on_progress: OnProgress | None
    ) -> tuple[Plan, Statistics]:
        """Change weights and plan after a first look, and return the plan and what is seen with it then."""
        n_context = min(_CALIBRATION_CONTEXT, facts.n_ctx_train)
        sequences = calibration_ids(open_tokenizer(self.gguf), self.text, n_context)
        embedding = np.memmap(self.folder / EMBEDDING, "<f2", "r").reshape(facts.n_vocab, facts.n_embd)
        first = [sequences[0][:_FIRST_LOOK]]
        look = self._run(plan, facts, weights, embedding, first, None)
        for layer in range(self.network.n_layer):
            equalize_keys(self.network, weights, layer, look.channels[f"new_key_high_{layer}"])
            equalize_values(self.network, weights, layer, look.channels[f"new_value_high_{layer}"])
        reaching = limits(look) if is_rotated(self.gguf) else {}  # with a norm behind it the block can't be cut in two
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
        constants = _Inside([*self.initializers.tensors])
        model = npu_qdq.emit(self._network(plan, weights), constants, None)
        model.graph.initializer.extend(constants.tensors)
        graph = self.folder / _CALIBRATION_GRAPH
        try:
            graph.write_bytes(model.SerializeToString())
            return calibrate(graph, plan, facts, embedding, sequences, on_progress=on_progress, cancel=self.cancel)
        finally:
            graph.unlink(missing_ok=True)


class _Inside:
    """Constants that stay in the graph.

    Attributes:
        tensors: What the graph lists.
    """

    def __init__(self, tensors: list["onnx.TensorProto"]) -> None:
        self.tensors = tensors
        self._names = {tensor.name for tensor in tensors}

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Store an array, once for a name, and return the name."""
        from onnx import numpy_helper

        if name not in self._names:
            self._names.add(name)
            self.tensors.append(numpy_helper.from_array(array, name))
        return name


def _facts(gguf: GGUF, network: Network, contexts: Sequence[int]) -> Facts:
    n = network
    turns = {"": frequencies(n, rope_factors(gguf))}
    if n.sliding_window:
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
        embedding_scale=n.embedding_scale,
        sliding_window=n.sliding_window,
        frequencies=turns,
        quantizers={},
        zeros=(),
    )


def _boundary(how: dict[str, Quantizer]) -> dict[str, Quantizer]:
    return {name: how[inner] for name, inner in _BOUNDARY.items()}


_BOUNDARY = {"hidden": "hidden", "rotation": "cos", "mask": "mask", "logits": "logits"}


def _manifest(gguf: GGUF, network: Network, facts: Facts) -> dict[str, Any]:
    return {
        "quant": "balanced",
        "kv": KV,
        "source": source_facts(gguf),
        "edgedec": __version__,
        "local_layers": local_layers(network),
        "target": TARGET,
        **to_json(facts),
    }
