"""The scheduler: before each step it decides what to verify, or nothing, by measured cost and measured acceptance.

It maximises expected tokens per second, E[accepted + 1] / (time of drafting + T(n)), over all drafters and over every n
of the cost curve. SmartSpec's goodput (Liu et al. 2024, arXiv:2406.14066) and the stop of SpecDec++ (Huang et al. 2024,
arXiv:2405.19715) are special cases. The mathematics are in `estimator`, the score is in `draft_tree`, trials of unusual
row counts are in `row_trials`.

Drafters that cost next to nothing propose before every step and are scored in shadow: their proposals are compared with
the text that comes, verified or not.

A draft that was drawn from q, for a rule that looks at q, is verified whole and alone. Choosing among its nodes by what
was drawn would change the distribution of the text: with p = q = (0.9, 0.1) and only the first token worth a node, the
text would get that token in 0.99 of all cases. So whether to ask, and for how many nodes, is decided before anything is
drawn. A draft without q was looked up, not drawn, so its nodes may be chosen freely: no random number of the rule has
been used for it.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import Budget, Cost, CostCurve
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.draft_constants import (
    AT_ONCE,
    BUCKET,
    CAUTION,
    DEADLINE_S,
    LOSS_SHARE,
    NEWEST,
    NEXT_TO_NOTHING,
    NOTICED,
)
from edgedec.drafter import Floor, ProposalLog
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter, ActiveDrafters
from edgedec.scheduler.decision_log import DecisionLog, summary
from edgedec.scheduler.draft_tree import Choice, DraftTree, Gain, PolicyOptions
from edgedec.scheduler.drafter_record import score
from edgedec.scheduler.estimator import note_draft, plan_draft
from edgedec.scheduler.row_trials import RowTrials
from edgedec.stats import DecodeStats


class Policy:
    """The scheduler of one generation.

    Args:
        drafters: The drafters; their begin() was called.
        n_vocab: Size of the target's vocabulary.
        curve: The cost curve of the target's session.
        options: How to draft.
        floor: Where costly drafters read what path probability a node must have.
        recorder: Where given, every proposal is recorded there and none is verified.

    Attributes:
        drafters: The drafters that are still at work.
        skips: Whether the latest step was one of many in which no drafter can be due; such a step is not looked at.
        rests: Whether the next step is one of these.
    """

    def __init__(
        self,
        drafters: Sequence[ActiveDrafter],
        n_vocab: int,
        curve: CostCurve,
        options: PolicyOptions,
        floor: Floor,
        recorder: ProposalLog | None = None,
    ) -> None:
        self._curve = curve
        self._options = options
        self._floor = floor
        self._recorder = recorder
        self._asks_all = options.always or recorder is not None  # a recording has every position
        self._trials = RowTrials(curve, options)
        self._log = DecisionLog()
        self._loss = Budget()  # of this text's drafts, beyond plain steps; of as many plain steps as it has tokens
        self._forward_s = self._plain_s = 0.0  # what the latest step's forward, and a plain one, were expected to take
        self._promised_s = 0.0  # seconds that the latest draft promised to save
        self._n_nodes = 0  # of the latest draft; the step may have left it out since
        self._n_skips = self._n_skipped = 0  # steps to pass before a drafter may be due; of these, the steps made
        self._own_s = 0.0  # this text's part of the steps that the drafters' records have not counted yet
        self._is_rest = self.skips = self.rests = False
        self.drafters = ActiveDrafters(drafters, n_vocab, options, recorder)

    def propose(self, stats: DecodeStats, n_past: int, room: int) -> Draft:
        """Return the nodes that are worth verifying after `n_past` cached tokens and the last one; often none.

        `room` is the most nodes that the session and the text have room for; below 1, nobody is asked. A drafter that
        fails is dropped.
        """
        if self.rests:
            return self.rest()
        known_s, self._trials.trial, self._curve.latest_s = self._curve.latest_s, None, None
        self.skips, n_max = False, min(room, self._options.n_max)
        if not self.drafters.all or n_max < 1:
            self._ask_nobody()
            return EMPTY_DRAFT
        if self._begin_rest(known_s or self._plain_s):
            return EMPTY_DRAFT
        begun, drafters = perf_counter(), self.drafters
        choice = Choice(self._curve, self._options, self._curve.cost(n_past), n_max, room)
        plain_s = self._plain_s = choice.cost(0)
        plain = not self._asks_all and self._curve.is_new(n_past)
        plain = plain or (drafters.drawn is not None and self._trials.plain_is_due(self._log.tokens_per_s * plain_s))
        drafters.drawn = None
        drafters.patience_s = DEADLINE_S if self._options.always else max(NOTICED * DEADLINE_S, plain_s / 2)
        self._ask_cheap(stats, choice, begun)
        asked = perf_counter()
        if not plain:
            for active in drafters.all:
                if active.costly:
                    self._ask_costly(stats, active, choice)
        costly_s = perf_counter() - asked
        if self._recorder is not None:
            self._recorder.end(choice.tree.tokens, choice.tree.parents, choice.paths, perf_counter() - begun)
            choice.nodes = []
        elif drafters.drawn is not None:
            choice.nodes = list(range(len(drafters.drawn)))
        else:
            plain = plain or self._trials.plain_is_due(choice.rate * plain_s)
            if not plain and len(choice.paths) > len(choice.nodes) and self._curve.seconds(1, n_past) is not None:
                choice.nodes = self._trials.more_nodes(choice)
        self._price_choice(perf_counter() - begun - costly_s)
        self._log.count(choice.paths, len(choice.nodes), choice.cost)
        if plain and drafters.drawn is None:
            choice.nodes = []
        self._n_nodes = len(choice.nodes)
        forward_s = self._forward_s = choice.cost(self._n_nodes)
        self._promised_s = max(0.0, choice.rate * plain_s - 1) * forward_s
        self._log.spent_s += perf_counter() - begun
        self._count_step(len(choice.nodes), forward_s)
        return self._draft(choice.tree, choice.nodes) if choice.nodes else EMPTY_DRAFT

    def _ask_cheap(self, stats: DecodeStats, choice: Choice, begun: float) -> None:
        """Ask the drafters that are due and cost next to nothing, and choose; the step's drafting began at `begun`."""
        n_texts = self._curve.n_texts
        for active in self.drafters.all:
            active.draft = EMPTY_DRAFT
            if not active.costly:
                active.worth.price_s = active.worth.price_s or NEXT_TO_NOTHING * self._plain_s
                active.asked = self._asks_all or active.is_due(self._plain_s / n_texts, n_texts)
                if active.asked:
                    active.ask_s = self.drafters.ask(stats, active, choice.tree, min(choice.n_max, AT_ONCE))
        spent_s = perf_counter() - begun
        choice.rate = (1 + self._curve.others) / (self._plain_s + spent_s)
        if choice.tree.tokens:  # most steps of a text that does not repeat itself have no proposal
            choice.choose(self._with_caution(choice.cost), spent_s)

    def _price_choice(self, seconds: float) -> None:
        """Add what a step took beside its drafters to the price of those that looked tokens up.

        Their drafts were merged and chosen among in that time; `seconds` includes the seconds that they were asked.
        """
        asked = [active for active in self.drafters.all if active.asked and not active.costly]
        beside_s = seconds - sum([active.ask_s for active in asked])
        for active in asked:
            active.ask_s += beside_s / len(asked)

    def rest(self) -> Draft:
        """Count a step before which no drafter can be due, and return no draft."""
        self._n_skipped += 1
        self.rests = self._n_skipped < self._n_skips
        self._log.count_rest()
        self._is_rest = self.skips = True
        return EMPTY_DRAFT

    def _begin_rest(self, step_s: float) -> bool:
        """Tell whether no drafter is due, where a plain step takes `step_s` seconds (0: not known), and count that.

        On a small model, or with many texts, it would take longer to look more closely than drafts could save.
        """
        if self._n_skipped:
            self._count_step(0, self._n_skipped * step_s)
        n_waits = self._steps_to_wait(self.drafters.all, step_s) if step_s and not self._asks_all else 0
        self._n_skips, self._n_skipped, self._is_rest = max(0, min(AT_ONCE, n_waits - 1)), 0, n_waits > 0
        self.rests = self._n_skips > 0
        if not self._is_rest:
            return False
        self._ask_nobody()
        self._forward_s = self._plain_s = step_s
        self._log.count_rest()
        self._count_step(0, step_s)
        return True

    def _ask_nobody(self) -> None:
        """Note that no drafter proposes anything for the next step, so that none is judged by an earlier draft."""
        for active in self.drafters.all:
            active.draft, active.asked = EMPTY_DRAFT, False
        self.drafters.drawn = None
        self._promised_s, self._n_nodes = 0.0, 0

    def _steps_to_wait(self, drafters: Sequence[ActiveDrafter], step_s: float) -> int:
        """Return how many steps of `step_s` seconds pass before one of some drafters may be asked; 0 for none."""
        n_texts, least_s = self._curve.n_texts, (AT_ONCE + 1.0) * step_s
        for active in drafters:
            least_s = min(least_s, active.wait_s(step_s / n_texts, n_texts))
            if not least_s:
                break
        return ceil(least_s / step_s)

    @property
    def will_call(self) -> bool:
        """Whether a model is likely to be called for the next draft: a head that is due, or what was called last."""
        if self.rests:
            return False
        step_s = self._curve.latest_s or self._plain_s
        models = [active for active in self.drafters.all if active.cost in (DraftCost.CALLS, DraftCost.MODEL)]
        heads = [active for active in models if active.in_place]
        is_due = self._options.always or not step_s or not self._steps_to_wait(heads, step_s)
        return (bool(heads) and is_due) or any(active.asked for active in models)

    def _count_step(self, n_nodes: int, forward_s: float) -> None:
        """Count a step that was decided, whose forward is expected to take `forward_s` seconds."""
        self._log.spent_s += forward_s
        self._trials.count_step(n_nodes, forward_s)
        self._own_s += forward_s / self._curve.n_texts

    def pays_to_measure(self, seconds: float) -> bool:
        """Tell whether to measure, which takes `seconds`, if the rows of the latest draft are exact.

        To measure takes tens of forwards and pays later. So it waits until the drafts of all requests that could not
        be verified for want of it have promised to save as much time.
        """
        if self._options.always:
            return True
        trials = self._curve.trials
        trials.promised_s += self._promised_s
        if trials.promised_s < seconds:
            return False
        trials.promised_s = 0.0
        return True

    def _with_caution(self, cost: Cost) -> Cost:
        """Return the cost by which nodes are chosen: more than they take where the text can't bear their loss.

        A text can bear what its drafts have gained, and a little beyond: so few drafts that fail never make it slow.
        """
        plain_s = cost(0)
        left_s = self._loss.left_s(LOSS_SHARE, CAUTION * plain_s)

        def seconds(n_nodes: int) -> float:
            step_s = cost(n_nodes)
            return step_s if step_s - plain_s <= left_s else CAUTION * step_s

        return seconds

    def _ask_costly(self, stats: DecodeStats, active: ActiveDrafter, choice: Choice) -> None:
        """Ask a costly drafter where that pays, and choose anew."""
        begun = perf_counter()
        plan = plan_draft(active, self._log, choice)
        active.asked = plan is not None
        if plan is None:
            return
        before = choice.expected
        self._floor.path_probability = plan.least_path
        asked_s = self.drafters.ask(stats, active, choice.tree, plan.n_max, plan.extra_s)
        seconds = active.share_s(asked_s, self._curve)
        drawn = active.draft is self.drafters.drawn
        if active.draft.tokens:
            if not drawn and active.model is not None:
                choice.tree.drop_improbable(active.draft, active.chances)
            choice.choose(choice.cost)
        expected = choice.expected
        if drawn:  # it is verified whole, and alone
            tree = DraftTree()
            tree.add(active.draft.tokens, active.draft.parents, active.chances)
            expected = choice.expected_of(tree.paths(), len(active.draft))  # the tree is merged
        mean_rate = (1 + self._curve.others) * max(1 / choice.cost(0), self._log.tokens_per_s)  # of all requests alike
        beside_s = active.taught_s + perf_counter() - begun - asked_s
        gain = Gain(before, expected, mean_rate, beside_s)
        note_draft(active, plan, seconds, gain, choice, among_others=before.n_nodes > 0)

    def _draft(self, tree: DraftTree, nodes: list[int]) -> Draft:
        """Return the nodes to verify as a draft and note whose they are; a whole draft is returned as it was made."""
        used, drawn = self.drafters.all, self.drafters.drawn
        if drawn is not None:
            used, draft = tuple(active for active in used if active.draft is drawn), drawn
        elif self._options.always and len(used) == 1 and (self._options.trees or used[0].draft.is_chain):
            draft = used[0].draft
        else:  # also where another request's thread has just shed the last drafter
            chosen = set(nodes)
            used = tuple([active for active in used if active.draft.tokens and not chosen.isdisjoint(active.places)])
            draft = tree.draft(nodes)
        for active in used:
            active.verified = True
            active.n_own = sum([place >= active.n_before for place in active.places if place in nodes])
        return draft

    def learn(
        self,
        stats: DecodeStats,
        draft: Draft,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Score every proposal against the tokens that came, and pass these on to the drafters.

        `draft` is what the step verified, `hidden` the hidden states that the drafters need, of the rows kept.
        """
        token_ids, latest_s, alone = verification.token_ids, self._curve.latest_s, not self._curve.others
        plain_s = len(token_ids) * self._plain_s
        self._loss.total_s += plain_s
        if self._log.n_steps:
            self._log.n_tokens += len(token_ids)
        if self.skips:
            for active in self.drafters.all:
                active.unlearned.extend(token_ids)
            return
        is_trial = self._trials.learn(len(draft.tokens), len(token_ids))
        forward_s = (latest_s if alone else None) or self._forward_s
        node_s = 0.0  # that each node made the forward longer; a trial is made to time rows, whoever proposed them
        if draft.tokens and not is_trial:
            node_s = (forward_s - self._plain_s) / len(draft.tokens)
        elif self._n_nodes and not draft.tokens:  # the step had to leave the draft out: it counts as it was expected
            node_s = (self._forward_s - self._plain_s) / self._n_nodes
        if draft.tokens and latest_s is not None and alone:
            self._loss.lost_s += latest_s - plain_s
        if self._log.n_steps and latest_s is not None and not alone:
            # The others' drafts take time that is not in what the forward was expected to take.
            self._log.spent_s += latest_s - self._forward_s
        as_decided = not is_trial and len(draft.tokens) == self._n_nodes  # no grammar or lack of room changed it
        n_tokens = len(token_ids) + self._curve.others if as_decided else None
        for active in self.drafters.all:
            active.settle(n_tokens, forward_s, self._plain_s / self._curve.n_texts)
        # Counted behind the forward, so that all texts of that forward are asked by the same figures.
        own_s, self._own_s = self._own_s, 0.0
        needs = self.drafters.needs
        for active in self.drafters.all:
            active.record.trials.total_s += own_s
            if not (active.asked or needs.of_each_step) and (self._is_rest or not active.costly):
                active.unlearned.extend(token_ids)
            else:
                self._teach(stats, active, verification, hidden, node_s)
        if needs.varies:
            self.drafters.renew_needs()

    def _teach(
        self,
        stats: DecodeStats,
        active: ActiveDrafter,
        verification: Verification,
        hidden: Mapping[int, NDArray[np.float32]],
        node_s: float,
    ) -> None:
        """Score a drafter's proposal, whose nodes took `node_s` seconds each, and let the drafter learn the outcome."""
        started, token_ids = perf_counter(), verification.token_ids
        path = self._score(stats, active, token_ids) if active.draft.tokens else ()
        n_gained = sum([active.places[node] >= active.n_before for node in path]) if active.verified else 0
        if active.missed is not None:
            active.missed = min(BUCKET, active.missed + len(token_ids))
        same = path == verification.path
        lesson = verification if same else Verification(path, token_ids, verification.candidates)
        active.draft, active.verified = EMPTY_DRAFT, False  # a step may come in which no drafter is asked
        try:
            if active.unlearned:
                active.catch_up()
            active.drafter.learn(lesson, hidden)
        except Exception as error:  # a drafter never ends the text
            self.drafters.drop(stats, active, error)
        taught_s = perf_counter() - started
        if active.costly:
            active.taught_s += NEWEST * (taught_s - active.taught_s)
        else:
            token_s = max(self._plain_s / self._curve.n_texts, 1e-9)
            active.worth.price_s = active.worth.price_s or NEXT_TO_NOTHING * self._plain_s
            active.judge(n_gained - active.n_own * node_s / token_s, active.ask_s + taught_s, token_s)
            active.n_own = 0

    def _score(self, stats: DecodeStats, active: ActiveDrafter, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Score a drafter's proposal and return the nodes that were right, except for the step's last token."""
        path, n_tried, depth = score(active.draft, token_ids, active.record.calibration[active.greedy])
        if active.costly:
            active.record.observe(len(path), depth, greedy=active.greedy, is_trial=active.tries)
        stats.count_outcome(active.name, n_tried, len(path))
        active.n_used += active.verified and bool(path)
        return tuple(path[: len(token_ids) - 1])  # the step's last token is the target's own

    def close(self) -> None:
        """Let the drafters go, as the text is written."""
        self.drafters.close(self._log.n_tokens)

    def explain(self) -> list[str]:
        """Return a sentence on how often drafting paid and, where it did not, why; one more for each draft model."""
        if not self._log.n_steps:
            return []
        return [self._log.text(), *(text for active in self.drafters.all if (text := summary(active)))]

    def unused(self) -> list[str]:
        """Return, for each draft model that was of no use in this generation, the memory it takes and why."""
        if self._options.always or not self._log.n_steps:
            return []
        return [text for active in self.drafters.all if not active.n_used and (text := summary(active))]
