"""From logits to a token: one transform, used everywhere, and random numbers keyed by (seed, position).

The transform has llama.cpp's order: logit bias, penalties (momentum last), top-k, top-p, min-p, temperature. A
grammar's mask (edgedec.grammar) comes before all of these: it is a bias of -inf, so the other parts see only what may
come. The token is then drawn by Gumbel-max: argmax over i of log p_i + G(seed, position, i). The noise G depends only
on the seed, the absolute position of the token and its id; so the text does not depend on how many tokens a forward
evaluates, and a drafter that draws with the same noise mostly draws the same token (Daliri, Musco and Suresh 2024,
arXiv:2408.07978).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.callers import check_fields
from edgedec.errors import OptionError, RequestError, argument
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps, nucleus, slow_loops

SEED_LIMIT = 2**64
MAX_STOPS = 1000
MAX_STOP_CHARS = 16_384

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_SLACK = 1e-3  # of a logit, more than a sum's rounding
LARGEST_BIAS = 1e30  # what a row of float32 takes, and a penalty on top of it

# Of each number: what holds for it, and that in words.
_NUMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda t: t == 0 or 1e-30 <= t < math.inf, "a number from 0, the least above it 1e-30"),
    "top_k": (lambda k: k >= 0, "a whole number from 0 (0 is off)"),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1 (1 is off)"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 and 1 (0 is off)"),
    "repetition_penalty": (lambda x: 0.001 <= x <= 1000, "between 0.001 and 1000 (1 is off)"),
    "frequency_penalty": (lambda x: abs(x) <= 100, "between -100 and 100 (0 is off)"),
    "presence_penalty": (lambda x: abs(x) <= 100, "between -100 and 100 (0 is off)"),
    "momentum": (lambda x: 0 <= x <= 1, "between 0 and 1 (0 is off)"),
    "penalty_last_n": (lambda n: n >= -1, "from -1 (-1 is all)"),
    "seed": (lambda seed: 0 <= seed < SEED_LIMIT, "0 to 2^64-1"),
    "max_tokens": (lambda n: n >= 1, "from 1"),
    "logprobs": (lambda n: 0 <= n <= 100, "0 to 100"),
    "stop_unsure": (lambda p: 0 < p < 1, "above 0 and below 1"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when the generation ends.

    Attributes:
        temperature: Divides the logits; 0 is greedy (the most probable token, lowest id on a tie).
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of most probable tokens whose sum is at least this; 1 keeps all.
        min_p: Keep tokens at least this times as probable as the most probable one; 0 keeps all.
        repetition_penalty: Divide a seen token's positive logit by this, multiply a negative one; 1 is off.
        frequency_penalty: Subtract this times a token's count from its logit; 0 is off.
        presence_penalty: Subtract this from the logit of every seen token; 0 is off.
        momentum: Subtract this times n from the probability of a token that would repeat the n last tokens of the text,
            itself included (n from 2 to 5; edgedec.logit_ops); 0 is off.
        penalty_last_n: Tokens, prompt included, that count as seen by the three penalties: the last n; -1 for all.
        logit_bias: Added to the logits of these token ids; -inf rules a token out.
        seed: 0 to 2^64-1; None draws a seed, which the result's statistics name.
        max_tokens: Most tokens to generate; None for as many as the context holds.
        stop: The text ends before the first of these strings that is complete; at most MAX_STOPS strings, with
            MAX_STOP_CHARS characters together.
        logprobs: Also return the log-probabilities of the chosen token and of this many most probable tokens, as
            the model gives them (before bias, penalties and truncation); None returns none.
        ignore_end: Go on past the model's end tokens (for benchmarks).
        stop_unsure: End the text before the first token whose estimated chance to be right is below this; None never
            does (edgedec_methods.unsure).
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    momentum: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_end: bool = False
    stop_unsure: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)  # a limit of 2.5 tokens, say, would never be met
        for name, (holds, expected) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise OptionError(name, value, f"it must be {expected}")
        _check_stop(self.stop)
        bias = self.logit_bias
        if not all(_is_a(Integral, i) and _is_a(Real, b) for i, b in bias.items()):
            raise OptionError("logit_bias", bias, "it must be a mapping of token ids to numbers")
        if not all(abs(value) <= LARGEST_BIAS or value == -np.inf for value in bias.values()):
            name = argument("logit_bias")
            raise RequestError(f"{name} must hold numbers from -1e30 to 1e30, or -inf (which rules a token out)")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(option.name for option in fields(cls))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on the tokens seen beyond the model's own view."""
        return self._counts_tokens or self.momentum != 0

    @property
    def _counts_tokens(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def takes_best(self) -> bool:
        """Whether the token is always the model's most probable one, whatever came before."""
        return self.temperature == 0 and not self.logit_bias and not self.has_penalties

    @property
    def has_truncation(self) -> bool:
        """Whether tokens are ruled out because they are improbable."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check_stop(stop: Sequence[str]) -> None:
    """Raise RequestError for stop strings that are empty, or too many or too long to look for after every token."""
    if len(stop) > MAX_STOPS:
        raise RequestError(f"{argument('stop')} holds {len(stop):,} strings; it may hold at most {MAX_STOPS:,}")
    if not all(stop):
        raise OptionError("stop", stop, "it must hold strings, none of them empty")
    if (n_chars := sum(map(len, stop))) > MAX_STOP_CHARS:
        size = f"{argument('stop')} holds {n_chars:,} characters"
        raise RequestError(f"{size}; its strings may have {MAX_STOP_CHARS:,} together")


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise as a pure function of (seed, position, token id): what the target's tokens are drawn with.

    The generator is SplitMix64 (Steele, Lea and Flood 2014). Seed and position are hashed to its starting state; the
    number of token i is the one after i + 1 steps, computed without the steps before.
    """

    seed: int

    def key(self, position: int) -> int:
        """Return the 64-bit key of an absolute position of the sequence."""
        return _mix(_mix(self.seed % SEED_LIMIT) ^ position)

    def gumbel(self, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return f64[n], the noise of these tokens at an absolute position of the sequence."""
        return gumbel(self.key(position), token_ids)


def gumbel(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return f64[n], the noise of these tokens under a position's key."""
    x = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(key)  # wraps around as intended
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    # 52 bits, so that the half is exact and no value rounds to 0 or 1.
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def gumbel_of(key: int, token_id: int) -> float:
    """Return what gumbel() returns for one token; for single tokens this is faster than arrays."""
    word = _mix((token_id * _GAMMA + key) % SEED_LIMIT)
    return -math.log(-math.log(((word >> 12) + 0.5) * 2.0**-52))


def _mix(x: int) -> int:
    """Scramble a 64-bit word, one to one."""
    x = (x + _GAMMA) % SEED_LIMIT
    x = (x ^ (x >> 30)) * _FIRST % SEED_LIMIT
    x = (x ^ (x >> 27)) * _SECOND % SEED_LIMIT
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution over the vocabulary, given by the tokens whose probability is above zero.

    Attributes:
        token_ids: int64[n], these tokens, ascending.
        probs: f64[n], the probability of each; they sum to 1.
    """

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def dense(self, n_vocab: int) -> NDArray[np.float64]:
        """Return f64[n_vocab], the probability of every token."""
        full = np.zeros(n_vocab)
        full[self.token_ids] = self.probs
        return full


def distribution(
    logits: NDArray[np.float32], params: SamplingParams, seen: Sequence[int] = (), ops: LogitOps = NUMPY_ROW_OPS
) -> Distribution:
    """Return the distribution that the transform makes of one row of logits.

    Args:
        logits: f32[n_vocab] as the model gives them; not changed.
        params: The options; at temperature 0 all the probability goes to the most probable token.
        seen: The sequence so far, prompt included, for the penalties.
        ops: Operations over a whole row.

    Raises:
        RequestError: Nothing is left to choose (every token is ruled out, or the model's logits are not finite).
    """
    scores = penalized(logits, params, seen)
    if params.greedy:
        return Distribution(np.array([_most_probable(scores, ops)]), np.ones(1))
    ids = _kept(scores, params, ops)
    selected = scores[ids].astype(np.float64)
    most = selected.max()
    weights = np.exp((selected - most) / params.temperature)
    mask = weights > 0
    ids, weights = ids[mask], weights[mask]
    return Distribution(ids, weights / weights.sum())


def draw(
    logits: NDArray[np.float32],
    params: SamplingParams,
    seen: Sequence[int],
    noise: Noise,
    position: int,
    ops: LogitOps = NUMPY_ROW_OPS,
) -> int:
    """Return the token for an absolute position: what choose() draws from distribution(), with less work.

    Raises:
        RequestError: As distribution().
    """
    scores = penalized(logits, params, seen)
    if params.temperature == 0:
        return _most_probable(scores, ops)
    key = noise.key(position)
    ids = _kept(scores, params, ops) if params.has_truncation else ops.contenders(scores, params.temperature, key)
    keys = scores[ids].astype(np.float64)
    if not params.has_truncation and not math.isfinite(keys.max(initial=-np.inf)):
        raise _nothing_left()
    keys /= params.temperature
    keys += gumbel(key, ids)
    return int(ids[int(keys.argmax())])


def choose(dist: Distribution, noise: Noise, position: int) -> int:
    """Return the token drawn for an absolute position by Gumbel-max; a single candidate needs no noise."""
    if len(dist.token_ids) == 1:
        return int(dist.token_ids[0])
    keys = np.log(dist.probs) + noise.gumbel(position, dist.token_ids)
    return int(dist.token_ids[int(np.argmax(keys))])


def log_probs(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], ops: LogitOps = NUMPY_ROW_OPS
) -> NDArray[np.float64]:
    """Return f64[n], the model's own log-probabilities of these tokens."""
    total = ops.total(logits)
    return logits[token_ids].astype(np.float64) - (total.most + math.log(total.weight))


def _most_probable(scores: NDArray[np.float32], ops: LogitOps) -> int:
    best = ops.argmax(scores)
    if not math.isfinite(scores[best]):
        raise _nothing_left()
    return best


def _kept(scores: NDArray[np.float32], params: SamplingParams, ops: LogitOps) -> NDArray[np.int64]:
    """Return the tokens, ascending, that top-k, top-p and min-p leave; at least one."""
    ids = _candidates(scores, params, ops)
    row = scores[ids]
    most = float(row.max(initial=-np.inf))
    if not math.isfinite(most):
        raise _nothing_left()
    return ids[row.astype(np.float64) >= most + math.log(params.min_p)] if params.min_p > 0 else ids


def _candidates(scores: NDArray[np.float32], params: SamplingParams, ops: LogitOps) -> NDArray[np.int64]:
    """Return the tokens, ascending, that top-k and top-p leave; min-p alone may leave fewer of them."""
    if 0 < params.top_k < len(scores):
        ids = ops.top_k(scores, params.top_k)
        ids = ids[scores[ids] > -np.inf]
        if params.top_p < 1 and len(ids):
            weights = np.exp(scores[ids].astype(np.float64) - float(scores[ids].max()))
            ids = np.sort(ids[nucleus(weights, params.top_p * weights.sum())])
        return ids
    if params.top_p < 1:
        return ops.nucleus(scores, params.top_p)
    if params.min_p > 0:
        return ops.above(scores, float(scores.max()) + math.log(params.min_p) - _SLACK)
    return np.flatnonzero(scores > -np.inf)


def penalized(logits: NDArray[np.float32], params: SamplingParams, seen: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits with bias and penalties applied (Keskar et al. 2019, arXiv:1909.05858, for repetition)."""
    if not params.logit_bias and not (len(seen) and params.has_penalties):
        return logits
    scores = logits.copy()
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < len(scores):
            raise RequestError(
                f"{argument('logit_bias')} names token {token_id}; the vocabulary holds 0 to {len(scores) - 1}"
            )
        scores[token_id] += bias
    if params.has_penalties:
        seen = [token_id for token_id in seen if token_id >= 0]  # the others are rows of pictures
    if params._counts_tokens and params.penalty_last_n != 0 and seen:
        window = seen if params.penalty_last_n < 0 else seen[-params.penalty_last_n :]
        ids, counts = np.unique(np.asarray(window, dtype=np.int64), return_counts=True)
        row = scores[ids]
        row = np.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        scores[ids] = row - params.frequency_penalty * counts - params.presence_penalty
    if params.momentum:
        slow_loops(scores, seen, params.momentum)
    return scores


def _nothing_left() -> RequestError:
    return RequestError("no token is left to choose: every token is ruled out, or the model's logits are not finite")
