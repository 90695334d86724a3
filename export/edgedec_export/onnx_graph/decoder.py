"""The ONNX graph of a decoder: its inputs, its outputs, and the layers between them.

Each half of a layer is in an `If` whose condition is an input, so that a forward can leave halves out (the subset of
layers of LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710). A half that is left out passes on the hidden state and the
KV cache that it was given. Weights belong to the outermost graph: all branches and all forwards share them.

With S new rows, T tokens including them, buffers of C tokens and R rows of logits, batch 1:

inputs: input_ids, position_ids int64[1, S]; seqlens_k int32[1] (T - 1); total_sequence_length int32[] (T);
attention_bias float32[1, 1, A, T] and, where layers have a sliding window, attention_bias_local; logit_rows int64[R];
attention_rows int64[A], the rows that attention sees (A is S, or S + 1 where the last row is there twice; T counts A
rows); attn_on, mlp_on bool[n_layer]; tap_rows int64[n_layer], the number of leading rows of each layer's hidden state
to return; past_key_{i}, past_value_{i} [1, n_head_kv, C, head_dim].

outputs: logits float32[1, R, n_vocab]; hidden_{i} float32[1, tap_rows[i], n_embd]; present_key_{i}, present_value_{i},
which the caller binds to the memory of past_key_{i}, past_value_{i}, so that nothing is copied.
"""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from edgedec_export.onnx_graph.file_weights import FileWeights
from edgedec_export.onnx_graph.layers import Builder, Inputs, attention, feed_forward, rms_norm
from edgedec_export.onnx_graph.parts import CONTRIB, IR_VERSION, OPSET, Scope
from edgedec_export.positions import local_layers
from edgedec_runtimes.architectures.rope import Turns
from edgedec_runtimes.cpu.network import Network

Shape = list[int | str | None]


def build_graph(
    network: Network,
    weights: FileWeights,
    turns: Mapping[bool, Turns],
) -> ModelProto:
    """Return the graph of a network; its weights are written on the way.

    Args:
        turns: How queries and keys turn, by whether a layer has a sliding window.
    """
    b, scope = Builder(network, weights), Scope("model")
    local = set(local_layers(network))
    rotations = {False: _rotations(b, scope, "rope", turns[False])}
    if local:
        rotations[True] = _rotations(b, scope, "rope_local", turns[True])
    temperature = _temperature(b, scope) if network.switches.temperature_tokens else None
    state = weights.embedding(scope, "input_ids")
    head = Scope(scope.name)  # read after the embedding, which may be the same matrix
    logits = weights.head(head, f"{scope.name}/output_norm")
    if network.switches.embedding_scale != 1.0:
        factor = weights.initializers.add("embedding_scale", np.array(network.switches.embedding_scale, np.float32))
        state = scope.add("Mul", [state, factor], "scaled_embedding")
    n_rows = scope.add("Shape", ["input_ids"], "n_rows", start=1, end=2)
    tap_ends = _per_layer(scope, "tap_rows", network.n_layer)
    gates = [_per_layer(scope, name, network.n_layer) for name in ("attn_on", "mlp_on")]
    for i in range(network.n_layer):
        cos, sin = rotations[i in local]
        bias = "attention_bias_local" if i in local else "attention_bias"
        inputs = Inputs(cos, sin, bias, f"past_key_{i}", f"past_value_{i}", n_rows, temperature)
        state = _attention_half(b, scope, i, state, inputs, gates[0][i])
        state = _feed_forward_half(b, scope, i, state, gates[1][i])
        _tap(b, scope, i, state, tap_ends[i])
    rows = scope.add("Gather", [state, "logit_rows"], "logit_states", axis=1)
    rms_norm(b, scope, "output_norm.weight", rows, "output_norm")
    scope.nodes += head.nodes
    scope.output(_finished_logits(b, scope, logits), "logits")
    graph = helper.make_graph(scope.nodes, "edgedec", _graph_inputs(network), _graph_outputs(network))
    graph.initializer.extend(weights.initializers.tensors)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, producer_name="edgedec", opset_imports=opsets, ir_version=IR_VERSION)


