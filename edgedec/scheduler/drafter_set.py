"""The drafters of an engine, and the policy of one generation that is made of them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.draft import Drawing
from edgedec.draft_constants import GAIN
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds, ModelFactory, Store
from edgedec.drafter_traits import Declaring, DrafterTraits, Following, FollowingFactory, shedding_of
from edgedec.errors import MemoryCapError, PluginError
from edgedec.model import Session
from edgedec.sampling import Noise
from edgedec.scheduler.active_drafters import ActiveDrafter, close_drafter, note_failure
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_factories import PromisedGain, drafter_factory
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.sequence import COUPLED, Request, TextState

if TYPE_CHECKING:
    from edgedec.drafters.suffix.store_file import DraftStore


@dataclass(slots=True)
class Drafting:
    """What an engine drafts with.

    Attributes:
        factories: The drafters by name.
        n_max: Most nodes of a draft; 0 where no draft can be verified with the bits of single steps.
        always: Whether to verify what is proposed, whatever it costs: the drafters are pinned.
        budget_bytes: Most memory that the drafters may hold together, or None.
        store: What drafters keep between requests, and most memory that each of them may hold, its store included.
        records: What is known of the acceptance and the cost of each drafter.
        file: Where the suffix drafter's part of `store` outlives the process, or None.
        notes: Sentences for the statistics of the next generation only.
        policies: The policies of the texts that are being written.
        off: Drafters that are no longer asked, as their memory was needed, each with a sentence that says so.
        promised: Further drafters, which were prepared for this model, each with the gain that it promises. They draft
            for the texts where that is enough.
        strict: Whether to verify only what has the bits of single steps: no trees where the runtime's are not exact.
        reasons: Sentences for the statistics of every generation: what it drafts without, and why.
        tree: The shape of drafts that the user named, or None for the rule's.
    """

    factories: Mapping[str, DrafterFactory]
    n_max: int
    always: bool = False
    budget_bytes: int | None = None
    store: Store = field(default_factory=Store)
    records: dict[str, DrafterRecord] = field(default_factory=dict)
    file: "DraftStore | None" = None
    notes: list[str] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    promised: Mapping[str, PromisedGain] = field(default_factory=dict)
    strict: bool = True
    reasons: tuple[str, ...] = ()
    tree: str | None = None

    def switch_off(self, name: str, reason: str) -> None:
        """Stop asking a drafter, in the texts that are being written and in later ones, until forget()."""
        self.off[name] = reason
        for policy in [*self.policies]:
            policy.drafters.leave(name)

    def end(self, policy: Policy) -> None:
        """Let the drafters of a text go, which is written."""
        policy.close()
        if policy in self.policies:
            self.policies.remove(policy)

    def forget(self) -> None:
        """Drop all that outlives a request; drafters that were switched off return, except models that were freed."""
        sheds = {name: shedding_of(self.factories[name]) for name in self.off}
        self.off = {name: why for name, why in self.off.items() if (shed := sheds[name]) is None or not shed.returns}
        self.store.clear()
        self.records.clear()
        if self.file is not None:
            self.file.forget()
        for model in self._models:
            model.forget()

    def save(self) -> None:
        """Write the file, where there is one and it is out of date (StorageError, ModelFormatError: that fails)."""
        if self.file is not None:
            self.file.save(self.store)

    def close(self) -> None:
        """Free the models that the drafters have loaded."""
        for model in self._models:
            model.close()

    @property
    def _models(self) -> list[ModelFactory]:
        return [factory for factory in self.factories.values() if isinstance(factory, ModelFactory)]


def open_policy(
    drafting: Drafting,
    session: Session,
    curve: CostCurve,
    sequence: TextState,
    noise: Noise,
    constraint: Constraint | None = None,
) -> Policy | None:
    """Open the drafters of a generation and return their policy; None, with the reason in the statistics, without any.

    A drafter that fails to open, or would hold too much memory, is left out, and the statistics say so.
    """
    stats, request, capabilities = sequence.stats, sequence.request, session.model.capabilities
    for note in (*drafting.notes, *drafting.reasons):
        stats.add_reason(note)
    drafting.notes.clear()
    if drafting.n_max < 1:
        exact = "drafting off: no rows are known to be bit-equal to single steps on this runtime"
        stuck = "drafting off: this model's state can't go back on this runtime"
        stats.add_reason(exact if capabilities.rollback else stuck)
        return None
    trees = capabilities.trees and (capabilities.exact_trees or not drafting.strict)
    drawing = _drawing(request, drafting.tree, trees=trees)
    context = DraftContext(
        session,
        request.sampling,
        noise,
        drafting.store,
        drawing=drawing,
        recorder=request.record,
        constraint=constraint,
        predicted=request.predicted_ids,
        curve=curve,
        note=stats.add_reason,
    )
    drafters = _open_all(drafting, context, sequence)
    if not drafters:
        return None
    for note in () if drawing is None else drawing.notes({_traits(active.drafter).draws for active in drafters}):
        stats.add_reason(note)
    options = PolicyOptions(drafting.n_max, always=drafting.always, coupled=request.rule == COUPLED, trees=trees)
    policy = Policy(drafters, session.model.card.n_vocab, curve, options, context.floor, request.record)
    drafting.policies.append(policy)
    return policy


def _drawing(request: Request, tree: str | None, *, trees: bool) -> Drawing | None:
    """Return how drafts are made, where a guest's rule or a shape of trees says that."""
    if request.rule == COUPLED and tree is None:
        return None
    from edgedec.verification.rules import find_rule

    return find_rule(request.rule).drawing(request.rule, tree, request.sampling, trees=trees)


