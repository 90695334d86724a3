"""What a projector file of the SigLIP kind has for our own encoder: its shape, and which tensor is which weight."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import FLOATS, GGUF, TensorInfo
from edgedec.gguf.metadata import get_array, get_bool, get_float, get_int
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.values import ValueType
from edgedec_runtimes.pictures.siglip_layout import KINDS, Cutting

_VISION = "clip.vision."
_SIZES = ("image_size", "patch_size", "embedding_length", "feed_forward_length", "block_count")
_LN_EPSILON = 1e-5  # of the norm before lfm2's projection
_MOST_WIDTH, _MOST_HEAD = 1 << 16, 512
_LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")
_LAYER_NORMS = ("ln1", "ln2")
_OTHER_ATTENTION = ("attention.head_dim", "feature_layer", "n_wa_pattern", "wa_layer_indexes", "window_size")
_PROJECTIONS = {  # norm of merged rows, first and second matrix
    "gemma3": ("mm.soft_emb_norm", "mm.input_projection", None),
    "idefics3": (None, "mm.model.fc", None),
    "lfm2": ("mm.input_norm", "mm.1", "mm.2"),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of the file: [n_rows][n_cols], or the other way round where it is transposed."""

    tensor: TensorInfo
    n_rows: int
    n_cols: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class SiglipFile:
    """An encoder that our kernels run.

    Attributes:
        cutting: How pictures are cut.
        n_embd, n_ff, n_layer, n_head, n_out: Widths and numbers.
        activation: "gelu", "gelu_quick" or "silu".
        epsilon, merged_epsilon: Of the norms of layers, and of the one before the projection.
        mean, std: Of red, green and blue.
        once: The matrices that exist once: of patches, and the one or two of the projection.
        layers: For each layer, the matrices in the order q, k, v, out, up, down.
        vectors: Biases and norms by the tensors' names; absent ones are not there.
        position: The tensor of positions, [side * side][n_embd].
        side: The table's side.
    """

    cutting: Cutting
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_out: int
    activation: str
    epsilon: float
    merged_epsilon: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    once: tuple[Weight, ...]
    layers: tuple[tuple[Weight, ...], ...]
    vectors: dict[str, TensorInfo]
    position: TensorInfo
    side: int


