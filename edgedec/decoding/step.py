"""One step of decoding: propose a draft, evaluate it, accept what the model agrees with, learn from the outcome.

A plain step is the same code with an empty draft.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint, DrawPlace
from edgedec.cost_curve import CostCurve
from edgedec.decoding.ending import Added, TextEnd
from edgedec.draft import EMPTY_DRAFT, Candidates, Draft, Verification
from edgedec.errors import ContextFullError, MemoryCapError, RuntimeLostError
from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.progress import OnProgress, report_progress
from edgedec.sampling import Distribution, Noise, distribution, draw, log_probs
from edgedec.scheduler.policy import Policy
from edgedec.sequence import COUPLED, TextState
from edgedec.sessions.cost_probe import measuring_s
from edgedec.verification.coupled import verify_coupled

if TYPE_CHECKING:
    from edgedec.scheduler.jump_forward import ForcedDrafts

_INEXACT = (
    "drafting off in a context of this length: on the {runtime} runtime the rows of one forward are not bit-equal to "
    "single steps here"
)


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """The model's log-probabilities at one generated position: of the token, and of the most probable ones."""

    logprob: float
    top: Mapping[int, float]


@dataclass(slots=True)
class Decoder:
    """What a text is decoded with.

    Attributes:
        session: The target's session; it holds the first n_cached tokens of the text.
        noise: The random numbers of this generation.
        curve: Takes the measured time of every forward, or None.
        policy: Decides what to verify; None for plain decoding.
        ending: Decides where the text ends; by default it never ends.
        on_progress: Called during the prefill.
        constraint: The grammar that the text keeps to, or None.
        forced: Puts the tokens that the grammar forces into drafts, or None.
        forward_rows: Most rows of a forward that verifies, where memory is planned; None for all that the model can.
        strict: Whether to look if the rows of a forward have the bits of single steps, and to verify only these.
        takes_best: Whether each token is the model's most probable one, whatever came before.
        logprobs: One entry for each token of the latest step, where the request asks for them.
        added: What the latest step added to the text.
    """

    session: Session
    noise: Noise
    curve: CostCurve | None
    policy: Policy | None = None
    ending: TextEnd = field(default_factory=TextEnd)
    on_progress: OnProgress | None = None
    constraint: Constraint | None = None
    forced: "ForcedDrafts | None" = None
    forward_rows: int | None = None
    strict: bool = True
    takes_best: bool = False
    logprobs: list[ChosenLogprobs] = field(default_factory=list)
    added: Added = field(default_factory=Added)


@dataclass(slots=True)
class Prepared:
    """What the next forward of a text evaluates.

    Attributes:
        decoder: What it is decoded with.
        pending: The tokens that the KV cache does not hold yet.
        draft: The draft behind them; empty in a plain step.
        draft_s: Seconds that proposing took.
    """

    text: TextState
    decoder: Decoder
    pending: list[int]
    draft: Draft
    draft_s: float

    def item(self) -> ForwardItem:
        """Return the rows: the last pending token's logits are wanted; with a draft, those of all rows.

        A draft comes only where one token is pending, which is then row 0; node i is row i + 1.
        """
        draft, policy = self.draft, self.decoder.policy
        tokens = np.array([*self.pending, *draft.tokens], np.int32)
        return ForwardItem(
            self.decoder.session,
            self.text.n_cached,
            (RowGroup(tokens, sees=None if not draft.tokens or draft.is_chain else _rows_above(draft)),),
            rows="all" if draft.tokens else "last",
            taps=policy.drafters.needs.taps if policy is not None else (),
        )


def step(text: TextState, decoder: Decoder) -> Verification:
    """Extend a text by at least one token and return what was accepted.

    The tokens that the KV cache does not hold yet are evaluated together: the rest of the prompt in the first step, the
    latest token in every later one. Only a single token can have a draft behind it.

    Raises:
        What Session.evaluate raises. The text has no new token then; n_cached counts what was evaluated.
    """
    prepared = [prepare(text, decoder)]
    begun = perf_counter()
    (its,), (forward,) = evaluated(prepared, alone)
    return take(its, forward, perf_counter() - begun)


