"""Reads what the manifest of an export for NPUs says of the graph: sizes, contexts, and how inputs are quantized.

The manifest is `edgedec.json`, mainly its section "npu". A quantized value q stands for (q - zero point) * scale.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import GRAPH, MANIFEST, VOCABULARY
from edgedec_runtimes.onnx.exported import FileFacts, read_files

EMBEDDING = "embedding.f16"
FORMAT, TARGET, KV = 1, "npu", "2 x u8"
PARTS = ("high", "low")
"""The parts of keys and values: the value rounded to 8 bits, and the rest in 8 bits with steps 256 times shorter."""

LOW_ZERO = 128
"""The number that stands for 0 in every low part."""

ROWS = (8, 64)
"""Rows of a run of the graph in a step and in a prefill; the first number divides the second."""

LOGIT_ROWS = 8
"""Rows of logits that one run of the graph returns."""

_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Maps numbers to unsigned integers of 8 or 16 bits: value = (q - zero_point) * scale, with a scale above 0."""

    scale: float
    zero_point: int
    bits: int = 16

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Element type of a quantized array."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def lowest(self) -> float:
        """The smallest value that can be represented."""
        return -self.zero_point * self.scale

    @property
    def highest(self) -> float:
        """The largest value that can be represented."""
        return (2.0**self.bits - 1 - self.zero_point) * self.scale

    def quantize(self, values: NDArray[np.floating]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the nearest quantized values, of the same shape.

        >>> Quantizer(0.5, 10, 8).quantize(np.array([-99, -1, 0, 0.7, 999])).tolist()
        [0, 8, 10, 11, 255]
        """
        q = np.rint(values / self.scale) + self.zero_point
        clipped: NDArray[np.unsignedinteger[Any]] = np.clip(q, 0, 2**self.bits - 1).astype(self.dtype)
        return clipped

    def dequantize(self, q: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.float32]:
        """Return the float32 values that q stands for, of the same shape."""
        result = q.astype(np.float32)
        result -= np.float32(self.zero_point)
        result *= np.float32(self.scale)
        return result


def spanning(lowest: float, highest: float, bits: int = 16, *, mantissa_bits: int | None = None) -> Quantizer:
    """Return the quantizer whose range spans `lowest`, `highest` and 0; it represents 0 exactly.

    With `mantissa_bits` the scale is rounded up to a number of that many bits (a power of two for 1 bit), so that the
    range grows.

    >>> spanning(-100.0, 155.0, 8)
    Quantizer(scale=1.0, zero_point=100, bits=8)
    >>> spanning(-100.0, 200.0, 8, mantissa_bits=1)
    Quantizer(scale=2.0, zero_point=50, bits=8)
    """
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    most = 2**bits - 1
    scale = (highest - lowest) / most
    if not scale > 1e-30:  # all values are 0
        return Quantizer(2.0**-bits, 0, bits)
    if mantissa_bits is not None:
        mantissa, exponent = math.frexp(scale)
        scale = math.ldexp(math.ceil(mantissa * 2**mantissa_bits), exponent - mantissa_bits)
    return Quantizer(scale, round(-lowest / scale), bits)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a graph that are needed to make its inputs and to read its outputs.

    Attributes:
        n_ctx_train: Longest context the model was trained for.
        n_head: Heads of queries.
        n_head_kv: Heads of keys and values.
        contexts: The numbers of slots for cached tokens that the graph can have, ascending multiples of the rows of a
            prefill; the last is the longest session.
        embedding_scale: The factor for rows of the embedding.
        sliding_window: Most tokens that the layers with inputs of their own ("_local") see; 0 where there are none.
        frequencies: f64[n_rot/2], angles of a position's rotation, by suffix of the inputs ("", "_local").
        quantizers: The quantizers of hidden, rotation (both cos and sin), mask and logits.
        zeros: The numbers that stand for 0 in the high parts of keys and values: 2 n_layer numbers, for each layer
            that of the keys and that of the values.
        files: Size and SHA-256 of the folder's files; empty before the export is complete.
        sha256: SHA-256 of the manifest.
    """

    architecture: str
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    contexts: tuple[int, ...]
    embedding_scale: float
    sliding_window: int
    frequencies: Mapping[str, NDArray[np.float64]]
    quantizers: Mapping[str, Quantizer]
    zeros: tuple[int, ...]
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    sha256: str = ""

    @property
    def n_groups(self) -> int:
        """How many heads of queries share keys and values."""
        return self.n_head // self.n_head_kv

    def context_of(self, n: int) -> int:
        """Return the shortest context that holds n tokens; n is at most the longest context."""
        return next(context for context in self.contexts if context >= n)

    def dimensions(self, n_rows: int, context: int) -> dict[str, int]:
        """Return the sizes of the graph's free dimensions for runs of n_rows rows with that context."""
        return {
            "rows": n_rows,
            "context": context,
            "slots": context + n_rows,
            "grouped_rows": self.n_groups * n_rows,
            "logit_rows": LOGIT_ROWS,
        }


_COUNTS = ("n_vocab", "n_embd", "n_layer", "n_head_kv", "head_dim")
_NPU_COUNTS = ("n_ctx_train", "n_head")
QUANTIZERS = ("hidden", "rotation", "mask", "logits")


def to_json(facts: Facts) -> dict[str, Any]:
    """Return the part of the manifest that `read_facts` reads, with the section "npu"."""
    section: dict[str, Any] = {name: getattr(facts, name) for name in _NPU_COUNTS}
    section |= {
        "contexts": list(facts.contexts),
        "embedding_scale": facts.embedding_scale,
        "sliding_window": facts.sliding_window,
        "frequencies": {name: values.tolist() for name, values in facts.frequencies.items()},
        "quantizers": {name: [q.scale, q.zero_point] for name, q in facts.quantizers.items()},
        "zeros": list(facts.zeros),
    }
    counts = {name: getattr(facts, name) for name in _COUNTS}
    return {"target": TARGET, "architecture": facts.architecture, **counts, "npu": section}


def folder_of(path: Path) -> Path:
    """Return the folder of an export; `path` is the folder or the graph in it."""
    return path.parent if path.name == GRAPH else path


def read_facts(path: Path) -> Facts:
    """Read the manifest of an export; `path` is its folder or the graph in it.

    Raises:
        ModelNotFoundError: There is no manifest.
        UnsupportedModelError: The manifest is not of an export for NPUs.
        ModelFormatError: The manifest lacks a fact, or has one that can't be.
    """
    manifest = folder_of(path) / MANIFEST
    try:
        text = manifest.read_bytes()
        facts = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFoundError(
            f"{path}: no exported model, expected a folder that `edgedec export MODEL --target npu` wrote"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{manifest}: it can't be read ({error.strerror or error}); expected a folder that edgedec export made"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{manifest}: no JSON ({error}); export the model again") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("target") != TARGET:
        target = facts.get("target") if isinstance(facts, dict) else None
        raise UnsupportedModelError(
            f"{manifest}: an export for the target {target!r}, expected {TARGET!r} of format {FORMAT}; "
            "use the onnx runtime, or edgedec export --target npu"
        )
    try:
        section = facts["npu"]
        if facts["kv"] != KV:
            raise ValueError(f"keys and values are {facts['kv']!r}, expected {KV!r}")
        return _facts(facts, section, hashlib.sha256(text).hexdigest())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFormatError(
            f"{manifest}: its facts of the graph are damaged ({type(error).__name__}: {error}); export the model again"
        ) from error


def _facts(document: Mapping[str, Any], section: Mapping[str, Any], sha256: str) -> Facts:
    """Return the facts; raises KeyError, TypeError, ValueError or AttributeError where one is missing or wrong."""
    counts = {name: _whole(document[name], name) for name in _COUNTS}
    counts |= {name: _whole(section[name], name) for name in _NPU_COUNTS}
    contexts = tuple(_whole(n, "contexts") for n in section["contexts"])
    usable = {context for context in contexts if context % ROWS[-1] == 0}
    if not contexts or list(contexts) != sorted(usable) or counts["n_head"] % counts["n_head_kv"]:
        raise ValueError(f"contexts {contexts}, {counts['n_head']} heads on {counts['n_head_kv']}")
    window = section["sliding_window"]
    if type(window) is not int or not 0 <= window <= _LARGEST:
        raise ValueError(f"sliding_window is {window}")
    zeros = tuple(section["zeros"])
    if len(zeros) != 2 * counts["n_layer"] or not all(type(zero) is int and 0 <= zero < 256 for zero in zeros):
        raise ValueError(f"zeros are {str(zeros)[:80]}")
    frequencies = {str(name): np.array(values, np.float64) for name, values in section["frequencies"].items()}
    if frequencies.keys() != ({"", "_local"} if window else {""}):
        raise ValueError(f"frequencies {sorted(frequencies)} for a window of {window}")
    for values in frequencies.values():
        if values.ndim != 1 or not 0 < 2 * len(values) <= counts["head_dim"] or not np.isfinite(values).all():
            raise ValueError(f"frequencies of the shape {values.shape}")
    return Facts(
        architecture=str(document["architecture"]),
        contexts=contexts,
        embedding_scale=_positive(section["embedding_scale"]),
        sliding_window=window,
        frequencies=frequencies,
        quantizers={name: _quantizer(section["quantizers"][name]) for name in QUANTIZERS},
        zeros=zeros,
        files=read_files(document["files"], {GRAPH, VOCABULARY, EMBEDDING}),
        sha256=sha256,
        **counts,
    )


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST:
        raise ValueError(f"{name} is {value!r}, expected a number from 1")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


def _quantizer(value: Any) -> Quantizer:
    scale, zero_point = value
    if type(zero_point) is not int or not 0 <= zero_point < 2**16:
        raise ValueError(f"a zero point is {zero_point!r}")
    return Quantizer(_positive(scale), zero_point)
