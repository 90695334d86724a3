"""Which tokens a grammar allows after a text, and after each path of a draft."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgedec.grammar import GrammarState
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.sampling import Noise, SamplingParams, distribution, draw, penalized

_FORBIDDEN = np.float32(-np.inf)
_N_FIRST = 32  # tokens that are put in order before the rest of the vocabulary is


@dataclass(frozen=True, slots=True)
class DrawPlace:
    """The place of a text where a token is drawn, and all that the draw depends on.

    Attributes:
        logits: f32[n_vocab], the model's, of the row before.
        params: The options.
        seen: The text so far, prompt included, for the penalties.
        noise: The random numbers of the generation.
        position: The absolute position of the token.
        ops: Operations over the row.
    """

    logits: NDArray[np.float32]
    params: SamplingParams
    seen: Sequence[int]
    noise: Noise
    position: int
    ops: LogitOps = NUMPY_ROW_OPS

    def draw(self, scores: NDArray[np.float32]) -> int:
        """Return the token that is drawn from a row that stands for the logits (RequestError as draw())."""
        return draw(scores, self.params, self.seen, self.noise, self.position, self.ops)

    def in_order(self, scores: NDArray[np.float32]) -> Iterator[tuple[int, float]]:
        """Yield tokens with their probabilities in the order in which draw() would take them, were others ruled out.

        This is drawing without replacement: each token comes with its probability among those that are left (Gumbel
        top-k; Kool et al. 2019, arXiv:1903.06059). Tokens that top-k, top-p and min-p rule out come last, the more
        probable ones first, with a probability of 0. At temperature 0 the order is that of the logits, and the
        probabilities are those of temperature 1.

        Args:
            scores: f32[n_vocab], a row that stands for the logits; -inf rules a token out for good.
        """
        params = replace(self.params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        law = distribution(scores, params if self.params.greedy else self.params, self.seen, self.ops)
        keys = np.log(law.probs)
        if not self.params.greedy:
            keys += self.noise.gumbel(self.position, law.token_ids)
        n_first = min(_N_FIRST, len(keys))
        first = np.argpartition(-keys, n_first - 1)[:n_first]
        first = first[np.argsort(-keys[first], kind="stable")]
        yield from zip(law.token_ids[first].tolist(), law.probs[first].tolist(), strict=True)
        order = np.argsort(-keys, kind="stable")[n_first:]
        yield from zip(law.token_ids[order].tolist(), law.probs[order].tolist(), strict=True)
        out = penalized(scores, self.params, self.seen).copy()
        out[law.token_ids] = -np.inf
        for token in np.argsort(-out, kind="stable")[: np.count_nonzero(out > -np.inf)].tolist():
            yield token, 0.0


class Constraint:
    """The grammar of one generation: which tokens may follow the text so far, and each path of a draft.

    Attributes:
        note: A note for a person on how the text came about; may be empty.
        note_if_cut: A note for a person, should the text be cut before the grammar allows an end; may be empty.
        logprob: The sum over the text's tokens of log Z, where Z is the probability that the model gives to all tokens
            together that were allowed there. NaN where that is not known.
        n_least: The fewest tokens that a text is known to take; 0 where that is not known.
    """

    note = note_if_cut = ""
    logprob, n_least = 0.0, 0

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._ahead: list[int] = []  # tokens that the state has taken beyond the text
        self._masks: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # by path, until a token is added to the text
        self._n_left: int | None = None

    def begin(self, n_tokens: int) -> None:
        """Set how many tokens the text may have, before its first token; without this call there is no limit.

        Raises:
            RequestError: The grammar has no text of so few tokens.
        """
        self._n_left = n_tokens

    @property
    def is_over(self) -> bool:
        """Whether no token may follow, or none has room."""
        return self._n_left == 0 or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""
        self._move_to(())
        return self._state.is_complete

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        self._move_to(())
        return self._state.may_end

    def masked(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return f32[n_vocab]: the logits, with -inf for every token that may not follow the text and `path`.

        Args:
            logits: f32[n_vocab], of the row of the path's last token; they are not changed.
            path: Tokens of a draft. After a token that is not allowed, no token is.

        Raises:
            RequestError: No token may follow, or finding out takes more time or memory than the limits allow.
        """
        allowed = self.allowed(path)
        n = min(len(allowed), len(logits))
        if n == len(logits) and allowed.all():
            return logits
        masked = np.full_like(logits, _FORBIDDEN)  # rows may be longer than the vocabulary
        np.copyto(masked[:n], logits[:n], where=allowed[:n])
        return masked

    def choose(self, place: DrawPlace, path: Sequence[int]) -> int:
        """Return the token that is drawn after the text and `path` (raises RequestError as masked())."""
        return place.draw(self.masked(place.logits, path))

    def log_mass(
        self, logits: NDArray[np.float32], path: Sequence[int], temperature: float, ops: LogitOps = NUMPY_ROW_OPS
    ) -> float:
        """Return log Z after the text and `path`: the log-probability of all allowed tokens together, at most 0.

        Args:
            logits: f32[n_vocab], of the row of the path's last token.
            path: Tokens of a draft.
            temperature: Divides the logits; not 0.
            ops: Operations over the row.
        """
        allowed = self.allowed(path)
        n = min(len(allowed), len(logits))
        if n == len(logits) and allowed.all():
            return 0.0
        scaled = logits if temperature == 1 else logits / np.float32(temperature)
        return min(0.0, _log_sum(scaled[np.flatnonzero(allowed[:n])], ops) - _log_sum(scaled, ops))

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return bool[n]: which tokens may follow the text and `path`; those from n on may not. Do not change it.

        Raises:
            RequestError: As masked().
        """
        key = tuple(path)
        if key not in self._masks:  # a drafter may have asked for it before the verification does
            self._masks[key] = self._state.allowed() if self._move_to(key) else np.zeros(0, np.bool_)
        return self._masks[key]

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Return whether the grammar takes a token after the text and `path`.

        That may be so for some tokenizations of a text that are never drawn.
        """
        return self._move_to((*path, token_id))

    def forced(self) -> tuple[int, ...]:
        """Return tokens that are certain to follow the text, perhaps not all of them."""
        self._move_to(())
        return tuple(self._state.forced())

    def commit(self, token_id: int) -> int:
        """Add the chosen token to the text, or another one in its place, and return the token that was added."""
        self._masks.clear()
        if self._n_left is not None:
            self._n_left -= 1
        if not self._ahead:
            self._state.advance(token_id)
        elif self._ahead[0] == token_id:
            del self._ahead[0]
        else:
            self._move_to((token_id,))
            self._ahead.clear()
        return token_id

    def end_at(self, n_tokens: int) -> None:
        """Take note that the text ends behind its first `n_tokens` tokens; further ones that were added are no text."""

    def close(self) -> None:
        """Free the memory of the grammar's state; the constraint must not be used afterwards."""
        self._state.close()

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move the state behind the text and a path; False, part of the way there, where a token is not allowed."""
        steps = enumerate(zip(path, self._ahead, strict=False))
        common = next((i for i, (one, other) in steps if one != other), min(len(path), len(self._ahead)))
        if common < len(self._ahead):
            self._state.back(len(self._ahead) - common)
            del self._ahead[common:]
        for token_id in path[common:]:
            if not self._state.advance(token_id):
                return False
            self._ahead.append(token_id)
        return True


OpenConstraint = Callable[[], Constraint | None]
"""Opens the grammar of one text, at its beginning."""


def _log_sum(row: NDArray[np.float32], ops: LogitOps) -> float:
    """Return log(sum(exp(row))); -inf for an empty row."""
    most = row.max(initial=-np.inf)
    if not np.isfinite(most):
        return float(most)
    total = ops.total(row)
    if total.weight > 0:
        return total.most + math.log(total.weight)
    return float(most) + float(np.log(np.exp(row - most).sum(dtype=np.float64)))
