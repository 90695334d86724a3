"""A model that leaves out the same half-layers in every forward: quicker, and LOSSY, as its text differs.

Everything above a runtime takes it for a model of its own. It has a fingerprint of its own, so no cache made with one
set of layers is used with another; drafting, prefix reuse and the cost curve see its forwards only. It declares no
capability by which a forward chooses layers, so the drafters `skip` and `exit` refuse it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgedec.errors import CapabilityError, SessionError, argument
from edgedec.model import ALL_LAYERS, Forward, ForwardItem, LayerSet, Model, Span
from edgedec.model_card import ModelCard
from edgedec.progress import OnProgress
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec_runtimes.layer_skip.layer_sets import Half, left_out


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
        card = inner.card
        inner.capabilities.require("layers", card.runtime)
        self.layers = layers
        out = tuple(left_out(layers))
        fingerprint = hashlib.sha256(f"{card.fingerprint} {variant(out)}".encode()).hexdigest()
        found = replace(card, fingerprint=fingerprint, left_out=out, share=share, variant=variant(out))
        super().__init__(
            inner,
            replace(found, lossy=lossy_note(found)),
            replace(inner.capabilities, layers=False, groups=False, hidden_input=False, vector_rows=False),
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
        group = item.groups[0]
        if len(item.groups) > 1 or group.vectors is not None or group.span != ALL_LAYERS:
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
