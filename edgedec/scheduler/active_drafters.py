"""The drafters at work in one generation: they are asked for drafts, and dropped when they fail."""

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, perf_counter

from edgedec.draft import Closing, Draft, Drafter, DrafterNeeds, DrafterRestsError
from edgedec.errors import PluginError
from edgedec.scheduler.draft_tree import DraftTree
from edgedec.scheduler.drafter_record import ActiveDrafter
from edgedec.scheduler.node_choice import PolicyOptions
from edgedec.scheduler.recorder import Recorder
from edgedec.stats import DecodeStats


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
        patience_s: Seconds that each of them has for its next draft.
        drawn: The first draft of the step that was drawn from q, for a rule that looks at q; None where there is none.
    """

    def __init__(
        self, drafters: Sequence[ActiveDrafter], n_vocab: int, options: PolicyOptions, recorder: Recorder | None
    ) -> None:
        self._n_vocab = n_vocab
        self._options = options
        self._recorder = recorder
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
            any(need.varies for need in needs),
        )

    def ask(
        self, stats: DecodeStats, active: ActiveDrafter, tree: DraftTree, n_max: int, extra_s: float = 0.0
    ) -> float:
        """Add a drafter's nodes, with corrected p, to the tree; return the seconds that this took.

        `extra_s` is what the drafter may take beyond the usual deadline.
        """
        started = perf_counter()
        try:
            active.catch_up()
            draft = active.drafter.propose(n_max, monotonic() + self.patience_s + extra_s)
            if not isinstance(draft, Draft):
                raise PluginError(f"propose() returned a {type(draft).__name__}; it must return an edgedec Draft")
            if len(draft.tokens) > n_max:
                draft = draft.truncated(n_max)
            draft.check(self._n_vocab)
        except Exception as error:  # a drafter never ends the text
            self.drop(stats, active, error)
            return perf_counter() - started
        active.draft = draft
        n = len(draft.tokens)
        if n and not self._options.coupled and self._keeps_q(draft):
            self.drawn = draft if self.drawn is None else self.drawn
            active.n_before, active.places = 0, list(range(n))
        elif n:
            p = draft.p_accept if self._options.always else active.corrected_p(self._options.greedy)
            active.n_before = len(tree.tokens)
            active.places = tree.add(draft.tokens, draft.parents, p)
            if self._recorder is not None:
                self._recorder.drafted(active.places, draft.depths())
        seconds = perf_counter() - started
        stats.count_proposal(active.name, n, seconds)
        return seconds

    def _keeps_q(self, draft: Draft) -> bool:
        """Tell whether a draft has a drawn node, and a shape that can be verified as it is."""
        has_q = draft.q is not None and any(law is not None for law in draft.q)
        return has_q and (self._options.trees or draft.is_chain)

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

    def drop(self, stats: DecodeStats, active: ActiveDrafter, error: Exception) -> None:
        """Go on without a drafter that failed."""
        self._remove(active)
        note_failure(stats, active.name, error)

    def _remove(self, removed: ActiveDrafter) -> None:
        close_drafter(removed.drafter)
        self._use([active for active in self.all if active is not removed])

    def close(self) -> None:
        """Let the drafters learn the rest of the text, and end the threads of those that have one."""
        for active in self.all:
            with suppress(Exception):  # a drafter never ends the text
                active.catch_up()
                active.count_following(self._options.greedy)
            close_drafter(active.drafter)


def note_failure(stats: DecodeStats, name: str, error: Exception) -> None:
    """Note that a generation goes on without a drafter that failed: a drafter never ends the text."""
    if isinstance(error, DrafterRestsError):
        stats.add_reason(f"{name} off: {error}")
        return
    try:
        message = str(error)
    except Exception:  # its own __str__ fails
        message = "its message can't be shown"
    stats.add_reason(f"{name} off: the drafter failed ({type(error).__name__}: {message})")
    stats.count_failure(name, "failed")


def note_late(stats: DecodeStats, name: str) -> None:
    """Note that a draft did not come by its deadline."""
    stats.count_failure(name, "late")
    stats.add_reason(f"{name}: drafts came after their deadline and were left out")


def close_drafter(drafter: Drafter | None) -> None:
    """Let go of what a drafter holds until the generation ends: a thread, or a session of another model."""
    if isinstance(drafter, Closing):
        drafter.close()