def _finished_logits(b: Builder, scope: Scope, logits: str) -> str:
    """Add the scale and the soft cap of logits, where the architecture has them; return the logits' name."""
    switches = b.network.switches
    if switches.logit_scale != 1.0:
        factor = b.weights.initializers.add("logit_scale", np.array(switches.logit_scale, np.float32))
        logits = scope.add("Mul", [logits, factor], "scaled_logits")
    if switches.logit_softcap:
        cap = b.weights.initializers.add("logit_softcap", np.array(switches.logit_softcap, np.float32))
        bent = scope.add("Tanh", [scope.add("Div", [logits, cap], "logits_by_cap")], "bent_logits")
        logits = scope.add("Mul", [bent, cap], "capped_logits")
    return logits


def _temperature(b: Builder, scope: Scope) -> str:
    """Add what queries are multiplied by, float32[1, S, 1]: 1 + s * ln(1 + floor(position / t)), in doubles."""
    s, add = b.network.switches, b.weights.initializers.add
    tokens = add("temperature_tokens", np.array(s.temperature_tokens, np.int64))
    one = add("one_double", np.array(1.0))
    steps = scope.add("Div", ["position_ids", tokens], "temperature_steps")
    steps = scope.add("Add", [scope.add("Cast", [steps], "steps_double", to=TensorProto.DOUBLE), one], "steps_from_one")
    logarithm = scope.add("Log", [steps], "steps_log")
    scaled = scope.add("Mul", [logarithm, add("temperature_scale", np.array(s.temperature_scale))], "steps_scaled")
    factors = scope.add("Cast", [scope.add("Add", [scaled, one], "rising")], "temperature_row", to=TensorProto.FLOAT)
    return scope.add("Unsqueeze", [factors, add("last_axis", np.array([2], np.int64))], "temperature")


def _rotations(b: Builder, scope: Scope, name: str, turns: Turns) -> tuple[str, str]:
    """Add cosines and sines, float32[S, n_rot/2]; angles are in double precision, as positions may be large."""
    factors = b.weights.initializers.add(f"{name}_frequencies", turns.frequencies[None])
    positions = scope.add("Cast", ["position_ids"], f"{name}_positions", to=TensorProto.DOUBLE)
    column = scope.add("Transpose", [positions], f"{name}_column")
    angles = scope.add("Mul", [column, factors], f"{name}_angles")
    doubles = [scope.add(operator, [angles], f"{name}_{operator.lower()}_double") for operator in ("Cos", "Sin")]
    if turns.magnitude != 1.0:
        magnitude = b.weights.initializers.add(f"{name}_magnitude", np.array(turns.magnitude))
        doubles = [
            scope.add("Mul", [x, magnitude], x.split("/")[-1].replace("_double", "_grown_double")) for x in doubles
        ]
    cos, sin = (scope.add("Cast", [x], x.split("/")[-1].removesuffix("_double"), to=TensorProto.FLOAT) for x in doubles)
    return cos, sin


def _per_layer(scope: Scope, name: str, n_layer: int) -> list[str]:
    """Split an input [n_layer] into one value [1] per layer; return their names."""
    return scope.add_many("Split", [name], [f"{name}_{i}" for i in range(n_layer)], axis=0, num_outputs=n_layer)


def _tap(b: Builder, scope: Scope, layer: int, state: str, end: str) -> None:
    """Add the output hidden_{layer}: the leading rows of the layer's hidden state."""
    start = b.weights.initializers.add("zero", np.array([0], np.int64))
    axis = b.weights.initializers.add("one", np.array([1], np.int64))
    name = f"hidden_{layer}"
    scope.nodes.append(helper.make_node("Slice", [state, start, end, axis], [name], name=name))


