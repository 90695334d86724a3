"""Keys and values of an exported graph as int8: a quarter of the memory of a long context.

GroupQueryAttention rounds what it writes to its cache by fixed scales, one for each channel of each key-value head.
They are found by running the float graph over a short text: the largest value of a channel, with some room, becomes
127; what is larger is cut off. Channels differ far more than tokens do, above all those of the keys (Liu et al. 2024,
KIVI, arXiv:2402.02750).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edgedec.errors import RuntimeUnavailableError
from edgedec.gguf.formats import GRAPH
from edgedec_export.positions import local_layers
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.onnx.library import load_library

F32 = NDArray[np.float32]

ROOM = 1.5
"""How much larger than all of the text a value may be before it is cut off."""

N_TOKENS = 512
_LOW = np.float32(-1e30)
_SMALLEST = np.float32(1e-6)


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """What a layer's int8 numbers are multiplied by, f32[n_head_kv, head_dim] each."""

    keys: F32
    values: F32


def find_scales(folder: Path, network: Network, token_ids: list[int]) -> list[Scales]:
    """Run the float graph in a folder over a text and return each layer's scales.

    Args:
        token_ids: The text, with what the model expects before one; its first N_TOKENS are taken.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing or does not run the graph.
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
        feeds["attention_bias_local"] = np.where(distance < n.sliding_window, np.float32(0), _LOW)[None, None]
    names = [f"{name}_{i}" for i in range(n_layer) for name in ("key", "value")]
    caches = _run(folder, feeds | {f"past_{name}": empty for name in names}, [f"present_{name}" for name in names])
    scales = [_scale(cache) for cache in caches]
    return [Scales(*pair) for pair in zip(scales[::2], scales[1::2], strict=True)]


def with_int8_cache(model: ModelProto, scales: list[Scales]) -> None:
    """Turn the KV cache of a graph made by `graph.build_graph` into int8, in place."""
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
    """Convert the branch of an `If` whose outputs past the first are a layer's keys and values."""
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
    """Return f32[n_head_kv, head_dim] for a cache f32[1, n_head_kv, n, head_dim]."""
    largest = np.abs(cache[0]).max(axis=1)
    scale: F32 = np.maximum(largest * np.float32(ROOM / 127), _SMALLEST)
    return scale


def _run(folder: Path, feeds: dict[str, NDArray[Any]], outputs: list[str]) -> list[F32]:
    onnxruntime = load_library()
    try:
        session = onnxruntime.InferenceSession(str(folder / GRAPH), providers=["CPUExecutionProvider"])
        found: list[F32] = session.run(outputs, feeds)
    except Exception as error:  # onnxruntime's errors have no base of their own
        raise RuntimeUnavailableError(
            f"onnxruntime does not run the graph to find scales for int8 keys and values: {error}; export it with "
            "--kv f32, or reinstall onnxruntime"
        ) from error
    return found
