"""Low-rank adapters that PEFT has saved, for models that are GGUFs; neither torch nor PEFT is needed.

A folder has adapter_config.json and adapter_model.safetensors. The names of its tensors are those of the checkpoint
(edgedec_runtimes.weights.checkpoint_names has the GGUF's), and the rows of some matrices are reordered as those are.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, floats
from edgedec.gguf.metadata import get_int, get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.adapter_pairs import Adapter, AdapterPair, Floats, content_hash, require_pair
from edgedec_runtimes.weights.checkpoint_names import gguf_name, in_neighbours, to_neighbours
from edgedec_runtimes.weights.config_values import ConfigValues
from edgedec_runtimes.weights.safetensors import ITEM_BYTES, Tensor, read_header, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REMEDY = "edgedec takes plain LoRA; merge the adapter with PEFT (merge_and_unload) and convert the result"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PLAIN = re.compile(r"\^?[\w.]+")
# What an adapter may change beside adding a product, with the values that stand for no change.
_NO_CHANGE: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "trainable_token_indices": ([], {}),
    "use_qalora": (False,),
    "target_parameters": ([],),
}


def read_peft(folder: Path, gguf: GGUF) -> Adapter:
    """Return the adapter in a folder, its matrices under the names that the model's file has for them.

    `gguf` is the model's header. Whether the shapes fit the model is left to load_adapters.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFormatError: A file is damaged.
        UnsupportedModelError: It is no LoRA, changes more than matrices, or is for no architecture that has names here.
        StorageError: A file can't be read.
    """
    config = ConfigValues(folder / CONFIG, read_json(folder / CONFIG), _REMEDY)
    _require_plain(config)
    path, architecture = folder / WEIGHTS, get_text(gguf, "general.architecture") or ""
    pairs = {}
    for target, (module, first, second) in _matrices(path, architecture).items():
        a, b = _matrix(first), _matrix(second)
        if in_neighbours(architecture, target) and b.size:
            b = _reordered(b, gguf, architecture, path, first.name)
        pairs[target] = AdapterPair(*_alike(a, b), _factor(config, module, b.shape[1]))
    return Adapter(folder, content_hash((folder / CONFIG, path)), pairs)


def _matrices(path: Path, architecture: str) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Return the module and the two tensors of each matrix that an adapter changes, by the GGUF's name of it."""
    tensors, pairs = read_header(path), {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        target = gguf_name(architecture, f"{match[1]}.weight") if match else None
        other = tensors.get(f"base_model.model.{match[1]}.lora_{'BA'[match[2] == 'B']}.weight") if match else None
        if match is None or target is None:
            raise UnsupportedModelError(
                f"{path}: tensor {name[:100]!r} is of no matrix of a {architecture!r:.40} model; {_REMEDY}"
            )
        if other is None:
            raise ModelFormatError(f"{path}: tensor {name[:100]!r} is there alone; download the adapter again")
        if match[2] == "A":
            pairs[target] = (match[1], tensor, other)
    return pairs


def peft_bytes(folder: Path, gguf: GGUF) -> int:
    """Return the most bytes that the matrices of an adapter for this model take in memory, from its header.

    Raises:
        As load_adapters, where the header of the adapter does not fit the model's.
    """
    n_bytes = 0
    for target, (_, a, b) in _matrices(folder / WEIGHTS, get_text(gguf, "general.architecture") or "").items():
        require_pair(folder, target, a.shape, b.shape, gguf)
        for tensor, times in ((a, 2), (b, 1)):
            n_bytes += times * (2 if tensor.dtype == "F16" else 4) * (tensor.n_bytes // ITEM_BYTES[tensor.dtype])
    return n_bytes


def _require_plain(config: ConfigValues) -> None:
    """Raise UnsupportedModelError for an adapter that does more than to add products."""
    if config.values.get("peft_type") != "LORA":
        config.refuse("peft_type", "expected 'LORA'")
    for name, values in _NO_CHANGE.items():
        if config.values.get(name) is not None and config.values[name] not in values:
            config.refuse(name, f"expected {values[0]!r}")


def _factor(config: ConfigValues, module: str, rank: int) -> float:
    """Return the factor by which PEFT multiplies the product B (A x) of a module."""
    alpha: Any = config.number("lora_alpha")
    for pattern, value in config.table("alpha_pattern").items():
        if not _PLAIN.fullmatch(pattern):
            config.refuse("alpha_pattern", "expected names of modules")
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            alpha = ConfigValues(config.path, {pattern: value}, _REMEDY).number(pattern)
            break
    return float(alpha) / (rank**0.5 if config.flag("use_rslora", False) else rank)


def _matrix(tensor: Tensor) -> Floats:
    """Return a tensor as a matrix: halves as they are, other floats as float32."""
    if tensor.dtype not in ("F32", "F16", "BF16") or len(tensor.shape) != 2 or not all(tensor.shape):
        actual = f"{tensor.dtype}{list(tensor.shape)}"
        raise ModelFormatError(f"{tensor.path}: tensor {tensor.name[:100]!r} is {actual}, expected a matrix of floats")
    data = tensor.read()
    values: Floats = data.view("<f2") if tensor.dtype == "F16" else floats(GGMLType[tensor.dtype], data)
    return values.reshape(tensor.shape)


def _alike(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    narrow = a.dtype == b.dtype == np.float16
    return (a, b) if narrow else (a.astype(np.float32), b.astype(np.float32))


def _reordered(b: Floats, gguf: GGUF, architecture: str, path: Path, name: str) -> Floats:
    """Return the rows of B in the order of a GGUF, where pairs of a rotation are neighbours."""
    most = 2**24
    n_embd = get_int(gguf, f"{architecture}.embedding_length", at_least=1, at_most=most) or 1
    n_head = get_int(gguf, f"{architecture}.attention.head_count", at_least=1, at_most=most) or 1
    head_dim = get_int(gguf, f"{architecture}.attention.key_length", at_least=1, at_most=most) or n_embd // n_head
    if head_dim % 2 or len(b) % head_dim:
        raise ModelFormatError(
            f"{path}: the other tensor of {name[:100]!r} has {len(b)} rows, expected heads of {head_dim}; take an "
            "adapter of this model"
        )
    rows = to_neighbours(b.astype(np.float32), head_dim)
    return rows.astype(np.float16) if b.dtype == np.float16 else rows
