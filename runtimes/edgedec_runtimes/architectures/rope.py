"""How fast the pairs of a head's elements turn with their position: rotary embeddings, and how they are stretched.

Rotary positions (Su et al. 2021, arXiv:2104.09864); linear scaling (Chen et al. 2023, arXiv:2306.15595); YaRN (Peng et
al. 2023, arXiv:2309.00071); a divisor for each pair, of Llama 3 (arXiv:2407.21783) and of LongRoPE (Ding et al. 2024,
arXiv:2402.13753), which checkpoints of Phi 3 also call "su".
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGMLType
from edgedec.gguf.metadata import WHOLE, get_array
from edgedec_runtimes.architectures.header import Header

LLAMA3_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
DIVISORS = (LLAMA3_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
SCALING_KEYS = frozenset(
    f"rope.scaling.{name}"
    for name in tuple(
        """
        type factor attn_factor original_context_length finetuned yarn_beta_fast yarn_beta_slow yarn_log_multiplier
        """.split()
    )
)
"""The metadata keys that `read_rope` honours, below the architecture's name."""
SECTIONS = "rope.dimension_sections"
"""The key of how many pairs turn with a token's time, height and width, which are its position where it is text."""
_KINDS = (None, "none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """How the rotated elements of queries and keys turn.

    Attributes:
        n_rot: How many elements of a head are rotated.
        base: Pair i of n_rot / 2 turns by base^(-2i / n_rot) radians per position, before any scaling.
        scale: What these frequencies are multiplied by (with YaRN: those of slow pairs).
        yarn: Pairs that turn often within the original context are not scaled.
        n_ctx_original: The context that the model was trained for before positions were scaled.
        beta_fast, beta_slow: YaRN leaves pairs alone that turn more often than beta_fast within the original context,
            and scales those that turn less often than beta_slow.
        log_multiplier: How much of YaRN's factor for rotated elements the model already has in its weights, 0 to 1.
        attention_factor: What rotated elements are multiplied by, beside YaRN's factor.
        has_divisors: The file may have divisors of the frequencies.
        sections: How many pairs turn with a row's time, height and width (M-RoPE, Qwen2-VL, arXiv:2409.12191), three
            numbers that are equal for a token of text; () where every pair turns with the row's position.
        woven: The pairs of time, height and width take turns, one by one; else they follow one another.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    yarn: bool = False
    n_ctx_original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    attention_factor: float = 1.0
    has_divisors: bool = True
    sections: tuple[int, ...] = ()
    woven: bool = True


@dataclass(frozen=True, slots=True)
class Turns:
    """What a rotation does.

    Attributes:
        frequencies: float64[n_rot / 2], radians per position.
        magnitude: What rotated elements are multiplied by.
        axes: u8[n_rot / 2], whether a pair turns with a row's time (0), height (1) or width (2); None for all with its
            position.
    """

    frequencies: NDArray[np.float64]
    magnitude: float
    axes: NDArray[np.uint8] | None = None


def read_rope(header: Header) -> Rope:
    """Return the rotation that a model's metadata describes.

    Raises:
        UnsupportedModelError: The kind of scaling is none that edgedec knows.
    """
    info = header.info
    if info.rope_scaling not in _KINDS:
        raise UnsupportedModelError(
            f"{header.gguf.paths[0]}: rope scaling {info.rope_scaling!r} is none of {', '.join(filter(None, _KINDS))}; "
            "use the llamacpp runtime"
        )
    sections = _sections(header)
    is_scaled = bool(info.rope_factor) and info.rope_scaling != "none"
    return Rope(
        n_rot=header.hyper.n_rot,
        base=header.hyper.rope_base,
        scale=1 / info.rope_factor if is_scaled and info.rope_factor else 1.0,
        yarn=info.rope_scaling == "yarn",
        n_ctx_original=header.whole("rope.scaling.original_context_length", 0) or header.hyper.n_ctx_train,
        beta_fast=header.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=header.number("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=header.number("rope.scaling.yarn_log_multiplier", 0.0),
        attention_factor=header.number("rope.scaling.attn_factor", 1.0),
        sections=sections,
    )


def _sections(header: Header) -> tuple[int, ...]:
    """Return how many pairs turn with time, height and width; () where the file does not say.

    Raises:
        UnsupportedModelError: Some pairs turn with something else.
    """
    key = f"{header.info.architecture}.{SECTIONS}"
    sections = get_array(header.gguf, key, WHOLE)
    if sections is not None and sections.numpy()[3:].any():
        raise UnsupportedModelError(
            f"{header.gguf.paths[0]}: {key} has a section after its first three, for time, height and width; "
            "use the llamacpp runtime"
        )
    sizes = [] if sections is None else [*map(int, sections.numpy()), 0, 0, 0][:3]
    return tuple(sizes) if any(sizes) else ()


def axes_of(rope: Rope) -> NDArray[np.uint8] | None:
    """Return u8[n_rot / 2], with which of time, height and width each pair turns; None where there are no sections.

    >>> axes_of(Rope(16, 1e4, sections=(3, 3, 2))), axes_of(Rope(16, 1e4, sections=(3, 3, 2), woven=False))
    (array([0, 1, 2, 0, 1, 2, 0, 1], dtype=uint8), array([0, 0, 0, 1, 1, 1, 2, 2], dtype=uint8))
    """
    if not rope.sections:
        return None
    pairs = np.arange(rope.n_rot // 2) % sum(rope.sections)
    if not rope.woven:
        return np.searchsorted(np.cumsum(rope.sections), pairs, side="right").astype(np.uint8)
    axes = pairs % 3
    return np.where(pairs < 3 * np.array(rope.sections)[axes], axes, 0).astype(np.uint8)


def turns(rope: Rope, divisors: NDArray[np.float32] | None = None) -> Turns:
    """Return the frequencies of a rotation, and what it multiplies rotated elements by.

    Args:
        rope: The rotation.
        divisors: float32[n_rot / 2] that the frequencies are divided by, or None.
    """
    half, base, scale = rope.n_rot // 2, float(np.float32(rope.base)), float(np.float32(rope.scale))
    powers = np.array([math.pow(base, -2.0 * i / rope.n_rot) for i in range(half)])
    by = np.ones(half) if divisors is None else divisors.astype(np.float64)
    if not rope.yarn:
        return Turns(powers * scale / by, rope.attention_factor, axes_of(rope))
    cached = _kept(rope, base)
    stretched = math.log(max(1.0, 1 / scale))
    magnitude = (0.1 * stretched + 1) / (0.1 * rope.log_multiplier * stretched + 1)
    return Turns(powers / by * (scale * (1 - cached) + cached), magnitude * rope.attention_factor, axes_of(rope))


def _kept(rope: Rope, base: float) -> NDArray[np.float64]:
    """Return float64[n_rot / 2]: 1 for pairs that YaRN leaves alone, 0 for those it scales, and a ramp between them."""

    def pair_that_turns(n_times: float) -> float:
        """Return the number of the pair that turns so often within the original context."""
        return rope.n_rot * math.log(rope.n_ctx_original / (n_times * 2 * math.pi)) / (2 * math.log(base))

    first = max(0, math.floor(pair_that_turns(rope.beta_fast)))
    last = min(rope.n_rot - 1, math.ceil(pair_that_turns(rope.beta_slow)))
    ramp: NDArray[np.float64] = (np.arange(rope.n_rot // 2) - first) / max(0.001, last - first)
    return 1 - np.clip(ramp, 0, 1)


def divisor_tensor(gguf: GGUF, rope: Rope, n_ctx: int) -> str | None:
    """Return the name of the tensor that divides frequencies in a context of n_ctx tokens; None where there is none."""
    long = SHORT_DIVISORS if n_ctx <= rope.n_ctx_original else LONG_DIVISORS
    names = [name for name in (LLAMA3_DIVISORS, long) if name in gguf.tensors]
    return names[0] if names and rope.has_divisors else None


def turns_in(gguf: GGUF, rope: Rope, n_ctx: int) -> Turns:
    """Return the frequencies of a rotation in a context of n_ctx tokens, divisors of the file included.

    Raises:
        ModelFormatError: There is another number of divisors, one is no positive number, or the file got shorter.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
    """
    if (name := divisor_tensor(gguf, rope, n_ctx)) is None:
        return turns(rope)
    if gguf.tensors[name].type is not GGMLType.F32 or gguf.tensors[name].shape != (rope.n_rot // 2,):
        actual = f"{gguf.tensors[name].type.name} of the shape {gguf.tensors[name].shape}"
        raise ModelFormatError(
            f"{gguf.paths[0]}: tensor {name!r} is {actual}, expected F32 of {rope.n_rot // 2}; download the file again"
        )
    divisors = np.frombuffer(gguf.read_tensor_bytes(name), "<f4").astype(np.float32)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise ModelFormatError(
            f"{gguf.paths[0]}: tensor {name!r} holds what is no positive number; download the file again"
        )
    return turns(rope, divisors)