def _attention_half(b: Builder, scope: Scope, layer: int, state: str, inputs: Inputs, gate: str) -> str:
    """Add an attention half that `gate` switches, and return the hidden state's name."""
    n = b.network
    present = [f"present_key_{layer}", f"present_value_{layer}"]
    cache: Shape = [1, n.n_head_kv, "C", n.head_dim]
    branch = Scope(f"blk.{layer}.attention")
    outputs = attention(b, branch, layer, state, inputs)
    shapes: list[Shape] = [[1, "S", n.n_embd], cache, cache]
    passed_on = [state, inputs.past_key, inputs.past_value]
    return _if(scope, branch, outputs, passed_on, shapes, gate, present)


def _feed_forward_half(b: Builder, scope: Scope, layer: int, state: str, gate: str) -> str:
    """Add a feed-forward half that `gate` switches, and return the hidden state's name."""
    branch = Scope(f"blk.{layer}.feed_forward")
    output = feed_forward(b, branch, layer, state)
    return _if(scope, branch, [output], [state], [[1, "S", b.network.n_embd]], gate, [])


def _if(
    scope: Scope,
    branch: Scope,
    outputs: list[str],
    passed_on: list[str],
    shapes: list[Shape],
    gate: str,
    names: list[str],
) -> str:
    """Add an `If` with a half-layer in one branch, and in the other what passes its inputs on.

    Args:
        outputs, passed_on, shapes: Results of the branches and their shapes: the hidden state, then those with `names`.

    Returns:
        The name of the hidden state.
    """

    def graph(source: Scope, values: list[str]) -> GraphProto:
        infos = zip(values, shapes, strict=True)
        returned = [helper.make_tensor_value_info(v, TensorProto.FLOAT, shape) for v, shape in infos]
        return helper.make_graph(source.nodes, source.name, [], returned)

    other = Scope(f"{branch.name}_off")
    handed = [other.add("Identity", [value], f"value_{i}") for i, value in enumerate(passed_on)]
    state = f"{scope.name}/{branch.name}"
    scope.nodes.append(
        helper.make_node(
            "If",
            [gate],
            [state, *names],
            name=state,
            then_branch=graph(branch, outputs),
            else_branch=graph(other, handed),
        )
    )
    return state


def _graph_inputs(network: Network) -> list[ValueInfoProto]:
    n = network
    shapes: dict[str, tuple[int, Shape]] = {
        "input_ids": (TensorProto.INT64, [1, "S"]),
        "position_ids": (TensorProto.INT64, [1, "S"]),
        "seqlens_k": (TensorProto.INT32, [1]),
        "total_sequence_length": (TensorProto.INT32, []),
        "attention_bias": (TensorProto.FLOAT, [1, 1, "A", "T"]),
    }
    if local_layers(n):
        shapes["attention_bias_local"] = TensorProto.FLOAT, [1, 1, "A", "T"]
    shapes |= {"logit_rows": (TensorProto.INT64, ["R"]), "attention_rows": (TensorProto.INT64, ["A"])}
    shapes |= {name: (TensorProto.BOOL, [n.n_layer]) for name in ("attn_on", "mlp_on")}
    shapes["tap_rows"] = TensorProto.INT64, [n.n_layer]
    for i in range(n.n_layer):
        for name in ("key", "value"):
            shapes[f"past_{name}_{i}"] = TensorProto.FLOAT, [1, n.n_head_kv, "C", n.head_dim]
    return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in shapes.items()]


def _graph_outputs(network: Network) -> list[ValueInfoProto]:
    n = network
    shapes: dict[str, Shape] = {"logits": [1, "R", n.n_vocab]}
    shapes |= {f"hidden_{i}": [1, None, n.n_embd] for i in range(n.n_layer)}
    for i in range(n.n_layer):
        shapes |= {f"present_{name}_{i}": [1, n.n_head_kv, "C", n.head_dim] for name in ("key", "value")}
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
