"""Which layers to leave out for a requested speed-up (a layer skip), and which requests are refused.

LOSSY: LossyModel leaves the layers out.

Unified Layer Skipping (Liu et al. 2024, arXiv:2404.06954): the speed-up alone decides how many layers run. They are
evenly spaced and the same for every token, so that a KV cache has no holes. Where the paper counts layers, bytes of
weights are counted here, those of the head included, as the time of a token follows the bytes that it reads.

MEASURED has the measured loss of quality when layers are left out, by the shape of a model.

The rows of a model end at the highest recommended speed-up: the last one at which the perplexity was at most twice that
of the whole model. The rows come from

    edgedec eval MODEL --runtime cpu --layer-skip 1.05 --layer-skip 1.1 ...

on the default text, with evenly spaced layers (no tuned set on the disk). docs/findings.md has what they bring.

Everything above a runtime takes a LossyModel for a model of its own. It has a fingerprint of its own, so no cache made
with one set of layers is used with another; drafting, prefix reuse and the cost curve see its forwards only. It
declares no capability by which a forward chooses layers, so the drafters `skip` and `exit` refuse it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from edgedec.errors import CapabilityError, RequestError, SessionError, argument
from edgedec.gguf.file import read_header_of
from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.gguf.model_info import describe
from edgedec.model import ALL_LAYERS, Forward, ForwardItem, LayerSet, Model, Span
from edgedec.model_card import ModelCard
from edgedec.progress import OnProgress
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec_runtimes.layer_skip.layer_sets import Half, TunedSet, evenly_spaced, left_out, tuned_set

Shape = tuple[str, int, int]
"""Architecture, layers, and values of a hidden state."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A speed-up and the quality that it costs.

    Attributes:
        speedup: As it was requested: at most 1 / speedup of a token's bytes are read.
        kl_mean: Mean KL divergence from the whole model, in nats.
        top1: Share of positions where the most probable token is the whole model's.
    """

    speedup: float
    kl_mean: float
    top1: float


MEASURED: Mapping[Shape, tuple[Measured, ...]] = {
    ("llama", 30, 576): (  # smollm2-135m
        Measured(1.02, 0.175, 0.766),
        Measured(1.05, 0.626, 0.591),
    ),
    ("qwen2", 24, 896): (  # qwen2.5-coder-0.5b
        Measured(1.02, 0.099, 0.815),
        Measured(1.05, 0.338, 0.681),
        Measured(1.1, 0.734, 0.561),
    ),
}


_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ChosenSet:
    """A set of half-layers for a requested speed-up.

    Attributes:
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
    share = 1 / speedup + _ROUNDING
    widest = int(sizes.halves.sum(axis=1).max()) / sizes.total
    if tuned is not None and speedup > 1 and share - widest <= tuned.share <= share:
        return ChosenSet(tuned.layers, tuned.share)
    least = 1.0
    for n_out in range(max(1, sizes.n_layer - 1)):
        layers = evenly_spaced(sizes.n_layer, n_out)
        least = sizes.share(layers)
        if least <= share:
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


class LossyModel(OuterModel):
    """Implements edgedec.model.Model over another one, whose forwards all leave out the same half-layers.

    It is as batch-invariant as the whole model: what holds for the rows of each half-layer holds for those of any set.
    Its memory is the whole model's, as the layers that are left out stay loaded.

    Args:
        inner: The whole model, which is closed with this one.
        layers: The half-layers that run.
        share: The share of a whole token's bytes that a token through them reads.

    Raises:
        CapabilityError: The runtime can't leave out layers.
    """

    def __init__(self, inner: Model, layers: LayerSet, share: float) -> None:
        card, off = inner.card, ("layers", "groups", "hidden_input", "keeps_prompts")
        inner.capabilities.require("layers", card.runtime)
        self.layers = layers
        out = tuple(left_out(layers))
        fingerprint = hashlib.sha256(f"{card.fingerprint} {variant(out)}".encode()).hexdigest()
        variant_card = replace(card, fingerprint=fingerprint, left_out=out, share=share, variant=variant(out))
        super().__init__(
            inner,
            replace(variant_card, lossy=lossy_note(variant_card)),
            replace(inner.capabilities, **dict.fromkeys(off, False)),
        )

    def session(self, n_ctx: int) -> "LossySession":
        """Open an empty session of that many tokens (raises what Model.session raises)."""
        return LossySession(self.inner.session(n_ctx), self)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions of this model together (raises what Session.forward raises)."""
        return self.inner.forward([self.inner_item(item) for item in items])

    def inner_item(self, item: ForwardItem) -> ForwardItem:
        """Return the item for the whole model's session, through this set of layers.

        Raises:
            SessionError: The session is another model's.
            CapabilityError: The item names layers of its own, or begins between two.
        """
        session: Any = item.session
        if session.model is not self:
            raise SessionError(
                "a forward was given a session of another model; it takes sessions that this model opened"
            )
        group = item.group
        if len(item.groups) > 1 or group.span != ALL_LAYERS:
            raise CapabilityError(
                "every forward of this model leaves out the same layers, so it takes no other set of layers and no "
                f"hidden states; load the model without {argument('layer_skip')}"
            )
        return replace(item, session=session.inner, groups=(replace(group, span=Span(layers=self.layers)),))


class LossySession(OuterSession):
    """Implements edgedec.model.Session: the runtime's session, with the model's set of layers in every forward."""

    model: LossyModel

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item through the model's set of layers; see edgedec.model.Session."""
        return self.inner.evaluate(self.model.inner_item(item), on_progress)


def variant(out: Sequence[Half]) -> str:
    """Return a name of a set by the half-layers that it leaves out; empty for the whole model.

    >>> variant([(3, 0), (3, 1), (5, 1)])
    'without 3.0 3.1 5.1'
    """
    return f"without {' '.join(f'{layer}.{half}' for layer, half in out)}" if out else ""


def lossy_note(card: ModelCard) -> str:
    """Return a note for a person on what a model leaves out; empty for a whole model."""
    if not card.left_out:
        return ""
    return (
        f"LOSSY: {_named(card.left_out)} left out, a token reads {100 * card.share:.0f} % of the bytes; "
        "the text is not the whole model's"
    )


def _named(out: Sequence[Half]) -> str:
    """Return the names of half-layers for a person, two of one layer as the layer.

    >>> _named([(3, 0), (3, 1), (5, 1)])
    'layers 3, feed-forward of 5'
    """
    attn, mlp = ({layer for layer, half in out if half == kind} for kind in (0, 1))
    groups = {"layers": attn & mlp, "attention of": attn - mlp, "feed-forward of": mlp - attn}
    return ", ".join(f"{name} {' '.join(map(str, sorted(group)))}" for name, group in groups.items() if group)