def _open_all(drafting: Drafting, context: DraftContext, sequence: TextState) -> list[ActiveDrafter]:
    """Return the drafters of a generation that open and fit the memory; the statistics name the others, and why."""
    opened, left, stats = list[ActiveDrafter](), drafting.budget_bytes, sequence.stats
    greedy, begun = context.sampling.greedy, _as_tokens(sequence, context.target)
    for name, factory in _with_prepared(drafting, context.curve).items():
        if name in drafting.off:
            stats.add_reason(drafting.off[name])
            continue
        record, drafter = drafting.records.setdefault(name, DrafterRecord()), None
        drafter_context = replace(
            context,
            correction=record.calibration[greedy],
            note_ahead=partial(stats.note_ahead, name),
        )
        try:
            drafter = factory(drafter_context)
            _check_needs(drafter.needs, context.target)
            held = drafter.memory_bytes()
            if left is not None and held > left:
                raise MemoryCapError(f"it would hold {held} bytes, the plan has {left}; allow more, or declare it")
            drafter.begin(begun)
        except Exception as error:  # a drafter never ends a generation
            note_failure(stats, name, error)
            close_drafter(drafter)
            continue
        left, traits = None if left is None else left - held, _traits(drafter)
        record.expect(traits)
        following = drafter if traits.follows and isinstance(drafter, Following) else None
        active = ActiveDrafter(name, drafter, record, traits.cost, greedy, model=traits.about, following=following)
        if not drafting.always and context.recorder is None:
            active.idle_if_dear(len(sequence.token_ids) - sequence.n_cached, sequence.request.sampling.max_tokens)
        opened.append(active)
    return opened


def _as_tokens(sequence: TextState, session: Session) -> list[int]:
    """Return a text's ids with an end token in place of each row of a picture: no text has that, so none matches it."""
    if not sequence.request.pictures:
        return sequence.token_ids
    tokenizer = session.model.tokenizer
    end = next((token_id for token_id in range(tokenizer.n_vocab) if tokenizer.is_end(token_id)), 0)
    return [token_id if token_id >= 0 else end for token_id in sequence.token_ids]


def begin_prompt(drafting: Drafting, session: Session, *, greedy: bool) -> None:
    """Let drafters that follow texts follow the prompt that several texts have in common, or leave it alone."""
    for name, factory in drafting.factories.items():
        if isinstance(factory, FollowingFactory) and name not in drafting.off:
            record = drafting.records.get(name)
            rests = record is not None and not drafting.always and record.goes_without(greedy)
            factory.begin_prompt(session, follows=not rests)


def _check_needs(needs: DrafterNeeds, session: Session) -> None:
    """Raise PluginError or CapabilityError unless the target can give what a drafter needs at every step."""
    card, capabilities = session.model.card, session.model.capabilities
    for capability, needed in (("taps", needs.taps), ("layers", needs.layers)):
        if needed:
            capabilities.require(capability, card.runtime)
    if not all(isinstance(tap, Integral) and 0 <= tap < card.n_layer for tap in needs.taps):
        raise PluginError(f"it needs the hidden states of layers {needs.taps}; there are 0 to {card.n_layer - 1}")
    if not isinstance(needs.candidates, Integral) or needs.candidates < 0:
        raise PluginError(f"it needs {needs.candidates!r} candidates; ask for 0 or more")


def _with_prepared(drafting: Drafting, curve: CostCurve) -> dict[str, DrafterFactory]:
    """Return the factories, and those of the drafters that were prepared for the model and promise to pay by now."""
    factories = dict(drafting.factories)
    for name, gain in drafting.promised.items():
        with suppress(Exception):  # a drafter never ends a generation
            if gain(curve, drafting.n_max) >= GAIN:
                factories[name] = drafter_factory(name)
    return factories


def _traits(drafter: Drafter) -> DrafterTraits:
    return drafter.traits if isinstance(drafter, Declaring) else DrafterTraits()
