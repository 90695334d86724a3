"""min_tokens: a text has at least so many tokens, as no token that ends a text may come before.

Paper: none; the end tokens have the probability 0 at first
Option: `--method min-tokens:20`; the server's field `min_tokens`
For: clients that send it
Measured: nothing
Status: opt-in
"""

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.errors import OptionError, RequestError, argument
from edgedec.text_method import AskedText, TextMethod
from edgedec.tokenizer import Tokenizer
from edgedec_methods.predicate import AnyText


class MinTokens(TextMethod):
    """The method min_tokens."""

    takes = int

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._goes_on = np.array([not tokenizer.is_end(i) for i in range(tokenizer.n_vocab)], np.bool_)

    def constraint(self, value: object, text: AskedText) -> Constraint | None:
        """Return the constraint of a text of at least `value` tokens; None where nothing can end the text.

        Raises:
            RequestError: The value is no whole number from 0, or a grammar decides where the text ends.
        """
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise OptionError("min_tokens", value, "it must be a whole number from 0")
        if text.state is not None:
            raise RequestError(
                f"a grammar decides where the text ends, so {argument('min_tokens')} can't be kept; leave one out"
            )
        return Constraint(_Counted(self._goes_on, value)) if value and not text.request.sampling.ignore_end else None


class _Counted(AnyText):
    """The grammar of all texts of at least some tokens: implements edgedec.grammar.GrammarState."""

    def __init__(self, goes_on: NDArray[np.bool_], n_least: int) -> None:
        self._goes_on, self._allowed = goes_on, np.ones_like(goes_on)
        self._n_left = n_least

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], False for end tokens while the text is too short."""
        return self._goes_on if self._n_left > 0 else self._allowed

    def advance(self, token_id: int) -> bool:
        """Take a token and return True, unless it would end the text too early."""
        takes = super().advance(token_id) and bool(self.allowed()[token_id])
        self._n_left -= takes
        return takes

    def back(self, n_tokens: int) -> None:
        """Take back the last tokens."""
        self._n_left += n_tokens
