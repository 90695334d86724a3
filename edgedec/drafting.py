"""The drafters of an engine, and their policy for one generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from edgedec.curve import CostCurve
from edgedec.draft import DraftContext, Drafter, DrafterFactory, DrafterNeeds, Floor
from edgedec.drafters.common_text import CommonText
from edgedec.drafters.model import ModelFactory
from edgedec.errors import MemoryCapError, PluginError
from edgedec.guarded import Guarded
from edgedec.model import Session
from edgedec.noise import Noise
from edgedec.policy import Policy
from edgedec.proposing import described
from edgedec.records import Member, Record
from edgedec.sequence import Sequence
from edgedec.verify import COUPLED


@dataclass(slots=True)
class Drafting:
    """What an engine drafts with.

    Attributes:
        factories: The drafters by name.
        n_max: Most nodes of a draft; 0 where no draft can be verified with the bits of single steps.
        always: Verify what is proposed whatever it costs, for a drafter that is pinned.
        budget_bytes: Most memory that the drafters may hold together, or None.
        store: What drafters keep between requests.
        records: What is known of the drafters' acceptance and cost.
        common: A small text to begin with.
    """

    factories: Mapping[str, DrafterFactory]
    n_max: int
    always: bool = False
    budget_bytes: int | None = None
    store: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    common: CommonText | None = None

    def forget(self) -> None:
        """Empty all that outlives a request."""
        self.store.clear()
        self.records.clear()
        for factory in self.factories.values():
            if isinstance(factory, ModelFactory):
                factory.forget()

    def close(self) -> None:
        """Free what the drafters have loaded."""
        for factory in self.factories.values():
            if isinstance(factory, ModelFactory):
                factory.close()


def open_policy(
    drafting: Drafting, session: Session, curve: CostCurve, sequence: Sequence, noise: Noise
) -> Policy | None:
    """Make the drafters of a generation; None, with the reason in its statistics, when none is left."""
    stats, sampling = sequence.stats, sequence.request.sampling
    if drafting.n_max < 1:
        stats.add_reason("drafting off: this model's rows are not bit-equal to single steps on this runtime")
        return None
    floor, members = Floor(), []
    context = DraftContext(
        session,
        session.model.tokenizer,
        sampling,
        noise,
        drafting.budget_bytes,
        drafting.store,
        floor,
        coupled=sequence.request.rule == COUPLED,
        common=drafting.common,
    )
    left = drafting.budget_bytes
    for name, factory in drafting.factories.items():
        drafter = None
        try:
            drafter = factory(context)
            _check_needs(drafter.needs, session)
            held = drafter.memory_bytes()
            if left is not None and held > left:
                raise MemoryCapError(f"it would hold {held} bytes where {left} are left; allow more memory")
            drafter.begin(sequence.token_ids)
        except Exception as error:  # a drafter never ends a generation
            stats.add_reason(f"{name} off: the drafter failed ({described(error)})")
            stats.count_failure(name, "failed")
            if isinstance(drafter, Guarded):
                drafter.close()
            continue
        left = None if left is None else left - held
        members.append(_member(name, drafter, factory, drafting))
    if not members:
        return None
    return Policy(
        members, session, curve, greedy=sampling.greedy, n_max=drafting.n_max, floor=floor, always=drafting.always
    )


def _check_needs(needs: DrafterNeeds, session: Session) -> None:
    """Raise PluginError or CapabilityError unless the target can give what a drafter asks for, at every step."""
    card, capabilities = session.model.card, session.model.capabilities
    for capability, needed in (("taps", needs.taps), ("layers", needs.layers)):
        if needed:
            capabilities.require(capability, card.runtime)
    if not all(isinstance(tap, Integral) and 0 <= tap < card.n_layer for tap in needs.taps):
        raise PluginError(f"it needs the hidden states of layers {needs.taps}; there are 0 to {card.n_layer - 1}")
    if not isinstance(needs.candidates, Integral) or needs.candidates < 0:
        raise PluginError(f"it needs {needs.candidates!r} candidates; ask for 0 or more")


def _member(name: str, drafter: Drafter, factory: DrafterFactory, drafting: Drafting) -> Member:
    record = drafting.records.setdefault(name, Record())
    return Member(name, drafter, record, costly=isinstance(factory, ModelFactory))