def siglip_file(gguf: GGUF, kind: str, n_out: int, max_tokens: int | None) -> SiglipFile | None:
    """Return what our encoder runs of a projector file; None where the file has anything that it does not know.

    Args:
        gguf: The file's header.
        kind: The kind of the projector.
        n_out: The width of the text model.
        max_tokens: Most rows of a picture that the user wants, or None.

    Raises:
        ModelFormatError: A value of the metadata has another type, or is out of bounds.
    """
    sizes = [get_int(gguf, _VISION + name, at_least=1, at_most=_MOST_WIDTH) for name in _SIZES]
    if kind not in KINDS or len(gguf.paths) > 1 or gguf.form is not None or None in sizes:
        return None
    image_size, patch_size, n_embd, n_ff, n_layer = (size or 0 for size in sizes)
    n_head = _heads(gguf, n_embd)
    merge = get_int(gguf, f"{_VISION}projector.scale_factor", at_least=1, at_most=16) or (4 if kind == "gemma3" else 1)
    epsilon = get_float(gguf, f"{_VISION}attention.layer_norm_epsilon")
    mean, std = _three(gguf, "image_mean"), _three(gguf, "image_std")
    edge = get_int(gguf, f"{_VISION}preproc_image_size", at_most=_MOST_WIDTH) or 0
    if (
        n_head is None
        or n_out > _MOST_WIDTH
        or image_size % (patch_size * merge)
        or (merge == 1 and kind != "gemma3")
        or epsilon is None
        or not 0 <= epsilon <= 1
        or not (mean and std and all(std))
    ):
        return None
    cutting = Cutting(kind, image_size, patch_size, merge, edge if kind == "idefics3" else 0, max_tokens or 0)
    once, layers = _once(gguf, cutting, n_embd, n_out), _layers(gguf, kind, n_embd, n_ff, n_layer)
    position, gelu, silu = _table(gguf, n_embd), get_bool(gguf, "clip.use_gelu"), get_bool(gguf, "clip.use_silu")
    if once is None or layers is None or position is None or (gelu and silu):
        return None
    side = math.isqrt(position.shape[1])
    used = {weight.tensor.name for weights in (once, *layers) for weight in weights} | {position.name}
    vectors = _vectors(gguf, used)
    if vectors is None or (kind != "lfm2" and side != image_size // patch_size):
        return None
    file = SiglipFile(
        cutting=cutting,
        n_embd=n_embd,
        n_ff=n_ff,
        n_layer=n_layer,
        n_head=n_head,
        n_out=n_out,
        activation="gelu" if gelu else "silu" if silu else "gelu_quick",
        epsilon=epsilon,
        merged_epsilon=epsilon if kind == "gemma3" else _LN_EPSILON,
        mean=mean,
        std=std,
        once=once,
        layers=layers,
        vectors=vectors,
        position=position,
        side=side,
    )
    return file if _fits(file) else None


def vector_slots(file: SiglipFile, layer: int | None) -> tuple[tuple[str | None, int], ...]:
    """Return name and length of each vector of a layer, or of those that exist once, in the native library's order."""
    n_embd = file.n_embd
    if layer is None:
        norm, first, second = _PROJECTIONS[file.cutting.kind]
        merged, middle = file.once[1].n_cols, file.once[1].n_rows
        return (
            *((f"v.{name}", n_embd) for name in ("patch_embd.bias", "post_ln.weight", "post_ln.bias")),
            *((f"{norm}.{part}" if norm else None, merged) for part in ("weight", "bias")),
            (f"{first}.bias", middle),
            (f"{second}.bias" if second else None, file.n_out),
        )
    block = f"v.blk.{layer}."
    norms = ((f"{block}{name}.{part}", n_embd) for name in _LAYER_NORMS for part in ("weight", "bias"))
    matrices = file.layers[layer]
    return (*norms, *((w.tensor.name.removesuffix("weight") + "bias", w.n_rows) for w in matrices))


def _fits(file: SiglipFile) -> bool:
    """Return whether the file has the vectors that are needed, all of the right lengths, and no other ones."""
    slots = [slot for layer in (None, *range(file.n_layer)) for slot in vector_slots(file, layer)]
    lengths = {name: n for name, n in slots if name is not None}
    norm, _, _ = _PROJECTIONS[file.cutting.kind]
    needed = {"v.post_ln.weight"} | {f"v.blk.{i}.{name}.weight" for i in range(file.n_layer) for name in _LAYER_NORMS}
    if file.cutting.kind == "gemma3" or f"{norm}.bias" in file.vectors:
        needed.add(f"{norm}.weight")
    return needed <= file.vectors.keys() and all(
        lengths.get(name) == tensor.shape[0] for name, tensor in file.vectors.items()
    )


def positions(table: NDArray[np.float32], side: int, n_x: int, n_y: int) -> NDArray[np.float32]:
    """Return f32[n_y * n_x, n_embd]: a table of side x side positions, brought to another size.

    Each is the mean of those around it, weighted by a triangle that is as wide as a new place, at least one old one
    (as torch's bilinear interpolation with antialiasing).
    """
    if (n_x, n_y) == (side, side):
        return table
    grid = table.reshape(side, side, -1).astype(np.float64)
    resized = np.einsum("ys,xt,ste->yxe", _triangles(side, n_y), _triangles(side, n_x), grid, optimize=True)
    return np.ascontiguousarray(resized.reshape(n_x * n_y, -1), np.float32)


def _triangles(n_old: int, n_new: int) -> NDArray[np.float64]:
    """Return f64[n_new, n_old], the weights of old places in new ones; each row's sum is 1."""
    scale = n_new / n_old
    width = max(1.0, 1 / scale)
    middles, places = (np.arange(n_new) + 0.5) / scale, np.arange(n_old) + 0.5
    weights = np.maximum(1 - np.abs(places - middles[:, None]) / width, 0)
    return np.asarray(weights / weights.sum(1, keepdims=True))


def _three(gguf: GGUF, key: str) -> tuple[float, ...]:
    values = get_array(gguf, _VISION + key, frozenset({ValueType.FLOAT32, ValueType.FLOAT64}))
    if values is None or len(values) < 3:
        return ()
    numbers = tuple(float(number) for number in values.numpy()[:3])
    return numbers if all(map(math.isfinite, numbers)) else ()


def _heads(gguf: GGUF, n_embd: int) -> int | None:
    """Return the number of heads; None where attention is another one than ours."""
    n_head = get_int(gguf, f"{_VISION}attention.head_count", at_least=1, at_most=_MOST_WIDTH)
    n_head_kv = get_int(gguf, f"{_VISION}attention.head_count_kv", at_most=_MOST_WIDTH)
    if n_head is None or n_embd % n_head or n_embd // n_head > _MOST_HEAD or n_head_kv not in (None, n_head):
        return None
    return None if any(_VISION + key in gguf.metadata for key in _OTHER_ATTENTION) else n_head


def _table(gguf: GGUF, n_embd: int) -> TensorInfo | None:
    """Return the table of positions, where it is a square one of floats."""
    table = gguf.tensors.get("v.position_embd.weight")
    if table is None or table.type not in FLOATS or len(table.shape) != 2:
        return None
    return table if table.shape == (n_embd, math.isqrt(table.shape[1]) ** 2) else None


def _matrix(gguf: GGUF, name: str, n_rows: int | None, n_cols: int) -> Weight | None:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type not in (*FLOATS, GGMLType.Q8_0) or len(tensor.shape) < 2:
        return None
    shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
    if shape[0] != n_cols or n_rows not in (None, shape[1]) or not 1 <= shape[1] <= _MOST_WIDTH:
        return None
    return Weight(tensor, shape[1], n_cols)


def _once(gguf: GGUF, cutting: Cutting, n_embd: int, n_out: int) -> tuple[Weight, ...] | None:
    patch = _matrix(gguf, "v.patch_embd.weight", n_embd, 3 * cutting.patch_size**2)
    _, first, second = _PROJECTIONS[cutting.kind]
    if patch is None or patch.tensor.type not in FLOATS or patch.n_cols > _MOST_WIDTH:
        return None
    if cutting.kind == "gemma3":
        matrix = _matrix(gguf, f"{first}.weight", n_embd, n_out)
        is_read = matrix is not None and matrix.tensor.type in FLOATS
        return (patch, Weight(matrix.tensor, n_out, n_embd, transposed=True)) if matrix and is_read else None
    merged = n_embd * cutting.merge**2
    projection = _matrix(gguf, f"{first}.weight", None if second else n_out, merged)
    behind = _matrix(gguf, f"{second}.weight", n_out, projection.n_rows) if second and projection else None
    if projection is None or (second and behind is None):
        return None
    return (patch, projection) if behind is None else (patch, projection, behind)


def _layers(gguf: GGUF, kind: str, n_embd: int, n_ff: int, n_layer: int) -> tuple[tuple[Weight, ...], ...] | None:
    layers = list[tuple[Weight, ...]]()
    for i in range(n_layer):
        up, down = f"v.blk.{i}.ffn_up.weight", f"v.blk.{i}.ffn_down.weight"
        tensor = gguf.tensors.get(down)
        if kind != "lfm2" and tensor is not None and tensor.shape[0] == n_embd:  # files of old converters
            up, down = down, up
        names = [f"v.blk.{i}.{name}.weight" for name in _LAYER_MATRICES[:4]]
        read = [_matrix(gguf, name, n_embd, n_embd) for name in names]
        read += [_matrix(gguf, up, n_ff, n_embd), _matrix(gguf, down, n_embd, n_ff)]
        weights = tuple(weight for weight in read if weight is not None)
        if len(weights) < len(read) or len({weight.tensor.type is GGMLType.Q8_0 for weight in weights[:3]}) > 1:
            return None
        layers.append(weights)
    return tuple(layers)


def _vectors(gguf: GGUF, used: set[str]) -> dict[str, TensorInfo] | None:
    """Return all other tensors of the encoder; None where one is no vector, or has no place in our encoder."""
    vectors = dict[str, TensorInfo]()
    for name, tensor in gguf.tensors.items():
        if name in used or not name.startswith(("v.", "mm.")):
            continue
        if tensor.type not in FLOATS or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 20:
            return None
        vectors[name] = tensor
    return vectors