def prepare(text: TextState, decoder: Decoder) -> Prepared:
    """Propose a draft for the next step of a text."""
    pending = text.token_ids[text.n_cached :]
    begun = perf_counter()
    n_generated = len(text.token_ids) - len(text.request.prompt_ids)
    draft = _propose(text, decoder, n_generated) if len(pending) == 1 else EMPTY_DRAFT
    return Prepared(text, decoder, pending, draft, perf_counter() - begun)


def evaluated(
    steps: list[Prepared], forward: Callable[[list[Prepared]], list[Forward]]
) -> tuple[list[Prepared], list[Forward]]:
    """Return steps with the results of their common forward; without drafts where there is no room for those."""
    try:
        return steps, forward(steps)
    except (ContextFullError, MemoryCapError):
        if not any(its.draft.tokens for its in steps):
            raise
    steps = [replace(its, draft=EMPTY_DRAFT) for its in steps]
    return steps, forward(steps)


def alone(steps: list[Prepared]) -> list[Forward]:
    """Evaluate the step of a single text, whose n_cached counts what was evaluated where that fails."""
    (its,) = steps
    on_progress = None if its.draft.tokens else its.decoder.on_progress
    return [evaluate(its.text, its.item(), its.text.n_cached + len(its.pending) - 1, on_progress)]


def evaluate(text: TextState, item: ForwardItem, n_most: int, on_progress: OnProgress | None) -> Forward:
    """Evaluate an item of a text by itself; where that fails, n_cached of the text counts what was evaluated.

    Args:
        item: Its rows.
        n_most: Most tokens of the text that count as cached after a failure; drafted rows never do.
        on_progress: Called with the tokens of the prompt that are read: at the beginning, in between, and at the end.

    Raises:
        What Session.evaluate raises.
    """
    session = item.session
    n_held = session.n_cached
    n_prompt, n_reported = len(text.request.prompt_ids), -1
    reads = on_progress is not None and item.n_past < n_prompt
    end = item.n_past + item.n_rows if reads else 0  # which is reported alone

    def report(n: int) -> None:
        nonlocal n_reported
        if n_reported < (n := min(n_prompt, n)):
            report_progress(on_progress, "prefill", n, n_prompt, "tokens")
            n_reported = n

    if reads:
        report(item.n_past)
    try:
        forward = session.evaluate(item, (lambda of: report(end - (of.total or 0) + of.done)) if reads else None)
    except BaseException:  # KeyboardInterrupt too
        if session.n_cached != n_held:  # else the session still holds what it held before
            text.n_cached = min(session.n_cached, n_most)
        raise
    if reads:
        report(end)
    return forward


def take(prepared: Prepared, forward: Forward, forward_s: float) -> Verification:
    """Extend a text by what its forward says, learn from it, and return what was accepted.

    Args:
        prepared: What the forward evaluated.
        forward: The result for the text's rows.
        forward_s: Seconds that the forward took, other texts' rows in it included.
    """
    text, decoder, draft = prepared.text, prepared.decoder, prepared.draft
    stats, n_past = text.stats, text.n_cached
    n_generated = len(text.token_ids) - len(text.request.prompt_ids)
    begun, thread_s = perf_counter(), thread_time()  # of this thread, as others' steps go on meanwhile
    skips = decoder.policy is not None and decoder.policy.skips and not draft.tokens
    curve = None if skips else decoder.curve  # a step that is not looked at is not timed, either
    shared, n_rows = forward.shared, len(prepared.pending) + len(draft.tokens)
    if shared is not None and shared.n_items == 1:
        n_rows = shared.n_rows  # a draft head may have had some
    if decoder.curve is not None:
        decoder.curve.shared = shared
    verification, keep_s = _accept(text, decoder, draft, forward)
    accepted, times = perf_counter(), None
    if not n_generated:
        stats.prefill_s += forward_s
    else:
        stats.forward_s += forward_s
        stats.n_steps += 1
        if decoder.policy is not None:
            times = _expected_s(decoder.curve, n_past, n_rows - 1)
        if curve is not None:
            curve.observe(n_rows, forward_s, n_past, keep_s)
    _learn(text, decoder, draft, forward, verification)
    if n_generated and curve is not None:
        beside_s = thread_time() - thread_s - (keep_s or 0.0)  # below 0 where keep() waited for others
        curve.observe_beside(1 + len(draft.tokens), max(0.0, beside_s))
    stats.verify_s += accepted - begun
    draft_s = prepared.draft_s + perf_counter() - accepted
    stats.draft_s += draft_s
    if times is not None:
        plain_s, step_s = times
        stats.count_saved(len(verification.token_ids), plain_s, step_s + draft_s + (keep_s or 0.0))
    return verification


