"""The drafters of an engine, and their policy for one generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any

from edgedec.cost_curve import CostCurve
from edgedec.draft import Closing, DraftContext, Drafter, DrafterFactory, DrafterNeeds, Floor
from edgedec.drafters.draft_model.model import ModelFactory
from edgedec.drafters.draft_model.overlapped import OverlappedDrafter
from edgedec.drafters.self_speculation.self_draft import SelfDrafter
from edgedec.drafters.self_speculation.skip import SkipDrafter
from edgedec.drafters.suffix.corpus_text import CommonText
from edgedec.drafters.suffix.store_file import DraftStore
from edgedec.errors import MemoryCapError, PluginError
from edgedec.layer_skip.layer_sets import TunedSet
from edgedec.model import LoadOptions, Session
from edgedec.noise import Noise
from edgedec.scheduler.drafter_factories import SKIP, SKIP_GAIN, promised_gain
from edgedec.scheduler.drafter_record import ActiveDrafter, DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.scheduler.proposer import described
from edgedec.scheduler.recorder import Recorder
from edgedec.sequence import COUPLED, Sequence
from edgedec.stats import DecodeStats


@dataclass(slots=True)
class Drafting:
    """What an engine drafts with.

    Attributes:
        factories: The drafters by name.
        n_max: Most nodes of a draft; 0 where no draft can be verified with the bits of single steps.
        always: Verify what is proposed whatever it costs, for a drafter that is pinned.
        budget_bytes: Most memory that the drafters may hold together, or None.
        store_bytes: Most that each of them keeps between requests, or None.
        store: What drafters keep between requests.
        records: What is known of the drafters' acceptance and cost.
        common: A small text to begin with.
        file: Where the suffix drafter's part of `store` outlives the process, or None.
        notes: What the next generation's statistics will tell, once.
        policy: The generation's that is running, or None.
        off: Drafters that are asked no more, as their memory was needed, with what to tell of them.
        tuned: The set of layers that was tuned for this model, or None.
        strict: Verify only what has the bits of single steps: no trees where the runtime's are not exact.
        told: What every generation's statistics tell: what it drafts without, and why.
    """

    factories: Mapping[str, DrafterFactory]
    n_max: int
    always: bool = False
    budget_bytes: int | None = None
    store_bytes: int | None = None
    store: dict[str, Any] = field(default_factory=dict)
    records: dict[str, DrafterRecord] = field(default_factory=dict)
    common: CommonText | None = None
    file: DraftStore | None = None
    notes: list[str] = field(default_factory=list)
    policy: Policy | None = None
    off: dict[str, str] = field(default_factory=dict)
    tuned: TunedSet | None = None
    strict: bool = True
    told: tuple[str, ...] = ()

    @property
    def share_bytes(self) -> int | None:
        """Most memory that a drafter may hold, of which its store is at most half."""
        shares = [n for n in (self.budget_bytes, self.store_bytes and 2 * self.store_bytes) if n is not None]
        return min(shares, default=None)

    def switch_off(self, name: str, reason: str) -> None:
        """Go on without a drafter, in the generation that is running and those that come, until forget()."""
        self.off[name] = reason
        if self.policy is not None:
            self.policy.leave(name)

    def forget(self) -> None:
        """Empty all that outlives a request; drafters that were switched off are back, but for closed draft models."""
        self.off = {name: why for name, why in self.off.items() if isinstance(self.factories[name], ModelFactory)}
        self.store.clear()
        self.records.clear()
        if self.file is not None:
            self.file.forget()
        for factory in self.factories.values():
            if isinstance(factory, ModelFactory):
                factory.forget()

    def use_file(self, file: DraftStore, options: LoadOptions) -> None:
        """Take what a file holds, and save to it from now on (raises what DraftStore.fill raises)."""
        note = file.fill(self.store, self.share_bytes, options)
        self.file = file
        if note is not None:
            self.notes.append(note)

    def save(self) -> None:
        """Write the file, where there is one and something new (StorageError, ModelFormatError: it can't be)."""
        if self.file is not None:
            self.file.save(self.store)

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
    while drafting.notes:
        stats.add_reason(drafting.notes.pop(0))
    for note in drafting.told:
        stats.add_reason(note)
    if drafting.n_max < 1:
        stats.add_reason("drafting off: this model's rows are not bit-equal to single steps on this runtime")
        return None
    floor, members = Floor(), []
    share = sequence.request.record
    recorder = None if share is None else Recorder(sequence.proposals, share)
    context = DraftContext(
        session,
        session.model.tokenizer,
        sampling,
        noise,
        drafting.share_bytes,
        drafting.store,
        floor,
        coupled=sequence.request.rule == COUPLED,
        common=drafting.common,
        recorder=recorder,
    )
    left = drafting.budget_bytes
    for name, factory in _with_tuned_layers(drafting, session, curve, stats).items():
        if name in drafting.off:
            stats.add_reason(drafting.off[name])
            continue
        drafter = None
        try:
            drafter = factory(context)
            _check_needs(drafter.needs, session)
            held = drafter.memory_bytes()
            if left is not None and held > left:
                raise MemoryCapError(f"it would hold {held} bytes where {left} are left; allow more memory")
            drafter.begin(sequence.token_ids)
            if isinstance(drafter, OverlappedDrafter):
                drafter.report = partial(stats.note_ahead, name)
        except Exception as error:  # a drafter never ends a generation
            stats.add_reason(f"{name} off: the drafter failed ({described(error)})")
            stats.count_failure(name, "failed")
            if isinstance(drafter, Closing):
                drafter.close()
            continue
        left = None if left is None else left - held
        members.append(_member(name, drafter, factory, drafting, curve, greedy=sampling.greedy))
    if not members:
        return None
    drafting.policy = Policy(
        members,
        session,
        curve,
        greedy=sampling.greedy,
        n_max=drafting.n_max,
        floor=floor,
        always=drafting.always,
        coupled=context.coupled,
        chains=drafting.strict and not session.model.capabilities.exact_trees,
        recorder=recorder,
    )
    return drafting.policy


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


def _with_tuned_layers(
    drafting: Drafting, session: Session, curve: CostCurve, stats: DecodeStats
) -> dict[str, DrafterFactory]:
    """Return the factories, `skip` with the set tuned for this model; `auto` takes it where that promises to pay."""
    factories = dict(drafting.factories)
    pinned = factories.get(SKIP) is SkipDrafter
    if not session.model.capabilities.layers or (drafting.always and not pinned):
        return factories
    tuned = drafting.tuned
    if tuned is not None and (pinned or promised_gain(tuned, curve, drafting.n_max) >= SKIP_GAIN):
        factories[SKIP] = partial(SkipDrafter, tuned=tuned)
    elif pinned and tuned is None:
        stats.add_reason("skip leaves out every fourth layer; edgedec tune-skip finds a better set for this model")
    return factories


def _member(
    name: str, drafter: Drafter, factory: DrafterFactory, drafting: Drafting, curve: CostCurve, *, greedy: bool
) -> ActiveDrafter:
    is_new = name not in drafting.records
    record = drafting.records.setdefault(name, DrafterRecord())
    if not isinstance(drafter, SelfDrafter):
        model = factory.summary if isinstance(factory, ModelFactory) else None
        return ActiveDrafter(name, drafter, record, costly=model is not None, model=model)
    drafter.learn_costs(curve, record.calibration[greedy].corrected)
    whole_s = curve.seconds(1)
    if is_new:
        record.accepted = [drafter.expected * offered for offered in record.offered]
    if record.level_s is None and whole_s is not None:
        record.level_s = whole_s * curve.part(drafter.share)
    return ActiveDrafter(name, drafter, record, costly=True)
