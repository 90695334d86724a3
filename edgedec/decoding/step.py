"""One step of decoding: draft, forward, verify, extend. A plain step is the same code with an empty draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.draft import EMPTY_DRAFT, Candidates, Draft, Verification
from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, Session
from edgedec.noise import Noise
from edgedec.progress import OnProgress
from edgedec.sampling import Distribution, distribution, draw, log_probs
from edgedec.scheduler.jump_forward import ForcedDrafts
from edgedec.scheduler.proposer import Proposer
from edgedec.sequence import COUPLED, Sequence
from edgedec.sessions.sliding_window import room_after
from edgedec.tokenizer import Tokenizer
from edgedec.verification import RULES, uniform_source
from edgedec.verification.coupled import verify_coupled

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
    """What a sequence is decoded with.

    Attributes:
        session: The target's session; holds the sequence's first n_cached tokens.
        noise: Random numbers of this generation.
        curve: Takes the measured time of every forward, or None.
        proposer: Says what to verify, or None to decode plainly.
        on_progress: Called during the prefill.
        constraint: The grammar that the text keeps to, or None.
        forced: What puts the grammar's forced tokens into drafts, or None.
        max_rows: Most rows of a forward that verifies, where memory is planned; None for all that the model can.
        strict: Verify only where the rows of one forward have the bits of single steps.
        logprobs: Filled with one entry per token of the last step, where asked for.
    """

    session: Session
    noise: Noise
    curve: CostCurve | None
    proposer: Proposer | None = None
    on_progress: OnProgress | None = None
    constraint: Constraint | None = None
    forced: ForcedDrafts | None = None
    max_rows: int | None = None
    strict: bool = True
    logprobs: list[ChosenLogprobs] = field(default_factory=list)


def step(sequence: Sequence, decoder: Decoder) -> Verification:
    """Extend the sequence by at least one token.

    Raises:
        What Session.forward raises; the sequence is unchanged then, but for n_cached at what was evaluated.
    """
    session, stats, proposer = decoder.session, sequence.stats, decoder.proposer
    pending = sequence.token_ids[sequence.n_cached :]
    prefill = sequence.n_generated == 0
    draft = EMPTY_DRAFT
    begun = perf_counter()
    if proposer is not None and len(pending) == 1:
        draft = _propose(sequence, decoder, proposer)
    started, held = perf_counter(), session.n_cached
    try:
        forward = _forward(sequence, decoder, pending, draft)
    except BaseException:  # KeyboardInterrupt too: the session says what it holds, unless it holds an older text still
        if session.n_cached != held:
            sequence.n_cached = min(session.n_cached, sequence.n_cached + len(pending) - 1)
        raise
    ended = perf_counter()
    verification = _verify(sequence, decoder, draft, forward)
    keep_s, n_draft = None, len(draft)
    if n_draft and not draft.is_chain:
        rows = [len(pending) - 1] + [len(pending) + node for node in verification.path]
        chosen = perf_counter()
        session.keep(np.array(rows, dtype=np.int32))
        keep_s = perf_counter() - chosen
    verified = perf_counter()
    if prefill:
        stats.prefill_s += ended - started
    else:
        stats.forward_s += ended - started
        stats.n_steps += 1
        if decoder.curve is not None:
            decoder.curve.observe(len(pending) + n_draft, ended - started, sequence.n_cached, keep_s)
    sequence.token_ids.extend(verification.token_ids)
    sequence.n_cached += len(pending) + len(verification.path)
    if n_draft:
        stats.count_draft(n_draft, len(verification.path))
        if decoder.forced is not None:
            decoder.forced.score(stats, verification.token_ids)
    if proposer is not None:
        _tell_proposer(sequence, proposer, draft, verification, forward, pending)
    stats.verify_s += verified - ended
    stats.draft_s += started - begun + perf_counter() - verified
    return verification


def _forward(sequence: Sequence, decoder: Decoder, pending: list[int], draft: Draft) -> Forward:
    """Evaluate the pending tokens and the draft's nodes; logits of the last pending row and of every node."""
    session, n_pending = decoder.session, len(pending)
    taps = decoder.proposer.needs.taps if decoder.proposer else ()
    tokens = np.array(pending, dtype=np.int32)
    if not len(draft):
        return session.forward(
            tokens, n_past=sequence.n_cached, rows="last", taps=taps, on_progress=decoder.on_progress
        )
    parents = None
    if not draft.is_chain:
        chain = np.arange(-1, n_pending - 1, dtype=np.int32)
        parents = np.concatenate([chain, draft.parents + np.int32(n_pending)])
    rows = np.arange(n_pending - 1, n_pending + len(draft), dtype=np.int32)
    return session.forward(
        np.concatenate([tokens, draft.tokens]),
        n_past=sequence.n_cached,
        parents=parents,
        rows=rows,
        taps=taps,
    )


