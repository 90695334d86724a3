"""Matrices that a file keeps as one: queries, keys and values; gate and up; inputs of convolutions and mixers; experts.

The rows of a fused matrix lie one after another, so its parts are tensors like all others, at other places in the file.
The experts of a layer stay together, as a matrix of the rows of all of them.
"""

import re
from dataclasses import replace
from types import MappingProxyType

from edgedec.gguf.file import GGUF, TensorInfo
from edgedec_runtimes.shared.hyperparameters import Hyperparameters

PER_LAYER_TABLE = "per_layer_token_embd.weight"
_FUSED = re.compile(r"blk\.(\d+)\.(attn_qkv|ffn_up|shortconv\.in_proj|ssm_in)\.(weight|bias)")
_DENSE = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.weight")
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight")
_EXPERT_BIASES = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.bias")
_STATE_VECTORS = re.compile(r"blk\.\d+\.(ssm_a|ssm_d|ssm_norm\.weight)")
_SHARED_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")


def unfused(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return a header in which the parts of fused matrices and biases stand in their place; `gguf` where none is fused.

    The experts of a layer, of the shape (columns, rows, experts), become a matrix, and so does the vector that scores
    the shared expert, whose name a feed-forward block beside experts gets; vectors of state spaces that files keep as
    matrices become vectors. A row of the table of which each layer gets a part becomes a row for each layer. What has
    another number of rows than its parts together stays as it is, and so does what is there beside a part.
    """
    tensors: dict[str, TensorInfo] = {}
    for stored in gguf.tensors.values():
        tensor = _as_matrix(stored, hyper)
        name, parts = tensor.name, _parts(gguf, tensor.name, hyper)
        is_alone = not (parts.keys() - {name}) & gguf.tensors.keys()
        fits = is_alone and sum(parts.values()) == tensor.shape[-1]
        tensors |= _cut(tensor, parts) if fits else {name: tensor}
    return gguf if tensors == gguf.tensors else replace(gguf, tensors=MappingProxyType(tensors))


def _parts(gguf: GGUF, name: str, hyper: Hyperparameters) -> dict[str, int]:
    """Return the rows of the parts of a fused tensor by name, in their order; {} for any other tensor."""
    match = _FUSED.fullmatch(name)
    if match is None or int(match[1]) >= hyper.n_layer:
        return {}
    layer, before, kind = hyper.layers[int(match[1])], f"blk.{match[1]}.", match[3]
    if match[2] == "attn_qkv":
        rows = {"attn_q": layer.n_q, "attn_k": layer.n_kv, "attn_v": layer.n_kv}
    elif match[2] == "shortconv.in_proj":
        rows = dict.fromkeys(("shortconv.b", "shortconv.c", "shortconv.x"), hyper.n_embd)
    elif match[2] == "ssm_in":
        rows = _state_space_rows(gguf, before, gguf.tensors[name].shape[-1])
    elif f"{before}ffn_gate.{kind}" not in gguf.tensors:
        rows = dict.fromkeys(("ffn_gate", "ffn_up"), layer.n_ff)
    else:
        return {}
    return {f"{before}{part}.{kind}": n for part, n in rows.items()}


def _state_space_rows(gguf: GGUF, before: str, n_rows: int) -> dict[str, int]:
    """Return the rows of the parts of a Mamba-2 mixer's first matrix; {} where the other tensors do not say them."""
    output, bias = gguf.tensors.get(f"{before}ssm_out.weight"), gguf.tensors.get(f"{before}ssm_dt.bias")
    if output is None or bias is None:
        return {}
    rows = {"ssm_gate": output.shape[0], "ssm_mix": 0, "ssm_alpha": bias.shape[0]}
    rows["ssm_mix"] = n_rows - sum(rows.values())
    return rows if rows["ssm_mix"] > 0 else {}


def _as_matrix(tensor: TensorInfo, hyper: Hyperparameters) -> TensorInfo:
    """Return the matrices of experts as one, their biases as a vector, a shared expert's router as a matrix.

    A feed-forward block beside experts is returned as a shared expert, the table of what each layer gets of a token
    with a row for each token and layer, and vectors of state spaces as vectors. Any other tensor is returned as it is.
    """
    shape, dense = tensor.shape, _DENSE.fullmatch(tensor.name)
    if dense is not None and int(dense[1]) < hyper.n_layer and hyper.has_experts(int(dense[1])):
        return replace(tensor, name=f"blk.{dense[1]}.{dense[2]}_shexp.weight")
    width = hyper.n_per_layer
    if tensor.name == PER_LAYER_TABLE and width and shape[0] == width * hyper.n_layer and len(shape) == 2:
        whole = width % tensor.type.block_size == 0
        return replace(tensor, shape=(width, hyper.n_layer * shape[1])) if whole else tensor
    if _EXPERTS.fullmatch(tensor.name) and len(shape) == 3 and shape[2] == hyper.n_expert:
        return replace(tensor, shape=(shape[0], shape[1] * shape[2]))
    if _EXPERT_BIASES.fullmatch(tensor.name) and len(shape) == 2 and shape[1] == hyper.n_expert:
        return replace(tensor, shape=(shape[0] * shape[1],))
    if _STATE_VECTORS.fullmatch(tensor.name):
        return replace(tensor, shape=(tensor.n_elements,))
    if _SHARED_ROUTER.fullmatch(tensor.name) and len(shape) == 1:
        return replace(tensor, shape=(*shape, 1))
    return tensor


def _cut(tensor: TensorInfo, parts: dict[str, int]) -> dict[str, TensorInfo]:
    """Return the parts of a tensor by name; `parts` has the rows of each, in the tensor's order."""
    row_bytes, begin, pieces = tensor.n_bytes // tensor.shape[-1], tensor.offset, {}
    for name, n_rows in parts.items():
        shape = (*tensor.shape[:-1], n_rows)
        pieces[name] = replace(tensor, name=name, shape=shape, offset=begin, n_bytes=n_rows * row_bytes)
        begin += n_rows * row_bytes
    return pieces
