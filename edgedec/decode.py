"""One step of decoding: draft, forward, verify, extend. A plain step is the same code with an empty draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.curve import CostCurve
from edgedec.draft import EMPTY_DRAFT, Draft, Drafter, Verification
from edgedec.model import Forward, Session
from edgedec.noise import Noise
from edgedec.progress import OnProgress
from edgedec.row_ops import RowOps
from edgedec.sampling import draw, log_probs
from edgedec.sequence import Sequence
from edgedec.stats import timed
from edgedec.verify import verify_coupled

_DRAFT_DEADLINE_S = 1.0


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
        curve: Takes the measured time of every forward.
        drafter: Proposes tokens, or None; dropped for the rest of the generation when it fails.
        n_draft_max: Most nodes of a draft.
        on_progress: Called during the prefill.
        logprobs: Filled with one entry per token of the last step, where asked for.
    """

    session: Session
    noise: Noise
    curve: CostCurve
    drafter: Drafter | None = None
    n_draft_max: int = 0
    on_progress: OnProgress | None = None
    logprobs: list[ChosenLogprobs] = field(default_factory=list)


def step(sequence: Sequence, decoder: Decoder) -> Verification:
    """Extend the sequence by at least one token.

    Raises:
        What Session.forward raises; the sequence is unchanged then, but for n_cached at what was evaluated.
    """
    session, stats = decoder.session, sequence.stats
    pending = sequence.token_ids[sequence.n_cached :]
    prefill = sequence.n_generated == 0
    with timed(stats, "draft"):
        draft = EMPTY_DRAFT if len(pending) > 1 else _propose(sequence, decoder)
    started = perf_counter()
    try:
        forward = _forward(sequence, decoder, pending, draft)
    except BaseException:  # KeyboardInterrupt too: the session says what it holds
        sequence.n_cached = min(session.n_cached, sequence.n_cached + len(pending) - 1)
        raise
    seconds = perf_counter() - started
    if prefill:
        stats.prefill_s += seconds
    else:
        stats.forward_s += seconds
        stats.n_steps += 1
        decoder.curve.observe(len(pending) + len(draft), seconds)
    with timed(stats, "verify"):
        verification = _verify(sequence, decoder, draft, forward)
    if not draft.is_chain:
        rows = [len(pending) - 1] + [len(pending) + node for node in verification.path]
        session.keep(np.array(rows, dtype=np.int32))
    sequence.token_ids.extend(verification.token_ids)
    sequence.n_cached += len(pending) + len(verification.path)
    if len(draft):
        stats.count_draft(len(draft), len(verification.path))
    with timed(stats, "draft"):
        _tell_drafter(sequence, decoder, verification, forward, len(pending))
    return verification


def _forward(sequence: Sequence, decoder: Decoder, pending: list[int], draft: Draft) -> Forward:
    """Evaluate the pending tokens and the draft's nodes; logits of the last pending row and of every node."""
    session, n_pending = decoder.session, len(pending)
    taps = decoder.drafter.needs.taps if decoder.drafter else ()
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
    """Choose the target's token at each row on the draft's accepted path."""
    params, logits, ops = sequence.request.sampling, forward.logits, forward.ops
    position = len(sequence.token_ids)
    decoder.logprobs.clear()

    def choose_token(row: int, accepted: tuple[int, ...]) -> int:
        seen = sequence.token_ids + list(accepted) if params.has_penalties else ()
        token = draw(logits[row], params, seen, decoder.noise, position + len(accepted), ops)
        if params.logprobs is not None:
            decoder.logprobs.append(_logprobs(logits[row], token, params.logprobs, ops))
        return token

    return verify_coupled(draft, choose_token)


def _logprobs(row: NDArray[np.float32], token: int, n_top: int, ops: RowOps) -> ChosenLogprobs:
    best = ops.top_k(row, min(n_top, len(row))) if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    own, *top = log_probs(row, np.concatenate([[token], best]), ops).tolist()
    return ChosenLogprobs(own, dict(zip(best.tolist(), top, strict=True)))


def _propose(sequence: Sequence, decoder: Decoder) -> Draft:
    """Ask the drafter for as many nodes as are allowed, useful and have room in the context."""
    if decoder.drafter is None:
        return EMPTY_DRAFT
    room = decoder.session.n_ctx - len(sequence.token_ids)
    max_tokens = sequence.request.sampling.max_tokens
    if max_tokens is not None:
        room = min(room, max_tokens - sequence.n_generated - 1)
    n_max = min(decoder.n_draft_max, room)
    if n_max < 1:
        return EMPTY_DRAFT
    try:
        draft = decoder.drafter.draft(n_max, monotonic() + _DRAFT_DEADLINE_S).truncated(n_max)
        draft.check(decoder.session.model.card.n_vocab)
        if not draft.is_chain:
            decoder.session.model.capabilities.require("trees", decoder.session.model.card.runtime)
    except Exception as error:
        _drop_drafter(sequence, decoder, error)
        return EMPTY_DRAFT
    return draft


def _tell_drafter(
    sequence: Sequence, decoder: Decoder, verification: Verification, forward: Forward, n_pending: int
) -> None:
    if decoder.drafter is None:
        return
    rows = list(range(n_pending)) + [n_pending + node for node in verification.path]
    try:
        decoder.drafter.accept(verification, {k: hidden[rows] for k, hidden in forward.hidden.items()})
    except Exception as error:
        _drop_drafter(sequence, decoder, error)


def _drop_drafter(sequence: Sequence, decoder: Decoder, error: Exception) -> None:
    """Go on without a drafter that failed: a drafter never changes the text, so it never ends it either."""
    decoder.drafter = None
    sequence.stats.add_reason(f"drafting off: the drafter failed ({type(error).__name__}: {error})")
