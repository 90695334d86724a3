"""Hidden Markov guide (after Deco-G): it says how likely a text is to keep to a format, and the model is drawn by both.

The prompt says what to do, and nothing of the format. Each token is drawn from the model's law times the probability,
under the hidden Markov model, that the text as a whole keeps to the format, which a finite automaton over classes of
tokens describes; the caller writes it. The hidden Markov model is fitted to texts that the model wrote. Where it is
exact, the texts have the model's own law given the format; the format itself is always kept. The paper's tries, which
make the automaton of a format, and its pruning of states are left out.

Paper: after Decoupling Task-Solving and Output Formatting in LLM Generation, Deng et al. 2025, arXiv:2510.03595
Option: Python only, `fitted` and `write`
For: formats that the model knows too little of, where a mask alone distorts
Measured: nothing yet
Status: study
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.errors import DeadEndError, OptionError
from edgedec.sampling import Noise, SamplingParams, draw

Floats = NDArray[np.float64]
_SMOOTH = 1e-3


@dataclass(frozen=True, slots=True)
class Hmm:
    """A hidden Markov model of tokens.

    Attributes:
        start: f64[n_states], the law of the first state.
        move: f64[n_states, n_states], the law of the next state, by state.
        emit: f64[n_states, n_vocab], the law of a token, by state.
    """

    start: Floats
    move: Floats
    emit: Floats


@dataclass(frozen=True)
class Format:
    """A finite automaton over classes of tokens; a text that ended goes on with end tokens.

    Attributes:
        classes: i64[n_vocab], the class of each token.
        moves: i64[n_places, n_classes], the next place, by place and class; it begins at place 0.
        accepts: bool[n_places], whether a text may be there at its end.

    Raises:
        OptionError: A class or a place is out of range.
    """

    classes: NDArray[np.int64]
    moves: NDArray[np.int64]
    accepts: NDArray[np.bool_]

    def __post_init__(self) -> None:
        n_places, n_classes = self.moves.shape
        for name, values, n in (("classes", self.classes, n_classes), ("moves", self.moves, n_places)):
            if values.size == 0 or values.min() < 0 or values.max() >= n or len(self.accepts) != n_places:
                raise OptionError(
                    name, values.shape, f"its numbers must be from 0 to {n - 1}, with a mark for each place"
                )

    @cached_property
    def by_class(self) -> Floats:
        """f64[n_vocab, n_classes], 1 where a token has a class."""
        return np.eye(self.moves.shape[1])[self.classes]


def fitted(texts: NDArray[np.int64], n_states: int, n_vocab: int, *, n_rounds: int = 30, seed: int = 0) -> Hmm:
    """Return a hidden Markov model that is fitted to texts by expectation maximization (Baum and Welch).

    Args:
        texts: i64[n_texts, n_tokens], filled up with end tokens.
        n_states: How many states.
        n_vocab: How many tokens there are.
        n_rounds: Rounds of fitting, none of which makes the texts less likely but for the smoothing.
        seed: Of the beginning.
    """
    rng = np.random.default_rng(seed)
    hmm = Hmm(*(_laws(rng.random(shape) + 0.5) for shape in (n_states, (n_states, n_states), (n_states, n_vocab))))
    for _ in range(n_rounds):
        ahead, behind = _passes(hmm, texts)
        states = _laws(ahead * behind)  # f64[n_tokens, n_texts, n_states]
        pairs = np.zeros_like(hmm.move)
        for t in range(texts.shape[1] - 1):
            seen = behind[t + 1] * hmm.emit[:, texts[:, t + 1]].T
            both = ahead[t][:, :, None] * hmm.move * seen[:, None, :]
            pairs += (both / both.sum((1, 2), keepdims=True)).sum(0)
        emit = np.full_like(hmm.emit, _SMOOTH)
        np.add.at(emit.T, texts.T, states)
        hmm = Hmm(_laws(states[0].sum(0) + _SMOOTH), _laws(pairs + _SMOOTH), _laws(emit))
    return hmm


def log_likelihood(hmm: Hmm, texts: NDArray[np.int64]) -> Floats:
    """Return f64[n_texts], the log-probability of each text."""
    law, total = np.tile(hmm.start, (len(texts), 1)), np.zeros(len(texts))
    for t in range(texts.shape[1]):
        law = law * hmm.emit[:, texts[:, t]].T
        total += np.log(law.sum(1))
        law = (law / law.sum(1, keepdims=True)) @ hmm.move
    return total


def _passes(hmm: Hmm, texts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the scaled forward and backward laws, each f64[n_tokens, n_texts, n_states]."""
    n_texts, n_tokens = texts.shape
    ahead, behind = np.ones((2, n_tokens, n_texts, len(hmm.start)))
    for t in range(n_tokens):
        before = hmm.start if t == 0 else ahead[t - 1] @ hmm.move
        ahead[t] = _laws(before * hmm.emit[:, texts[:, t]].T)
    for t in range(n_tokens - 2, -1, -1):
        behind[t] = _laws((behind[t + 1] * hmm.emit[:, texts[:, t + 1]].T) @ hmm.move.T)
    return ahead, behind