def _expected_s(curve: CostCurve | None, n_past: int, n_nodes: int) -> tuple[float, float] | None:
    """Return the seconds that a plain step takes by the curve, and a step with `n_nodes` nodes; None where unknown."""
    if curve is None or curve.seconds(1, n_past) is None:
        return None
    cost = curve.cost(n_past)
    return cost(0), cost(n_nodes)


def _propose(text: TextState, decoder: Decoder, n_generated: int) -> Draft:
    """Return the draft to verify, which may be empty.

    Its nodes promise more than they cost, the KV cache and the text have room for them, and their rows have the bits of
    single steps where the generation is strict.
    """
    policy, session, n_past = decoder.policy, decoder.session, text.n_cached
    if policy is None:
        return EMPTY_DRAFT
    if policy.rests and decoder.forced is None:
        return policy.rest()
    room = min(session.room(n_past + 1), session.model.capabilities.max_rows - 1)
    if decoder.forward_rows is not None:
        room = min(room, decoder.forward_rows - 1)
    max_tokens = text.request.sampling.max_tokens
    if max_tokens is not None:
        room = min(room, max_tokens - n_generated - 1)
    if decoder.strict and room >= 1:
        exact = session.exact_rows(n_past).possible
        if exact is None:
            text.stats.add_reason(_INEXACT.format(runtime=session.model.card.runtime))
        room = min(room, (exact or 1) - 1)
    draft = policy.propose(text.stats, n_past, room)  # also without room, so that the policy knows of the step
    if room < 1:
        return EMPTY_DRAFT
    if decoder.forced is not None:
        draft = decoder.forced.add_to(draft, text.stats, n_past, room)
    n = len(draft.tokens)
    if decoder.strict and n and session.exact_rows(n_past).sure < 1 + n:
        seconds = 0.0 if decoder.curve is None else measuring_s(1 + n, decoder.curve.cost(n_past))
        measured = policy.pays_to_measure(seconds) and session.exact_rows(n_past, measure=1 + n).sure > n
        return draft if measured else EMPTY_DRAFT
    return draft


def _rows_above(draft: Draft) -> NDArray[np.int32]:
    """Return the row that each row of a forward follows, where the last token is row 0 and node i is row i + 1."""
    return np.array([-2, *draft.parents], np.int32) + 1


def _accept(text: TextState, decoder: Decoder, draft: Draft, forward: Forward) -> tuple[Verification, float | None]:
    """Extend the text by the tokens that the model draws, for as long as the draft holds them, and by one more.

    The session keeps the accepted nodes. Returns the outcome, and the seconds that keeping one branch of a tree took;
    None for a chain, where n_past of the next forward says how much of it stays.
    """
    verified = _verify(text, decoder, draft, forward)
    decoder.added = decoder.ending.cut(verified, forward, len(text.token_ids))
    verification = decoder.added.verification
    n_top = text.request.sampling.logprobs
    if n_top is not None:
        rows = forward.logits[[0, *[node + 1 for node in verification.path]]]
        chosen = zip(rows, verification.token_ids, strict=True)
        decoder.logprobs = [_logprobs(row, token, n_top, forward.ops) for row, token in chosen]
    keep_s = None
    n_cached = len(text.token_ids) + len(verification.path)  # all but the last of the new tokens
    if len(draft.tokens) and not draft.is_chain:
        begun = perf_counter()
        try:
            decoder.session.keep(np.array([-1, *verification.path], dtype=np.int32) + 1)
        except RuntimeLostError:  # the tokens stand: the grammar has them already; all of them are to be read again
            n_cached = 0
        keep_s = perf_counter() - begun
    text.n_cached = n_cached
    text.token_ids.extend(verification.token_ids)
    return verification, keep_s


