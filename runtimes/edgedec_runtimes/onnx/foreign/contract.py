"""The inputs and outputs of a decoder that optimum exported; graphs with others are refused.

| input | type | meaning |
|---|---|---|
| input_ids, position_ids | int64[1, S] | tokens and their positions; some graphs count positions themselves |
| attention_mask | int64[1, P + S] | 1, or 0 for a slot that no row may see |
| past_key_values.i.key, .value | float32[1, n_head_kv, P, head_dim] | the KV cache of P tokens |

The outputs are logits, float32[1, S, n_vocab], and present.i.key and .value, the KV cache of P + S tokens in new
arrays. Source: optimum-onnx 0.1.0 for the task text-generation-with-past.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError

_KEY = re.compile(r"past_key_values\.\d+\.key")
_WHOLE, _FLOAT = "tensor(int64)", "tensor(float)"


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph.

    Attributes:
        type: ONNX Runtime's name of its type, such as "tensor(float)".
        shape: Its sizes; an axis whose size is no whole number may have any size.
    """

    name: str
    type: str
    shape: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Contract:
    """The sizes of a graph.

    Attributes:
        n_vocab: Length of a row of logits; None where the graph leaves it open.
        has_positions: Whether the graph has the input position_ids.
    """

    n_layer: int
    n_head_kv: int
    head_dim: int
    n_vocab: int | None
    has_positions: bool

    @property
    def caches(self) -> list[str]:
        """Names of the KV arrays behind "past_key_values." and "present.", each layer's key before its value."""
        return _caches(self.n_layer)


def read_contract(inputs: Iterable[Port], outputs: Iterable[Port]) -> Contract:
    """Read the sizes from a graph's inputs and outputs.

    Raises:
        UnsupportedModelError: The graph is no decoder with a KV cache in float32.
    """
    taken, returned = {port.name: port for port in inputs}, {port.name: port for port in outputs}
    n_layer = sum(_KEY.fullmatch(name) is not None for name in taken)
    if not n_layer:
        _refuse("it has no inputs past_key_values.0.key and so on: it was exported without a KV cache")
    caches = _caches(n_layer)
    needed = {"input_ids", "attention_mask", *(f"past_key_values.{cache}" for cache in caches)}
    results = {"logits", *(f"present.{cache}" for cache in caches)}
    for kind, missing in (("input", needed - taken.keys()), ("output", results - returned.keys())):
        if missing:
            _refuse(f"it lacks the {kind} {min(missing)!r}")
    unknown = taken.keys() - needed - {"position_ids"}
    if unknown:
        _refuse(f"it has the input {min(unknown)[:80]!r}, whose meaning is not known here")
    for port in taken.values():
        is_cache = port.name.startswith("past_key_values.")
        _check(port, _FLOAT if is_cache else _WHOLE, rank=4 if is_cache else 2, free=2 if is_cache else 1)
    _check(returned["logits"], _FLOAT, rank=3, free=1)
    sizes = {taken[f"past_key_values.{cache}"].shape[1::2] for cache in caches}
    n_head_kv, head_dim = min(sizes, key=str)
    if len(sizes) > 1 or not all(type(size) is int and size > 0 for size in (n_head_kv, head_dim)):
        _refuse(f"its KV cache has arrays of (heads, head size) {sorted(sizes, key=str)}, expected the same for all")
    n_vocab = returned["logits"].shape[-1]
    return Contract(n_layer, n_head_kv, head_dim, n_vocab if type(n_vocab) is int else None, "position_ids" in taken)


def feeds(contract: Contract, tokens: NDArray[np.int32], n_past: int, n_rows: int) -> dict[str, NDArray[np.int64]]:
    """Return the inputs of n_rows rows after n_past cached tokens by name, without the KV cache.

    Rows beyond the tokens, int32[n], repeat the last token at the same position, in slots that no row sees.

    >>> arrays = feeds(Contract(1, 1, 1, 9, True), np.array([7, 8, 9], np.int32), 2, 4)
    >>> [arrays[name].tolist() for name in ("input_ids", "attention_mask", "position_ids")]
    [[[7, 8, 9, 9]], [[1, 1, 1, 1, 1, 0]], [[2, 3, 4, 4]]]
    """
    rows = np.minimum(np.arange(n_rows, dtype=np.int64), len(tokens) - 1)
    mask = np.ones((1, n_past + n_rows), np.int64)
    mask[0, n_past + len(tokens) :] = 0
    arrays = {"input_ids": tokens[rows].astype(np.int64)[None], "attention_mask": mask}
    return arrays | ({"position_ids": (n_past + rows)[None]} if contract.has_positions else {})


def _caches(n_layer: int) -> list[str]:
    return [f"{i}.{part}" for i in range(n_layer) for part in ("key", "value")]


def _check(port: Port, type_name: str, *, rank: int, free: int) -> None:
    """Refuse a port of another type or rank, of a batch over 1, or of a fixed size on its axis `free`."""
    shown = f"{port.type}{list(port.shape)}"[:120]
    if port.type != type_name:
        _refuse(f"{port.name} is {shown}, expected {type_name}")
    free_axis, batch = (port.shape[free], port.shape[0]) if len(port.shape) == rank else (None, None)
    is_fixed = type(free_axis) is int or (type(batch) is int and batch > 1)
    if len(port.shape) != rank or is_fixed:
        _refuse(f"{port.name} is {shown}, expected {rank} axes, a batch of 1 and any number of tokens")


def _refuse(actual: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{actual}; the onnx runtime takes decoders as optimum exports them, with a KV cache and in float32: export it "
        "that way (edgedec export MODEL --via optimum), or take a GGUF of the model"
    )