def _laws(weights: Floats) -> Floats:
    """Return weights divided by their sum along the last axis."""
    laws: Floats = weights / weights.sum(-1, keepdims=True)
    return laws


def chances(hmm: Hmm, form: Format, n_tokens: int) -> list[Floats]:
    """Return by n of 0 to n_tokens f64[n_states, n_places]: the chance to keep to the format with n tokens more."""
    emitted = hmm.emit @ form.by_class
    chances_left = [np.tile(form.accepts.astype(np.float64), (len(hmm.start), 1))]
    for _ in range(n_tokens):
        after = hmm.move @ chances_left[-1]
        chances_left.append(np.stack([(emitted * after[:, to]).sum(1) for to in form.moves], axis=1))
    return chances_left


def log_guide(hmm: Hmm, form: Format, law: Floats, place: int, left: Floats) -> Floats:
    """Return f64[n_vocab]: the log of the chance that a text keeps to the format, by its next token.

    Args:
        hmm: The hidden Markov model.
        law: f64[n_states], the law of the state that emits the next token.
        place: The place of the automaton.
        left: What chances() says for the tokens after the next one.
    """
    joint = law[:, None] * hmm.emit
    kept_mass = (joint * (hmm.move @ left)[:, form.moves[place][form.classes]]).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = np.log(kept_mass) - np.log(joint.sum(0))
    logs[kept_mass == 0] = -np.inf
    return logs


def write(texts: PartialTexts, hmm: Hmm, form: Format, n_tokens: int, params: SamplingParams, seed: int) -> PartialText:
    """Return a text of at most n tokens that keeps to the format.

    Args:
        texts: Who holds it; nothing was begun there, and its texts have at most n_tokens.
        hmm: Fitted to texts of the model.
        n_tokens: The most tokens, an end token among them.
        params: How tokens are drawn.
        seed: Its seed.

    Raises:
        DeadEndError: Nothing that is left keeps to the format.
    """
    text, noise, law, place = texts.begin(), Noise(seed), hmm.start, 0
    ahead = chances(hmm, form, n_tokens)
    for n in range(n_tokens):
        scores = text.logits + log_guide(hmm, form, law, place, ahead[n_tokens - n - 1])
        if not np.isfinite(scores).any():
            raise DeadEndError(
                "no token keeps to the format within the tokens allowed; allow more, or change the format"
            )
        seen: Sequence[int] = (*texts.prompt_ids, *text.token_ids)
        token = draw(scores.astype(np.float32), params, seen, noise, len(seen))
        place = int(form.moves[place, form.classes[token]])
        law = _laws(law * hmm.emit[:, token]) @ hmm.move
        (text,) = texts.advance([(text, token)])
        if text.ended is not None:
            break
    return text