def _verify(sequence: Sequence, decoder: Decoder, draft: Draft, forward: Forward) -> Verification:
    """Choose tokens along a path of the draft, by the rule asked for."""
    params, logits, ops = sequence.request.sampling, forward.logits, forward.ops
    constraint = decoder.constraint
    position = len(sequence.token_ids)
    decoder.logprobs.clear()
    if sequence.request.rule == COUPLED:

        def choose_token(row: int, accepted: tuple[int, ...]) -> int:
            seen = sequence.token_ids + list(accepted) if params.has_penalties else ()
            scores = logits[row] if constraint is None else constraint.masked(logits[row], accepted)
            return draw(scores, params, seen, decoder.noise, position + len(accepted), ops)

        verification = verify_coupled(draft, choose_token)
    else:

        def target(row: int, before: tuple[int, ...]) -> Distribution:
            scores = logits[row] if constraint is None else constraint.masked(logits[row], before)
            return distribution(scores, params, sequence.token_ids + list(before), ops)

        uniform = uniform_source(decoder.noise, position)
        q = draft.q if draft.q is not None else (None,) * len(draft)
        verification = RULES[sequence.request.rule](draft, q, target, uniform)
    if len(verification.token_ids) > 1 and not params.ignore_end:
        verification = _until_end(verification, decoder.session.model.tokenizer)
    if constraint is not None:
        verification = _until_complete(verification, constraint)
    if params.logprobs is not None:
        rows = (0, *(node + 1 for node in verification.path))
        decoder.logprobs += [
            _logprobs(logits[row], token, params.logprobs, ops)
            for row, token in zip(rows, verification.token_ids, strict=True)
        ]
    return verification


def _until_end(verification: Verification, tokenizer: Tokenizer) -> Verification:
    """Leave out what a draft had behind an end token: it is no text, and no drafter should learn it."""
    for i, token_id in enumerate(verification.token_ids[:-1]):
        if tokenizer.is_end(token_id):
            return Verification(verification.path[:i], verification.token_ids[: i + 1])
    return verification


def _until_complete(verification: Verification, constraint: Constraint) -> Verification:
    """Tell the grammar what the text gets.

    What follows the token that makes it whole, or the last there is room for, is left out, and what follows one that
    takes another's place.
    """
    for i, token_id in enumerate(verification.token_ids):
        taken = constraint.commit(token_id)
        if taken != token_id or constraint.is_over:
            return Verification(verification.path[:i], (*verification.token_ids[:i], taken))
    return verification


def _logprobs(row: NDArray[np.float32], token: int, n_top: int, ops: LogitOps) -> ChosenLogprobs:
    best = ops.top_k(row, min(n_top, len(row))) if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    own, *top = log_probs(row, np.concatenate([[token], best]), ops).tolist()
    return ChosenLogprobs(own, dict(zip(best.tolist(), top, strict=True)))


def _propose(sequence: Sequence, decoder: Decoder, proposer: Proposer) -> Draft:
    """Ask for as many nodes as are useful, have room in the context, and are verified with the bits of single steps."""
    session = decoder.session
    room = min(room_after(session, len(sequence.token_ids)), session.model.capabilities.max_rows - 1)
    if decoder.max_rows is not None:
        room = min(room, decoder.max_rows - 1)
    max_tokens = sequence.request.sampling.max_tokens
    if max_tokens is not None:
        room = min(room, max_tokens - sequence.n_generated - 1)
    if decoder.strict and room >= 1:
        exact = session.exact_rows(sequence.n_cached)
        if exact is None:
            sequence.stats.add_reason(_INEXACT.format(runtime=session.model.card.runtime))
        room = min(room, (exact or 1) - 1)
    if room < 1:
        return EMPTY_DRAFT
    draft = proposer.propose(sequence.stats, sequence.n_cached, room)
    if decoder.forced is not None:
        draft = decoder.forced.add_to(draft, sequence.stats, sequence.n_cached, room)
    if decoder.strict and len(draft) and not session.has_exact_rows(sequence.n_cached, 1 + len(draft)):
        return EMPTY_DRAFT
    return draft


def _tell_proposer(
    sequence: Sequence,
    proposer: Proposer,
    draft: Draft,
    verification: Verification,
    forward: Forward,
    pending: list[int],
) -> None:
    hidden = forward.hidden
    if hidden:
        rows = list(range(len(pending))) + [len(pending) + node for node in verification.path]
        hidden = {layer: states[rows] for layer, states in hidden.items()}
    n_candidates = proposer.needs.candidates
    if n_candidates:
        tokens = np.concatenate([np.array(pending[-1:], np.int32), draft.tokens])
        parents = np.concatenate([np.array([-1], np.int32), draft.parents + np.int32(1)])
        verification = replace(verification, candidates=_candidates(forward, tokens, parents, n_candidates))
    proposer.learn(sequence.stats, draft, verification, hidden)


def _candidates(forward: Forward, tokens: NDArray[np.int32], parents: NDArray[np.int32], k: int) -> Candidates:
    """Return what the target held probable after each row."""
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
