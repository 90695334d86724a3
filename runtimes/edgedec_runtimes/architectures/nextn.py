"""The layers that a GGUF has behind those of its model to predict further tokens: nextn, or multi-token prediction.

`block_count` counts them, and `nextn_predict_layers` says how many of the last layers they are. A file may hold them
alone, for the model of another file.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from edgedec.gguf.file import GGUF, GGUFArray, TensorInfo, Value
from edgedec.gguf.metadata import get_int, get_text

_COUNT = "nextn_predict_layers"
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)", re.DOTALL)
_OWN = "nextn."
IN_PLACE = {
    "nextn.shared_head_norm.weight": "output_norm.weight",
    "nextn.shared_head_head.weight": "output.weight",
    "nextn.embed_tokens.weight": "token_embd.weight",
}
"""Tensors that a nextn layer may have, and those of the model that they take the place of."""
# What says by a layer's number what a layer is: of one layer with attention, and with experts where the model has any.
_ALONE: dict[str, Value] = {"leading_dense_block_count": 0, "attention.recurrent_layers": 0}


def without_nextn(gguf: GGUF) -> GGUF:
    """Return the header of the model alone: the same header where the file has no nextn layers.

    Raises:
        ModelFormatError: By its metadata, the file has nextn layers only.
    """
    _, n_layer, n_nextn = _counts(gguf)
    if not n_nextn:
        return gguf
    metadata = _metadata(gguf, n_layer)
    return _header(gguf, metadata, lambda layer, short: None if layer >= n_layer else f"blk.{layer}.{short}")


def nextn_layer(gguf: GGUF) -> int | None:
    """Return the number of a file's first nextn layer; None where the file has none (raises as without_nextn)."""
    _, n_layer, n_nextn = _counts(gguf)
    return n_layer if n_nextn and any(name.startswith(f"blk.{n_layer}.{_OWN}") for name in gguf.tensors) else None


def is_nextn_alone(gguf: GGUF) -> bool:
    """Return whether a file holds nextn layers without the model that they belong to (raises as without_nextn)."""
    return nextn_layer(gguf) is not None and not any(name.startswith("blk.0.") for name in gguf.tensors)


def nextn_model(gguf: GGUF) -> GGUF:
    """Return the header of a model whose only layer is the file's first nextn layer; call it where there is one.

    What the layer has of its own in place of a tensor of the model (IN_PLACE) stands for that tensor, and what makes
    its input of a token and a state is left out.
    """
    name, n_layer, _ = _counts(gguf)
    metadata = _metadata(gguf, 1)
    for key, value in metadata.items():
        prefix, _, rest = key.partition(".")
        if prefix == name and isinstance(value, GGUFArray) and not rest.startswith("rope.") and len(value) >= n_layer:
            metadata[key] = _of_layer(value, n_layer)
    metadata |= {f"{name}.{key}": value for key, value in _ALONE.items() if f"{name}.{key}" in metadata}
    if f"{name}.ssm.state_size" in metadata:  # else only some layers have attention
        metadata[f"{name}.full_attention_interval"] = 1
    replaced = {other for short, other in IN_PLACE.items() if f"blk.{n_layer}.{short}" in gguf.tensors}
    remaining = {key: tensor for key, tensor in gguf.tensors.items() if key not in replaced}

    def tensor_name(layer: int, short: str) -> str | None:
        if layer != n_layer:
            return None
        return IN_PLACE.get(short) if short.startswith(_OWN) else f"blk.0.{short}"

    return _header(replace(gguf, tensors=remaining), metadata, tensor_name)


def _counts(gguf: GGUF) -> tuple[str, int, int]:
    """Return the architecture's name, how many layers the model has, and how many nextn layers follow them."""
    name = get_text(gguf, "general.architecture") or ""
    n_all = get_int(gguf, f"{name}.block_count", at_most=1 << 20) or 0
    n_nextn = get_int(gguf, f"{name}.{_COUNT}", at_most=max(n_all - 1, 0)) or 0
    return name, n_all - n_nextn, n_nextn


def _metadata(gguf: GGUF, n_layer: int) -> dict[str, Value]:
    """Return the metadata of a model with so many layers, of which none is a nextn layer."""
    name = get_text(gguf, "general.architecture") or ""
    metadata = {key: value for key, value in gguf.metadata.items() if key != f"{name}.{_COUNT}"}
    return metadata | {f"{name}.block_count": n_layer}


def _of_layer(value: GGUFArray, layer: int) -> Value:
    """Return an array's number for a layer; where the array is for the model's own layers alone, that of the last."""
    number: Value = value.numpy()[min(layer, len(value) - 1)].item()
    return int(number) if isinstance(number, bool) else number


def _header(gguf: GGUF, metadata: dict[str, Value], tensor_name: Callable[[int, str], str | None]) -> GGUF:
    """Return a header with other metadata, in which tensors of layers have other names; None leaves a tensor out."""
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        match = _LAYER.fullmatch(name)
        other = name if match is None else tensor_name(int(match[1]), match[2])
        if other is not None:
            tensors[other] = replace(tensor, name=other)
    return replace(gguf, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))
