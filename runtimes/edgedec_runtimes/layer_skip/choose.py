"""Which layers to leave out for a requested speed-up (a layer skip), and which requests are refused.

LOSSY: edgedec_runtimes.layer_skip.skipping_model leaves the layers out.

Unified Layer Skipping (Liu et al. 2024, arXiv:2404.06954): the speed-up alone decides how many layers run. They are
evenly spaced and the same for every token, so that a KV cache has no holes. Where the paper counts layers, bytes of
weights are counted here, those of the head included, as the time of a token follows the bytes that it reads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from edgedec.errors import RequestError, argument
from edgedec.gguf.file import read_header_of
from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.gguf.model_info import describe
from edgedec.model import LayerSet, Model
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, evenly_spaced, left_out, tuned_set
from edgedec_runtimes.layer_skip.quality_table import MEASURED, Measured, Shape
from edgedec_runtimes.layer_skip.skipping_model import LossyModel

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ChosenSet:
    """A set of half-layers for a requested speed-up.

    Attributes:
        layers: The set.
        share: The share of a whole token's bytes that a token through the set reads; at most 1 / speed-up.
    """

    layers: LayerSet
    share: float


def require_speedup(speedup: float) -> None:
    """Raise RequestError unless this is a speed-up: a finite number from 1 on."""
    if not 1 <= speedup < inf:
        raise RequestError(f"a layer skip of {speedup:g} is no speed-up; give a number from 1 on, such as 1.1")


def choose_layers(sizes: LayerBytes, speedup: float, tuned: TunedSet | None = None) -> ChosenSet:
    """Return the evenly spaced set of as many layers as read at most 1 / `speedup` of a token's bytes.

    A tuned set is returned instead where it reads at most as many bytes, and at most a layer's bytes fewer.

    >>> import numpy as np
    >>> sizes = LayerBytes(np.full((10, 2), 8), 40)
    >>> found = choose_layers(sizes, 1.25)
    >>> found.share, sorted({layer for layer, _ in left_out(found.layers)})
    (0.76, [2, 4, 7])

    Raises:
        RequestError: The speed-up is below 1, or higher than what the first and the last layer alone would give.
    """
    require_speedup(speedup)
    wanted = 1 / speedup + _ROUNDING
    widest = int(sizes.halves.sum(axis=1).max()) / sizes.total
    if tuned is not None and speedup > 1 and wanted - widest <= tuned.share <= wanted:
        return ChosenSet(tuned.layers, tuned.share)
    least = 1.0
    for n_out in range(max(1, sizes.n_layer - 1)):
        layers = evenly_spaced(sizes.n_layer, n_out)
        least = sizes.share(layers)
        if least <= wanted:
            return ChosenSet(layers, least)
    raise RequestError(
        f"a layer skip of {speedup:g} is out of reach: with the first and the last layer alone a token reads "
        f"{100 * least:.0f} % of the bytes, a speed-up of {1 / least:.2f}; give at most that"
    )


def layer_skip(
    path: Path, speedup: float, *, force: bool, drafters: Iterable[str]
) -> Callable[[Model, Path | None], Model]:
    """Return what leaves out layers of a loaded model, given the cache folder; raises as require_layer_skip does."""
    sizes = require_layer_skip(path, speedup, force=force, drafters=drafters)
    return lambda model, cache_dir: leave_out(model, sizes, speedup, cache_dir)


def require_layer_skip(path: Path, speedup: float, *, force: bool, drafters: Iterable[str] = ()) -> LayerBytes:
    """Return a model file's bytes by layer, read from the header only; raise where the speed-up is refused.

    Args:
        path: The model file.
        speedup: The requested speed-up.
        force: Whether to allow a speed-up whose quality was never measured, or that is not recommended.
        drafters: The names of the drafters, among those that are to draft, that run a part of the layers themselves.

    Raises:
        RequestError: As choose_layers; or a drafter runs a part of the layers itself; or, unless `force`, the quality
            at this speed-up was never measured, or the speed-up is higher than recommended.
        EdgedecError: As read_gguf.
    """
    for name in drafters:
        raise RequestError(
            f"the drafter {name!r} runs a part of the layers, but with a layer skip every forward runs the same "
            "ones; use one of the two"
        )
    sizes = layer_bytes(path)
    if left_out(choose_layers(sizes, speedup).layers) and not force:
        info = describe(read_header_of(path))
        require_measured((info.architecture, sizes.n_layer, info.n_embd), speedup)
    return sizes


def require_measured(shape: Shape, speedup: float, table: Mapping[Shape, tuple[Measured, ...]] = MEASURED) -> None:
    """Raise RequestError unless a speed-up lies within what was measured for models of this shape."""
    rows = table.get(shape)
    if not rows:
        architecture, n_layer, n_embd = shape
        raise RequestError(
            f"the quality that a layer skip costs was never measured for a {architecture} of {n_layer} layers and "
            f"{n_embd} values a row; measure it (edgedec eval MODEL --layer-skip {speedup:g}), then force it "
            f"({argument('layer_skip_force')})"
        )
    edge = rows[-1]
    if speedup > edge.speedup:
        raise RequestError(
            f"a layer skip of {speedup:g} is beyond {edge.speedup:g}, the most that is recommended for this model; "
            f"at {edge.speedup:g}, {100 * edge.top1:.0f} % of the tokens are the whole model's most probable ones, "
            f"with a KL divergence of {edge.kl_mean:.2g}. Give at most that, or force it "
            f"({argument('layer_skip_force')})"
        )


def leave_out(model: Model, sizes: LayerBytes, speedup: float, cache_dir: Path | None) -> Model:
    """Return a model that leaves out layers in every forward; the model itself where no layer is left out.

    Args:
        model: The whole model.
        sizes: Its bytes by layer.
        speedup: The requested speed-up.
        cache_dir: Where a set that was tuned for this (edgedec tune-skip --lossy) is looked up; None for nowhere.

    Raises:
        CapabilityError: The runtime can't leave out layers.
        RequestError: As choose_layers.
    """
    chosen = choose_layers(sizes, speedup, tuned_set(cache_dir, model.card, lossy=True))
    if not left_out(chosen.layers):
        return model
    return LossyModel(model, chosen.layers, chosen.share)