def _verify(text: TextState, decoder: Decoder, draft: Draft, forward: Forward) -> Verification:
    """Choose tokens along a path of the draft, by the rule that the request names."""
    rule, best = text.request.rule, forward.best
    if rule == COUPLED:
        if best and decoder.takes_best:
            return verify_coupled(draft, lambda row, accepted: best[row])
        return verify_coupled(draft, partial(_choose_token, text, decoder, forward))
    from edgedec.verification.rules import find_rule

    target = partial(_law, text, decoder, forward)
    return find_rule(rule).verified(draft, target, decoder.noise, len(text.token_ids))


def _choose_token(text: TextState, decoder: Decoder, forward: Forward, row: int, accepted: tuple[int, ...]) -> int:
    """Return the token that plain decoding draws after a row, where `accepted` follows the text."""
    params, logits, constraint = text.request.sampling, forward.logits[row], decoder.constraint
    seen = [*text.token_ids, *accepted] if params.has_penalties else ()
    position = len(text.token_ids) + len(accepted)
    if constraint is None:
        return draw(logits, params, seen, decoder.noise, position, forward.ops)
    return constraint.choose(DrawPlace(logits, params, seen, decoder.noise, position, forward.ops), accepted)


def _law(text: TextState, decoder: Decoder, forward: Forward, row: int, accepted: tuple[int, ...]) -> Distribution:
    """Return the distribution that plain decoding draws from after a row, where `accepted` follows the text."""
    logits, constraint = forward.logits[row], decoder.constraint
    scores = logits if constraint is None else constraint.masked(logits, accepted)
    return distribution(scores, text.request.sampling, [*text.token_ids, *accepted], forward.ops)


def _logprobs(row: NDArray[np.float32], token: int, n_top: int, ops: LogitOps) -> ChosenLogprobs:
    """Return the log-probabilities of a token and of the `n_top` most probable tokens of a row."""
    best = ops.top_k(row, min(n_top, len(row))) if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    chosen, *top = log_probs(row, np.concatenate([[token], best]), ops).tolist()
    return ChosenLogprobs(chosen, dict(zip(best.tolist(), top, strict=True)))


def _learn(text: TextState, decoder: Decoder, draft: Draft, forward: Forward, verification: Verification) -> None:
    """Count what became of the draft, and let the drafters learn from what came."""
    n_draft, stats, policy = len(draft.tokens), text.stats, decoder.policy
    if n_draft:
        stats.count_draft(n_draft, len(verification.path))
        if decoder.forced is not None:
            decoder.forced.score(stats, verification.token_ids)
    if policy is None:
        return
    hidden, needs = forward.hidden, policy.drafters.needs
    if hidden:
        n_pending = len(next(iter(hidden.values()))) - n_draft
        rows = [*range(n_pending), *(n_pending + node for node in verification.path)]
        hidden = {layer: states[rows] for layer, states in hidden.items()}
    if needs.candidates:
        last = text.token_ids[-len(verification.token_ids) - 1]
        tokens = np.array([last, *draft.tokens], np.int32)
        candidates = _candidates(forward, tokens, _rows_above(draft), needs.candidates)
        verification = replace(verification, candidates=candidates)
    policy.learn(stats, draft, verification, hidden)


def _candidates(forward: Forward, tokens: NDArray[np.int32], parents: NDArray[np.int32], k: int) -> Candidates:
    """Return the target's `k` most probable tokens after each row."""
    logits, ops = forward.logits, forward.ops
    k = min(k, logits.shape[1])
    ids = np.empty((len(logits), k), np.int32)
    probs = np.empty((len(logits), k), np.float32)
    for row, out_ids, out_probs in zip(logits, ids, probs, strict=True):
        best = ops.top_k(row, k)
        best = best[np.argsort(-row[best], kind="stable")]
        out_ids[:] = best
        out_probs[:] = np.exp(log_probs(row, best, ops))
    return Candidates(tokens, parents, ids, probs)
