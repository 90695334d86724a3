"""AWRS: constraints that no mask can say; a function is asked about one text after the other until it takes one.

Tokens are tried in the order of a draw without replacement, so the first one that is taken has the law of the model's
distribution, renormalised over all that would be taken: AWRS (Lipkin et al. 2025, arXiv:2504.05410). The text is the
one that a mask of the same tokens would give. One test more gives an unbiased estimate of the probability Z of all
tokens that would be taken: with p of the taken token, p_out of those that were refused, and the next token in order,

    Z ~ p + (1 - p_out - p) * (whether the next token is taken, too)

Paper: AWRS, Lipkin et al. 2025, arXiv:2504.05410
Option: Python only, the request option `predicate=FUNCTION`; schemas with uniqueItems need it
For: what a program can check and no grammar says
Measured: a function is asked 2.5 times a token where texts must have no e, 4.0 times for words of at most five letters,
    61 times (once 2,261) for no word twice; a mask of smollm2-135m asks 49,152 times (`python
    benchmarks/answers/predicate_tests.py smollm2-135m --texts 6`)
Status: opt-in
"""

import math
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint, DrawPlace
from edgedec.errors import DeadEndError, RequestError, argument
from edgedec.grammar import GrammarState, Predicate
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.sequence import COUPLED
from edgedec.text_method import AskedText, TextMethod
from edgedec.tokenizer import Tokenizer

_MOST_TESTS = 20_000  # for one token
_LEFT_OVER = 1e-9  # a smaller probability that is left is rounding, and not worth a test


class ByPredicate(TextMethod):
    """The request option predicate, and what a grammar's own predicate needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._any_text: AnyText | None = None
        self._lock = Lock()

    def constraint(self, value: Predicate | None, text: AskedText) -> Constraint | None:
        """Return a constraint that asks a function beside the text's grammar, and the grammar's own where it has one.

        Raises:
            RequestError: The value is no function, or the request's rule of verification needs a mask.
        """
        state, rule = text.state, text.request.rule
        if value is None:
            inner = None if state is None else state.predicate
            return None if state is None or inner is None else PredicateConstraint(state, inner, self._tokenizer)
        if rule != COUPLED:
            raise RequestError(f"with a predicate, verify must be {COUPLED!r}, found {rule!r}: a predicate has no mask")
        if not callable(value):
            raise RequestError(
                f"{argument('predicate')} is a {type(value).__name__}; it must be a function of a text and a bool"
            )
        if state is None:
            with self._lock:
                state = self._any_text = self._any_text or AnyText(self._tokenizer)
        asked = value if state.predicate is None else both(state.predicate, value)
        return PredicateConstraint(state, asked, self._tokenizer)


class AnyText:
    """The grammar of all texts: implements edgedec.grammar.GrammarState."""

    is_complete = False
    may_end = True
    predicate = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_vocab)
        self._allowed = np.array([bool(tokenizer.piece(i)) or tokenizer.is_end(i) for i in ids], np.bool_)

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], True for every token but control tokens that end nothing."""
        return self._allowed

    def forced(self) -> Sequence[int]:
        """Return no token."""
        return ()

    def advance(self, token_id: int) -> bool:
        """Return whether the token is allowed."""
        return 0 <= token_id < len(self._allowed) and bool(self._allowed[token_id])

    def back(self, n_tokens: int) -> None:
        """Do nothing: a text's tokens change nothing here."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


class PredicateConstraint(Constraint):
    """A constraint whose texts a function is asked about, one by one, beside the mask of a grammar.

    Args:
        state: The state of the grammar, or AnyText.
        predicate: The function.
    """

    def __init__(self, state: GrammarState, predicate: Predicate, tokenizer: Tokenizer) -> None:
        super().__init__(state)
        self._predicate = predicate
        self._tokenizer = tokenizer
        self._text = b""
        self._answers: dict[tuple[str, bool], bool] = {}  # until a token is added to the text
        self._weights: dict[tuple[int, ...], float] = {}  # by path: log of the estimate of Z under the grammar's mask

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        return super().may_end and self._takes(self._text, is_end=True)

    def choose(self, place: DrawPlace, path: Sequence[int]) -> int:
        """Return the first token in order that the grammar and the function take, and estimate Z.

        Raises:
            DeadEndError: They take none.
            RequestError: The function failed.
        """
        best: tuple[int, float] | None = None
        out, left = 0.0, 1.0
        for n, (token_id, p) in enumerate(place.in_order(super().masked(place.logits, path))):
            if n == _MOST_TESTS:
                break
            if best is not None:
                more = left - best[1]
                z = best[1] + (more if more > _LEFT_OVER and p > 0 and self._takes_token(path, token_id) else 0.0)
                self._weights[tuple(path)] = self._log(z, place)
                return best[0]
            if self._takes_token(path, token_id):
                best, left = (token_id, p), 1.0 - out
            else:
                out += p
        if best is not None:  # it was the last one
            self._weights[tuple(path)] = self._log(best[1], place)
            return best[0]
        raise DeadEndError(
            f"no token keeps to the constraint after {self._text[-40:].decode(errors='replace')!r}: {_MOST_TESTS:,} "
            "tokens at most were tried; a text that is allowed to go on must have a token to go on with"
        )

    def log_mass(
        self, logits: NDArray[np.float32], path: Sequence[int], temperature: float, ops: LogitOps = NUMPY_ROW_OPS
    ) -> float:
        """Return the grammar's log Z plus the log of the estimated Z of the function; NaN at temperature 0."""
        return super().log_mass(logits, path, temperature, ops) + self._weights.get(tuple(path), math.nan)

    def masked(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """Raise RequestError: no mask says what the function takes."""
        raise RequestError("a predicate has no mask, which this rule of verification needs; use verify='coupled'")

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Return whether the grammar and the function take a token after the text and `path`."""
        return super().allows(path, token_id) and self._takes_token(path, token_id)

    def commit(self, token_id: int) -> int:
        """Add the chosen token to the text and return it."""
        self._answers.clear()
        self._weights.clear()
        if not self._tokenizer.is_end(token_id):
            self._text += self._tokenizer.piece(token_id)
        return super().commit(token_id)

    @staticmethod
    def _log(z: float, place: DrawPlace) -> float:
        """Return log Z; NaN where the order was not drawn, so that Z is not estimated without bias."""
        return math.nan if place.params.greedy else math.log(z) if z > 0 else -math.inf

    def _takes_token(self, path: Sequence[int], token_id: int) -> bool:
        """Return whether the function takes the text with the tokens of `path` and one more."""
        before = self._text + b"".join(self._tokenizer.piece(i) for i in path)
        if self._tokenizer.is_end(token_id):
            return self._takes(before, is_end=True)
        return self._takes(before + self._tokenizer.piece(token_id), is_end=False)

    def _takes(self, data: bytes, *, is_end: bool) -> bool:
        text = data.decode(errors="replace")
        if (text, is_end) not in self._answers:
            try:
                self._answers[text, is_end] = bool(self._predicate(text, is_end))
            except Exception as error:
                raise RequestError(f"the predicate failed: {type(error).__name__}: {error}") from error
        return self._answers[text, is_end]


def both(one: Predicate, other: Predicate) -> Predicate:
    """Return a predicate that takes what two others take."""
    return lambda text, is_end: one(text, is_end) and other(text, is_end)
