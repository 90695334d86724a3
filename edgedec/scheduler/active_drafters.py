"""The drafters at work in one generation: they are asked, told what came of it, and dropped when they fail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Closing, Draft, Drafter, DrafterNeeds, Verification
from edgedec.drafters.self_speculation.self_draft import SelfDrafter
from edgedec.scheduler.draft_tree import DraftTree
from edgedec.scheduler.drafter_calls import ask, describe_error
from edgedec.scheduler.drafter_record import ActiveDrafter
from edgedec.scheduler.plugin_guard import Guarded
from edgedec.scheduler.recorder import Recorder
from edgedec.stats import DecodeStats


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How a generation drafts.

    Attributes:
        n_max: Most nodes of a draft.
        greedy: Whether tokens are drawn at temperature 0.
        always: Whether to verify what is proposed, whatever it costs.
        coupled: Whether the verification rule is the coupled one, which ignores q.
        trees: Whether trees may be verified; otherwise chains only.
    """

    n_max: int
    greedy: bool = True
    always: bool = False
    coupled: bool = True
    trees: bool = True


class ActiveDrafters:
    """The drafters of one generation.

    Args:
        drafters: The drafters; their begin() was called.
        n_vocab: Size of the target's vocabulary.
        options: How to draft.
        recorder: Where given, every proposal is recorded there.

    Attributes:
        all: The drafters that have not failed and were not switched off.
        needs: What all of them together need of the target.
        needs_vary: Whether this may change with every step.
        patience_s: Seconds that each of them has for its next draft.
        drawn: The first draft of the step that was drawn from q, for a rule that looks at q; None where there is none.
    """

    def __init__(
        self, drafters: Sequence[ActiveDrafter], n_vocab: int, options: PolicyOptions, recorder: Recorder | None
    ) -> None:
        self._n_vocab = n_vocab
        self._options = options
        self._recorder = recorder
        self.needs_vary = any(isinstance(active.drafter, SelfDrafter) for active in drafters)
        self.patience_s = 0.0
        self.drawn: Draft | None = None
        self._use(drafters)

    def _use(self, drafters: Sequence[ActiveDrafter]) -> None:
        self.all = tuple(drafters)
        needs = [active.drafter.needs for active in drafters]
        self.needs = DrafterNeeds(
            tuple(sorted({tap for need in needs for tap in need.taps})),
            any(need.layers for need in needs),
            max((need.candidates for need in needs), default=0),
        )

    def ask(
        self, stats: DecodeStats, active: ActiveDrafter, tree: DraftTree, n_max: int, extra_s: float = 0.0
    ) -> float:
        """Add a drafter's nodes, with corrected p, to the tree; return the seconds that this took.

        `extra_s` is what the drafter may take beyond the usual deadline.
        """
        started = perf_counter()
        try:
            draft = ask(active.drafter, self._n_vocab, n_max, monotonic() + self.patience_s + extra_s)
        except Exception as error:
            self._drop(stats, active, error)
            return perf_counter() - started
        finally:
            if isinstance(active.drafter, Guarded) and active.drafter.n_late > active.late:
                active.late = active.drafter.n_late
                stats.count_failure(active.name, "late")
                stats.add_reason(f"{active.name}: drafts came after their deadline and were left out")
        active.draft = draft
        n = len(draft.tokens)
        if n and not self._options.coupled and self._keeps_q(draft):
            self.drawn = draft if self.drawn is None else self.drawn
        elif n:
            p, parents = draft.p_accept.tolist(), draft.parents.tolist()
            if not self._options.always:
                calibration = active.record.calibration[self._options.greedy]
                p = [calibration.corrected(estimate) for estimate in p]
            active.places = tree.add(draft.tokens.tolist(), parents, p)
            if self._recorder is not None:
                self._recorder.drafted(active.places, parents)
        seconds = perf_counter() - started
        stats.count_proposal(active.name, n, seconds)
        return seconds

    def _keeps_q(self, draft: Draft) -> bool:
        """Tell whether a draft has a drawn node, and a shape that can be verified as it is."""
        has_q = draft.q is not None and any(law is not None for law in draft.q)
        return has_q and (self._options.trees or draft.is_chain)

    def accept(
        self,
        stats: DecodeStats,
        active: ActiveDrafter,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Tell a drafter what came of a step."""
        active.draft, active.verified = EMPTY_DRAFT, False  # a step may come in which no drafter is asked
        try:
            active.drafter.accept(verification, hidden)
        except Exception as error:
            self._drop(stats, active, error)

    def renew_needs(self) -> None:
        """Ask the drafters anew what they need of the target."""
        self._use(self.all)

    def get(self, name: str) -> Drafter | None:
        """Return the drafter of that name that is at work, None where there is none."""
        return next((active.drafter for active in self.all if active.name == name), None)

    def leave(self, name: str) -> None:
        """Go on without the drafter of that name, between two steps; without such a drafter nothing changes."""
        for active in self.all:
            if active.name == name:
                self._remove(active)

    def _drop(self, stats: DecodeStats, active: ActiveDrafter, error: Exception) -> None:
        """Go on without a drafter that failed: a drafter never changes the text, so it never ends the text either."""
        self._remove(active)
        stats.count_failure(active.name, "failed")
        stats.add_reason(f"{active.name} off: the drafter failed ({describe_error(error)})")

    def _remove(self, removed: ActiveDrafter) -> None:
        if isinstance(removed.drafter, Closing):
            removed.drafter.close()
        self._use([active for active in self.all if active is not removed])

    def close(self) -> None:
        """End the threads of drafters that have one."""
        for active in self.all:
            if isinstance(active.drafter, Closing):
                active.drafter.close()
