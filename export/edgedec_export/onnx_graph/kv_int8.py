"""Keys and values of an exported graph as int8, which takes a quarter of the memory of a long context.

GroupQueryAttention rounds what it writes to its cache by fixed scales, one per channel of each key-value head. The
scales are results by running the float graph on a short text: the largest value of a channel, times ROOM, becomes 127;
larger values are clipped. Channels differ far more than tokens do, above all those of keys (Liu et al. 2024, KIVI,
arXiv:2402.02750).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edgedec.errors import RuntimeUnavailableError
from edgedec.gguf.file import GRAPH
from edgedec_export.positions import local_layers
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.onnx.library import load_library

F32 = NDArray[np.float32]

ROOM = 1.5
"""How many times larger than those of the text a value may be before it is clipped."""

N_TOKENS = 512
_LOW = np.float32(-1e30)
_SMALLEST = np.float32(1e-6)


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """The scales of a layer's int8 keys and values, float32[n_head_kv, head_dim] each."""

    keys: F32
    values: F32


def find_scales(folder: Path, network: Network, token_ids: list[int]) -> list[Scales]:
    """Run the float graph in a folder on a text, and return the scales of each layer.

    Args:
        token_ids: The text with the special tokens that the model expects before it; the first N_TOKENS are used.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or does not run the graph.
    """
    n, n_layer = network, network.n_layer
    tokens = np.array(token_ids[:N_TOKENS], np.int64)[None]
    length = tokens.shape[1]
    empty = np.zeros((1, n.n_head_kv, length, n.head_dim), np.float32)
    on = np.ones(n_layer, np.bool_)
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": tokens,
        "position_ids": np.arange(length, dtype=np.int64)[None],
        "seqlens_k": np.array([length - 1], np.int32),
        "total_sequence_length": np.array(length, np.int32),
        "attention_bias": np.zeros((1, 1, length, length), np.float32),
        "logit_rows": np.zeros(0, np.int64),
        "attention_rows": np.arange(length),
        "attn_on": on,
        "mlp_on": on,
        "tap_rows": np.zeros(n_layer, np.int64),
    }
    if local_layers(n):
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        feeds["attention_bias_local"] = np.where(distance < n.switches.sliding_window, np.float32(0), _LOW)[None, None]
    names = [f"{name}_{i}" for i in range(n_layer) for name in ("key", "value")]
    caches = _run(folder, feeds | {f"past_{name}": empty for name in names}, [f"present_{name}" for name in names])
    scales = [_scale(cache) for cache in caches]
    return [Scales(*pair) for pair in zip(scales[::2], scales[1::2], strict=True)]


def with_int8_cache(model: ModelProto, scales: list[Scales]) -> None:
    """Change the KV cache of a graph made by `build_graph` to int8, in place."""
    for i, layer in enumerate(scales):
        for name, values in (("keys", layer.keys), ("values", layer.values)):
            model.graph.initializer.append(numpy_helper.from_array(values.reshape(-1), _scale_name(i, name)))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("then_branch", "else_branch"):
                _convert_branch(attribute.g, node)


def _convert_branch(branch: GraphProto, gate: NodeProto) -> None:
    """Convert a branch of an `If`, whose outputs after the first are a layer's keys and values."""
    for value in list(branch.output)[1:]:
        value.type.tensor_type.elem_type = TensorProto.INT8
    for node in branch.node:
        if node.op_type == "GroupQueryAttention":
            layer = int(gate.output[1].rpartition("_")[2])
            node.input.extend(["", _scale_name(layer, "keys"), _scale_name(layer, "values")])
            for key in ("k_quant_type", "v_quant_type"):
                node.attribute.append(helper.make_attribute(key, "PER_CHANNEL"))
            node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))


def _scale_name(layer: int, name: str) -> str:
    return f"blk.{layer}.{name}_scale"


def _scale(cache: F32) -> F32:
    """Return float32[n_head_kv, head_dim] for a cache float32[1, n_head_kv, n, head_dim]."""
    largest = np.abs(cache[0]).max(axis=1)
    scale: F32 = np.maximum(largest * np.float32(ROOM / 127), _SMALLEST)
    return scale


def _run(folder: Path, feeds: dict[str, NDArray[Any]], outputs: list[str]) -> list[F32]:
    """Run the graph in a folder once, and return the named outputs."""
    onnxruntime = load_library()
    try:
        session = onnxruntime.InferenceSession(str(folder / GRAPH), providers=["CPUExecutionProvider"])
        results: list[F32] = session.run(outputs, feeds)
    except Exception as error:  # onnxruntime's errors have no base of their own
        raise RuntimeUnavailableError(
            f"onnxruntime cannot run the graph, which is needed to find the scales of int8 keys and values: {error}; "
            "use --kv f32, or reinstall onnxruntime"
        ) from error
    return results
