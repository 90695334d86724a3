"""Write the graph of an export for NPUs: first the weights, then calibration, then the quantized graph."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF, GRAPH
from edgedec.progress import CancelToken, OnProgress
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
from edgedec_export.onnx_graph.parts import Initializers
from edgedec_export.source import tensor_steps
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.npu.facts import EMBEDDING, Facts
from edgedec_runtimes.tokenizer import open_tokenizer

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
