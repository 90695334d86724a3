"""Run an exported ONNX graph with only onnxruntime (telemetry off) and numpy, as docs/export.md describes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.onnx.library import load_library

LOW = np.float32(-1e30)
F32 = NDArray[np.float32]


class ExportedGraph:
    """A graph with KV buffers that are bound as inputs and as outputs.

    Attributes:
        facts: The content of edgedec.json.
        buffers: float32 or int8[1, n_head_kv, capacity, head_dim] by name of the graph's input.
    """

    def __init__(self, folder: Path, capacity: int = 64, *, window: int = 0) -> None:
        ort = load_library()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        path = str(folder / "model.onnx")
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.facts: dict[str, Any] = json.loads((folder / "edgedec.json").read_text(encoding="utf-8"))
        self._window = window
        shape = (1, self.facts["n_head_kv"], capacity, self.facts["head_dim"])
        layers = range(self.facts["n_layer"])
        names = [f"past_{name}_{i}" for i in layers for name in ("key", "value")]
        dtype = np.int8 if self.facts["kv"] == "int8" else np.float32
        self.buffers: dict[str, NDArray[Any]] = {name: np.zeros(shape, dtype) for name in names}

    def forward(
        self,
        tokens: list[int],
        n_past: int,
        *,
        parents: list[int] | None = None,
        attn_on: list[bool] | None = None,
        mlp_on: list[bool] | None = None,
        rows: list[int] | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[F32, dict[int, F32]]:
        """Return logits float32[n_rows, n_vocab], and by layer the tapped states float32[n, n_embd]."""
        n, total = len(tokens), n_past + len(tokens)
        tree = list(range(-1, n - 1)) if parents is None else parents
        paths: list[list[int]] = []
        for row, parent in enumerate(tree):
            paths.append([*(paths[parent] if parent >= 0 else range(n_past)), n_past + row])
        on = [True] * self.facts["n_layer"]
        ends = [n if i in taps else 0 for i in range(len(on))]
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": np.array([[len(path) - 1 for path in paths]], np.int64),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "attention_bias": self._bias(paths, total, 0),
            "attention_bias_local": self._bias(paths, total, self._window),
            "logit_rows": np.array(range(n) if rows is None else rows, np.int64),
            "attn_on": np.array(attn_on or on),
            "mlp_on": np.array(mlp_on or on),
            "attention_rows": np.arange(n, dtype=np.int64),
            "tap_rows": np.array(ends, np.int64),
        }
        binding = self.session.io_binding()
        inputs = {node.name for node in self.session.get_inputs()}
        for name, value in feeds.items():
            if name in inputs:
                binding.bind_cpu_input(name, value)
        for name, buffer in self.buffers.items():
            binding.bind_input(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
            present = name.replace("past", "present")
            binding.bind_output(present, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
        for name in ("logits", *(f"hidden_{i}" for i in taps)):
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        logits, *states = binding.copy_outputs_to_cpu()[len(self.buffers) :]
        return logits[0], {i: state[0] for i, state in zip(taps, states, strict=True)}

    def _bias(self, paths: list[list[int]], total: int, window: int) -> F32:
        """Return float32[1, 1, n, total]: 0 where a row sees a slot; a window counts nearest ancestors."""
        bias = np.full((1, 1, len(paths), total), LOW, np.float32)
        for row, path in enumerate(paths):
            bias[0, 0, row, path[-window:]] = 0
        return bias
