"""The scheduler: before each step, what to verify, or nothing; by measured cost and measured acceptance.

It maximises expected tokens per second, E[accepted + 1] / (time of drafting + T(n)), over all drafters and over every n
of the cost curve. SmartSpec's goodput (Liu et al. 2024, arXiv:2406.14066) and the stop of SpecDec++ (Huang et al. 2024,
arXiv:2405.19715) are special cases. Drafters that cost next to nothing propose before every step and are scored in
shadow: their proposals are compared with the text that comes, verified or not. One that costs time for every node (a
draft model) is asked only where its record says that it pays, and tried at times within 1 % of the time. So is the
curve: where more rows would pay if they cost next to nothing, they are verified at times, within 0.5 %, and timed.

A draft that was drawn from q, for a rule that looks at q, is verified whole and alone. To choose among its nodes by
what was drawn would change the text's distribution: with p = q = (0.9, 0.1) and only the first token worth a node, the
text would get it in 0.99 of all cases. So whether to ask, and for how many nodes, is decided before anything is drawn.
Without q any choice is exact: a rule takes a token without q for one that was there before its random numbers, however
it got there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import Cost, CostCurve, best_length
from edgedec.draft import EMPTY_DRAFT, Closing, Draft, Drafter, DrafterNeeds, Floor, Verification
from edgedec.drafters.self_speculation.self_draft import SelfDrafter
from edgedec.model import Session
from edgedec.scheduler.draft_tree import DraftTree, best_part, best_shape
from edgedec.scheduler.drafter_record import SHOWN, ActiveDrafter, DecisionLog, DrafterRecord, depth_of
from edgedec.scheduler.plugin_guard import Guarded
from edgedec.scheduler.proposer import asked, described
from edgedec.scheduler.recorder import Recorder
from edgedec.stats import DecodeStats

_DEADLINE_S = 1.0  # for a pinned drafter
_LEAST_DEADLINE_S = 0.05  # and for another, or half a step
_MOST_NODES = 24  # that a cheap drafter is asked for
_LOOK_FIRST = 8  # steps before a draft model may read the text
_FIRST_LEVELS = 32  # forwards of a draft model that reading a text's beginning is taken to cost, before it was timed
_REST_OF_TEXT = 256
_REPAID = 1.5  # times
_GAIN = 1.03  # what a costly drafter must promise against the best without it
_EXPLORE = 0.01  # share of the time that trying a costly drafter may lose
_HOPED = 1 / 16  # of a step: what one more row costs where rows are cheap
_HOPED_GAIN = 1.2  # what rows must promise at that price to be tried
_TRY_ROWS = 0.005  # share of the time that trying them may lose
_TRY_EVERY = 3  # steps with something to try: before it is thought of
_TRY_UNKNOWN = 2.0  # steps that it may lose before, where so many rows were never timed
_PLAIN_AFTER = 60  # drafts in a row at least: before the curve forgets what one row costs
_TRIAL = 4  # steps of such a trial
_KEEPS_UP = 24  # tokens of text that a costly drafter reads as part of its next draft
_REST_AFTER = 24  # steps in which none of a cheap drafter's nodes was worth verifying
_REST_STEPS = 8
_FORGET = 0.97
_FORGET_TRIALS = 0.85  # trials are few and far between
_MOST_READ = 512  # tokens that a draft model reads at most to catch up: half its window


@dataclass(frozen=True, slots=True)
class _Trial:
    """Nodes that are verified to find out what so many rows take.

    Attributes:
        n_nodes: How many.
        rate: Tokens per second without them.
        others: Tokens that others gain by the same forward.
        lost_s: What it is expected to cost.
    """

    n_nodes: int
    rate: float
    others: float
    lost_s: float


class Policy:
    """Implements edgedec.scheduler.proposer.Proposer for one generation.

    Args:
        members: The drafters, begun.
        session: The target's.
        curve: Its cost.
        greedy: Whether tokens are drawn at temperature 0.
        n_max: Most nodes of a draft.
        floor: Where costly drafters look up what a node must promise.
        always: Verify what is proposed whatever it costs.
        coupled: Whether the verification rule is the coupled one, for which q is nothing.
        chains: Verify chains only, also where the runtime takes trees.
        recorder: Where given, every proposal is noted there and none verified.
    """

    def __init__(
        self,
        members: Sequence[ActiveDrafter],
        session: Session,
        curve: CostCurve,
        *,
        greedy: bool,
        n_max: int,
        floor: Floor,
        always: bool = False,
        coupled: bool = True,
        chains: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._members = list(members)
        self._session = session
        self._curve = curve
        self._greedy = greedy
        self._n_max = n_max
        self._floor = floor
        self._always = always
        self._coupled = coupled
        self._drawn: Draft | None = None  # the draft with its q, of the latest step in which somebody was asked
        self._trees = session.model.capabilities.trees and not chains
        self._recorder = recorder
        self._deadline_s = _DEADLINE_S
        self._n_drafted = 0  # steps in a row
        self._trial: _Trial | None = None  # of this step
        self._n_looks = 0  # for one
        self._verdict = DecisionLog()
        self._room = self._n_tokens = 0
        self._spent_s = 0.0
        self._needs_vary = any(isinstance(member.drafter, SelfDrafter) for member in self._members)
        self._refresh_needs()

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafters ask of the target together."""
        return self._needs

    def _refresh_needs(self) -> None:
        needs = [member.drafter.needs for member in self._members]
        self._needs = DrafterNeeds(
            tuple(sorted({tap for need in needs for tap in need.taps})),
            any(need.layers for need in needs),
            max((need.candidates for need in needs), default=0),
        )

    def propose(self, stats: DecodeStats, n_past: int, n_max: int) -> Draft:
        """Return the nodes that pay."""
        self._room = n_max
        self._trial, self._curve.latest_s = None, None
        n_max = min(n_max, self._n_max)
        if not self._members or n_max < 1:
            return EMPTY_DRAFT
        started = perf_counter()
        cost = self._curve.up_to(max(n_max, SHOWN) + 1, n_past).__getitem__
        self._deadline_s = _DEADLINE_S if self._always else max(_LEAST_DEADLINE_S, cost(0) / 2)
        tree = DraftTree()
        plain = self._drawn is not None and self._plain_is_due(self._n_tokens / max(self._spent_s, 1e-9) * cost(0))
        self._drawn = None
        for member in list(self._members):
            if not member.costly:
                self._ask_cheap(stats, member, tree, n_max)
        paths = tree.paths()
        nodes, rate = self._choose(tree, paths, cost, n_max, perf_counter() - started)
        for member in list(self._members):
            if member.costly and not plain and self._ask_costly(stats, member, tree, cost, n_max, rate):
                paths = tree.paths()
                nodes, rate = self._choose(tree, paths, cost, n_max, 0.0)
        if self._recorder is not None:
            self._recorder.end(tree, paths, perf_counter() - started)
            nodes = []
        elif self._drawn is not None:
            nodes = list(range(len(self._drawn)))
        else:
            plain = plain or self._plain_is_due(rate * cost(0))
            if not plain and len(paths) > len(nodes) and self._curve.seconds(1, n_past) is not None:
                nodes = self._more_to_time(tree, paths, cost, n_max, nodes, rate)
        self._verdict.take(paths, len(nodes), cost)
        if plain and self._drawn is None:
            nodes = []
        self._n_drafted = self._n_drafted + 1 if nodes else 0
        self._spent_s += cost(len(nodes)) + perf_counter() - started
        self._curve.trials.total_s += cost(len(nodes)) / (1 + self._curve.others)
        for member in self._members:
            member.record.total_s += cost(len(nodes))
        if not nodes:
            return EMPTY_DRAFT
        if self._drawn is not None:
            self._note_verified(lambda member: member.draft is self._drawn)
            return self._drawn
        if self._always and len(self._members) == 1 and (self._trees or self._members[0].draft.is_chain):
            self._members[0].verified = True
            return self._members[0].draft
        chosen = set(nodes)
        self._note_verified(lambda member: len(member.draft) > 0 and not chosen.isdisjoint(member.places))
        return tree.draft(nodes)

    def _note_verified(self, is_used: Callable[[ActiveDrafter], bool]) -> None:
        for member in self._members:
            if is_used(member):
                member.idle = 0
                member.verified = True

    def _more_to_time(
        self, tree: DraftTree, paths: list[float], cost: Cost, n_max: int, nodes: list[int], rate: float
    ) -> list[int]:
        """Return the nodes, or more of them, to find out what so many rows take.

        A curve that was measured at a bad moment, or only in part as the machine is slow, would never be put right:
        what seems too dear is not verified, and so not timed.
        """
        self._n_looks += 1
        if self._always or self._n_looks % _TRY_EVERY:
            return nodes
        hoped, hoped_rate = self._choose(tree, paths, lambda n: cost(0) * (1 + _HOPED * n), n_max, 0.0)
        if hoped_rate < _HOPED_GAIN * rate:
            return nodes
        trials, others = self._curve.trials, self._curve.others
        order = sorted(hoped, key=lambda node: (-paths[node], node))
        while len(order) > len(nodes):
            n = len(order)
            lost_s = max(0.0, cost(n) - (1 + others + sum(paths[node] for node in order)) / rate)
            left_s = _TRY_ROWS * trials.total_s - trials.lost_s
            if self._curve.is_unknown(n + 1):
                left_s += _TRY_UNKNOWN * cost(0)
            if lost_s <= left_s and trials.may_try(n + 1):
                trials.lost_s += lost_s
                self._trial = _Trial(n, rate, others, lost_s)
                return sorted(order)
            order = order[: n // 2]
        return nodes

    def _count_trial(self, trial: _Trial, n_nodes: int, n_tokens: int) -> None:
        """Note what a trial cost, where it was made: a grammar may have changed the draft, or a prompt come with it."""
        seconds = self._curve.latest_s
        trials = self._curve.trials
        if seconds is None or n_nodes != trial.n_nodes or self._curve.others != trial.others:
            trials.lost_s = max(0.0, trials.lost_s - trial.lost_s)
            return
        lost_s = seconds - (n_tokens + trial.others) / trial.rate
        trials.count(trial.n_nodes + 1, trial.lost_s, lost_s, (1 + trial.others) / trial.rate)

    def _plain_is_due(self, gain: float) -> bool:
        """Tell whether to find out again what a plain step takes: so seldom that it costs less than 1 % by the gain."""
        return not self._always and self._n_drafted >= max(_PLAIN_AFTER, (gain - 1) / _EXPLORE)

    def _ask_cheap(self, stats: DecodeStats, member: ActiveDrafter, tree: DraftTree, n_max: int) -> None:
        """Merge in what a drafter proposes; one whose nodes were of no use for long is asked now and then."""
        member.draft = EMPTY_DRAFT
        member.idle += 1
        rests = member.idle > _REST_AFTER and member.idle % _REST_STEPS
        if rests and not self._always and self._recorder is None:  # a recording has every position
            return
        self._merge(stats, member, tree, min(n_max, _MOST_NODES))

    def _merge(
        self, stats: DecodeStats, member: ActiveDrafter, tree: DraftTree, n_max: int, more_s: float = 0.0
    ) -> float:
        """Ask a drafter, add its nodes with corrected p to the tree; return the seconds it took.

        `more_s` is what it may take beyond the usual deadline: forwards of the target itself were reckoned with.
        """
        started = perf_counter()
        try:
            until = monotonic() + self._deadline_s + more_s
            draft = asked(member.drafter, self._session, n_max, until, any_shape=True)
        except Exception as error:
            self._drop(stats, member, error)
            return perf_counter() - started
        finally:
            self._count_late(stats, member)
        member.draft = draft
        if not self._coupled and self._keeps_q(draft):
            self._drawn = draft if self._drawn is None else self._drawn
        elif len(draft):
            corrected = member.record.calibration[self._greedy].corrected
            p = draft.p_accept.tolist()
            if not self._always:
                p = [corrected(said) for said in p]
            parents = draft.parents.tolist()
            member.places = tree.add(draft.tokens.tolist(), parents, p)
            if self._recorder is not None:
                self._recorder.drafted(member.places, parents)
        seconds = perf_counter() - started
        stats.count_proposal(member.name, len(draft), seconds)
        return seconds

    def _keeps_q(self, draft: Draft) -> bool:
        """Tell whether a draft has a drawn node, and a shape that can be verified as it is."""
        return draft.q is not None and any(law is not None for law in draft.q) and (self._trees or draft.is_chain)

    def _count_late(self, stats: DecodeStats, member: ActiveDrafter) -> None:
        if isinstance(member.drafter, Guarded) and member.drafter.n_late > member.late:
            member.late = member.drafter.n_late
            stats.count_failure(member.name, "late")
            stats.add_reason(f"{member.name}: drafts came after their deadline and were left out")

    def _choose(
        self, tree: DraftTree, paths: list[float], cost: Cost, n_max: int, spent_s: float
    ) -> tuple[list[int], float]:
        """Return the nodes to verify and the tokens per second expected with them."""
        candidates = range(len(paths)) if self._trees else tree.chain(paths)
        if self._always:
            best = sorted(candidates, key=lambda node: (-paths[node], node))
            return sorted(best[:n_max]), 0.0
        if self._trees:
            return best_shape(tree, paths, cost, n_max, spent_s, self._curve.keep_s, self._curve.others)
        return best_part(paths, candidates, cost, n_max, spent_s, self._curve.others)

    def _ask_costly(
        self, stats: DecodeStats, member: ActiveDrafter, tree: DraftTree, cost: Cost, n_max: int, rate: float
    ) -> bool:
        """Draft where the record says that it pays, or to find out; tell whether there is something new."""
        member.draft = EMPTY_DRAFT
        record = member.record
        in_place = member.drafter.needs.layers  # in the target's own session, which holds the text already
        if in_place:
            member.missed = 0
        level_s = record.level_s if record.level_s is not None else cost(0) / 4
        if member.missed is None and not self._always and not self._pays_to_read(member, level_s, cost, n_max):
            return False
        length, gain = best_length(record.rate(self._greedy), level_s, cost, n_max, rate)
        explores = gain < _GAIN and not self._always
        if explores:
            length = min(2, n_max)
            if not self._may_try(member, length * level_s + cost(length) - cost(0)):
                return False
        self._floor.path_probability = 0.0
        if not self._always:
            # One more level pays while it adds more per second than there is with those before it.
            slope = (cost(length) - cost(0)) / length
            p = record.rate(self._greedy)
            marginal = (level_s + slope) * rate * max(gain, 1.0)
            self._floor.path_probability = min(max(marginal, p ** (length - 0.1)), p ** (length - 1))
        asked_for = n_max if self._always else min(n_max, 2 * length)
        seconds = self._merge(stats, member, tree, asked_for, 2 * length * level_s if in_place else 0.0)
        n = len(member.draft)
        member.n_asked += 1
        member.asked_s += seconds
        if n:
            self._time(record, seconds, level_s, depth_of(member.draft.parents.tolist()), member.missed)
        member.missed, member.tries = 0, explores
        if explores:
            lost_s = seconds + cost(n) - cost(0)
            record.lost_s += lost_s
            record.trial_s += lost_s
        return n > 0

    def _pays_to_read(self, member: ActiveDrafter, level_s: float, cost: Cost, n_max: int) -> bool:
        """Tell whether the rest of the text is likely to repay what reading its beginning takes.

        How fast the cheap drafters go is seen in the first steps; a text is taken to become twice as long as it is.
        """
        if self._verdict.n_steps < _LOOK_FIRST:
            return False
        record = member.record
        mean = max(1 / cost(0), self._n_tokens / max(self._spent_s, 1e-9))
        _, gain = best_length(record.rate(self._greedy), level_s, cost, n_max, mean)
        member.hoped = gain
        first_s = record.first_s if record.first_s is not None else _FIRST_LEVELS * level_s
        rest = min(self._room, _REST_OF_TEXT, self._n_tokens)
        return gain >= _GAIN and rest / mean * (1 - 1 / gain) > _REPAID * first_s

    @staticmethod
    def _time(record: DrafterRecord, seconds: float, level_s: float, n_levels: int, n_missed: int | None) -> None:
        """Note what a draft took; where much text had to be read first, a level took less than its share."""
        mine = seconds / n_levels
        if n_missed is not None and n_missed <= _KEEPS_UP:
            record.level_s = 0.8 * level_s + 0.2 * mine
        else:
            record.level_s = min(level_s, mine)
            if n_missed is None:
                record.first_s = max(0.0, seconds - n_levels * record.level_s)
            else:
                record.read_s = max(0.0, seconds - n_levels * record.level_s) / n_missed

    def _may_try(self, member: ActiveDrafter, step_s: float) -> bool:
        """Tell whether a trial goes on, or another one is affordable: some steps in a row, as reading up takes time."""
        record = member.record
        if member.trials == 0:
            price = max(_TRIAL * step_s + record.read_s * (member.missed or 0), record.trial_s)
            if record.lost_s + price > _EXPLORE * record.total_s:
                return False
            member.trials, record.trial_s = _TRIAL, 0.0
        member.trials -= 1
        return True

    def learn(
        self,
        stats: DecodeStats,
        draft: Draft,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Score every proposal against the tokens that came, and tell the drafters."""
        if self._trial is not None:
            self._count_trial(self._trial, len(draft), len(verification.token_ids))
            self._trial = None
        self._n_tokens += len(verification.token_ids) if self._verdict.n_steps else 0
        for member in list(self._members):
            path = self._score(stats, member, verification.token_ids)
            if member.missed is not None:
                member.missed = min(_MOST_READ, member.missed + len(verification.token_ids))
            member.draft, member.verified = EMPTY_DRAFT, False  # a step may come for which nobody is asked
            told = Verification(path, verification.token_ids, verification.candidates)
            try:
                member.drafter.accept(told, hidden)
            except Exception as error:
                self._drop(stats, member, error)
        if self._needs_vary:  # which hidden states are asked for changes from step to step
            self._refresh_needs()

    def _score(self, stats: DecodeStats, member: ActiveDrafter, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Observe the nodes whose parents are on the text's path; return those that are on it themselves."""
        proposed = member.draft
        if not len(proposed):
            return ()
        observe = member.record.calibration[self._greedy].observe
        depths = {-1: 0}
        path: list[int] = []
        n_tried = deepest = 0
        tokens, parents, said = proposed.tokens.tolist(), proposed.parents.tolist(), proposed.p_accept.tolist()
        for node, (token, parent, p) in enumerate(zip(tokens, parents, said, strict=True)):
            depth = depths.get(parent)
            if depth is None or depth >= len(token_ids):
                continue
            right = token == token_ids[depth]
            observe(p, right)
            n_tried += 1
            deepest = max(deepest, depth + 1)
            if right and depth == len(path):  # of two siblings with one token the first
                depths[node] = depth + 1
                path.append(node)
        if member.costly:
            record, greedy = member.record, self._greedy
            kept = _FORGET_TRIALS if member.tries else _FORGET
            record.offered[greedy] = record.offered[greedy] * kept + deepest
            record.accepted[greedy] = record.accepted[greedy] * kept + len(path)
        stats.count_outcome(member.name, n_tried, len(path))
        member.n_used += member.verified and bool(path)
        return tuple(path[: len(token_ids) - 1])  # the step's last token was nobody's to accept

    def drafter(self, name: str) -> Drafter | None:
        """Return the drafter of that name that is at work, None where there is none."""
        return next((member.drafter for member in self._members if member.name == name), None)

    def leave(self, name: str) -> None:
        """Go on without a drafter, between two steps; without one of that name nothing changes."""
        for member in [member for member in self._members if member.name == name]:
            self._remove(member)

    def _drop(self, stats: DecodeStats, member: ActiveDrafter, error: Exception) -> None:
        """Go on without a drafter that failed: a drafter never changes the text, so it never ends it either."""
        self._remove(member)
        stats.count_failure(member.name, "failed")
        stats.add_reason(f"{member.name} off: the drafter failed ({described(error)})")

    def _remove(self, member: ActiveDrafter) -> None:
        self._members.remove(member)
        if isinstance(member.drafter, Closing):
            member.drafter.close()
        self._refresh_needs()

    def close(self) -> None:
        """End the threads of drafters that have one."""
        for member in self._members:
            if isinstance(member.drafter, Closing):
                member.drafter.close()

    def explain(self) -> list[str]:
        """Say how often drafting paid and, where it did not, why."""
        if not self._verdict.n_steps:
            return []
        return [self._verdict.text(), *(said for member in self._members if (said := member.said()))]

    def unused(self) -> list[str]:
        """Say of each draft model that was of no use in this generation what it takes to keep, and why."""
        if self._always or not self._verdict.n_steps:
            return []
        return [said for member in self._members if not member.n_used and (said := member.said())]
