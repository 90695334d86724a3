"""A decoder as optimum would export it, small enough to compute by hand: it sums up all tokens and positions so far.

    folder = write_foreign(tmp_path / "export", counting_graph())
    expected = counting_logits([5, 6, 7])

Keys and values of layer i are [token, position] times i + 1 and i + 2, in two heads, the second of which is twice the
first. A row sums up what it sees, and a matrix of small integers makes logits of the sum: every sum is exact in
float32, in any order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import read_gguf
from support.models.tiny_models import N_VOCAB, tiny_llama

F32 = NDArray[np.float32]
N_LAYER, N_HEAD_KV, HEAD_DIM = 2, 2, 2
N_CTX = 512


def weight(n_vocab: int) -> F32:
    """Return float32[4, n_vocab], integers from -2 to 2."""
    shape = (N_HEAD_KV * HEAD_DIM, n_vocab)
    return np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)


def counting_logits(token_ids: Sequence[int], n_vocab: int = N_VOCAB) -> F32:
    """Return float32[n, n_vocab], the logits of every row of a chain."""
    tokens, positions = np.cumsum(token_ids), np.cumsum(np.arange(len(token_ids)))
    times = sum(2 * i + 3 for i in range(N_LAYER))
    features = np.stack([tokens, positions, 2 * tokens, 2 * positions], axis=1) * times
    return (features @ weight(n_vocab).astype(np.int64)).astype(np.float32)


def counting_graph(
    *, n_vocab: int = N_VOCAB, positions: bool = True, half_caches: bool = False, more_inputs: Sequence[Any] = ()
) -> Any:
    """Return the graph, an onnx.ModelProto.

    Args:
        positions: Whether the graph has the input position_ids; otherwise a token's position is its slot.
        half_caches: Whether the KV cache is float16.
        more_inputs: Inputs (ValueInfoProto) that nothing uses.
    """
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []

    def add(operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    constants = {"zero": 0, "one": 1, "batch_and_last": [1, 3], "first": [0], "second": [1], "flat": [0, 0, -1]}
    arrays: dict[str, NDArray[Any]] = {name: np.array(value, np.int64) for name, value in constants.items()}
    arrays |= {"weight": weight(n_vocab), "heads": np.array([1, 2], np.float32).reshape(1, 2, 1, 1)}
    n_new = add("Gather", [add("Shape", ["input_ids"], "ids_shape"), "one"], "n_new")
    n_all = add("Gather", [add("Shape", ["attention_mask"], "mask_shape"), "one"], "n_all")
    slots = add("Range", [add("Sub", [n_all, n_new], "n_past"), n_all, "one"], "slots")
    where = "position_ids" if positions else add("Unsqueeze", [slots, "first"], "slots_in_batch")
    columns = []
    for name in ("input_ids", where):
        column = add("Cast", [name], f"{name}_float", to=TensorProto.FLOAT)
        columns.append(add("Unsqueeze", [column, "batch_and_last"], f"{name}_column"))
    row = add("Mul", [add("Concat", columns, "row", axis=3), "heads"], "rows")
    column_of = add("Unsqueeze", [add("Range", ["zero", n_all, "one"], "all_slots"), "first"], "column_of")
    causal = add("LessOrEqual", [column_of, add("Unsqueeze", [slots, "second"], "row_of")], "causal")
    mask = add("Cast", ["attention_mask"], "mask_float", to=TensorProto.FLOAT)
    seen = add("Mul", [add("Cast", [causal], "causal_float", to=TensorProto.FLOAT), mask], "seen")
    total, caches = "", [f"{i}.{part}" for i in range(N_LAYER) for part in ("key", "value")]
    for n, cache in enumerate(caches):
        arrays[f"times_{cache}"] = np.array(n // 2 + n % 2 + 1, np.float32)
        past = f"past_key_values.{cache}"
        past = add("Cast", [past], f"{past}_float", to=TensorProto.FLOAT) if half_caches else past
        new = add("Mul", [row, f"times_{cache}"], f"new_{cache}")
        mixed = add("MatMul", [seen, add("Concat", [past, new], f"present.{cache}", axis=2)], f"mixed_{cache}")
        total = add("Add", [total, mixed], f"total_{cache}") if total else mixed
    by_row = add("Reshape", [add("Transpose", [total], "by_row", perm=[0, 2, 1, 3]), "flat"], "features")
    add("MatMul", [by_row, "weight"], "logits")

    inputs, outputs = _ports(caches, n_vocab, positions, TensorProto.FLOAT16 if half_caches else TensorProto.FLOAT)
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "counting", [*inputs, *more_inputs], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _ports(caches: Sequence[str], n_vocab: int, positions: bool, kind: int) -> tuple[list[Any], list[Any]]:
    """Return inputs and outputs; `kind` is the type of the incoming KV cache."""
    from onnx import TensorProto, helper

    whole, real = TensorProto.INT64, TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("input_ids", whole, ["batch", "n"])]
    inputs.append(helper.make_tensor_value_info("attention_mask", whole, ["batch", "all"]))
    if positions:
        inputs.append(helper.make_tensor_value_info("position_ids", whole, ["batch", "n"]))
    outputs = [helper.make_tensor_value_info("logits", real, ["batch", "n", n_vocab])]
    for cache in caches:
        shape: list[str | int] = ["batch", N_HEAD_KV, "past", HEAD_DIM]
        inputs.append(helper.make_tensor_value_info(f"past_key_values.{cache}", kind, shape))
        outputs.append(helper.make_tensor_value_info(f"present.{cache}", real, ["batch", N_HEAD_KV, "all", HEAD_DIM]))
    return inputs, outputs


def write_foreign(folder: Path, graph: Any) -> Path:
    """Write a graph as an export made with optimum, with the vocabulary of a tiny model."""
    import onnx

    from edgedec_export.folder import write_manifest, write_vocabulary
    from edgedec_export.optimum.graph import rewrite_graph

    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    folder.mkdir()
    onnx.save(graph, source / "model.onnx")
    contract, sha256 = rewrite_graph(source / "model.onnx", folder)
    gguf = tiny_llama(source / "tiny.gguf", n_layer=N_LAYER, n_ctx_train=N_CTX)
    write_vocabulary(read_gguf(gguf), folder / "vocabulary.gguf")
    sizes = {"n_layer": contract.n_layer, "n_head_kv": contract.n_head_kv, "head_dim": contract.head_dim}
    facts = {"target": "cpu", "kind": "optimum", "quant": "float32", "kv": "f32", "architecture": "llama"}
    facts_of_sizes = sizes | {"n_vocab": N_VOCAB, "n_embd": 64, "local_layers": []}
    write_manifest(folder, facts | facts_of_sizes, {"model.onnx.data": sha256})
    return folder
