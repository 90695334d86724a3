"""What an option of a request brings to its texts: a constraint, or an early end.

Packages bring methods by entry points of `edgedec.text_methods`. The options json_close, predicate, futures and
stop_unsure are such methods, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.grammar import Grammar, GrammarState
from edgedec.logit_ops import LogitOps
from edgedec.model_card import ModelCard
from edgedec.sequence import FinishReason, Request


@dataclass(frozen=True, slots=True)
class AskedText:
    """A text that is about to be begun, as a method of `edgedec.text_methods` sees it.

    Attributes:
        request: What is generated, with the names and values of all its methods.
        grammar: The grammar that the text keeps to, or None.
        state: The grammar's state before the first token; None without a grammar.
        fingerprint: The model's.
    """

    request: Request
    grammar: Grammar | None
    state: GrammarState | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EndBefore:
    """Says that a text ends before a token, which is no part of it.

    Attributes:
        reason: Why.
        chance: The token's estimated chance to be right, where the text ends because that is too small.
        note: A sentence for a person about that; may be empty.
    """

    reason: FinishReason
    chance: float | None = None
    note: str = ""


class EarlyEnd(Protocol):
    """Ends a text before a token that was drawn."""

    @property
    def note(self) -> str:
        """What a person should know of it, for the statistics; may be empty."""

    def before(self, row: NDArray[np.float32], token_id: int, ops: LogitOps) -> EndBefore | None:
        """Return why the text ends before a token that was drawn from a row of logits; None where it goes on."""


class TextMethod:
    """What an option of a request brings to the texts of one model; each function does nothing until it is overridden.

    An entry point of `edgedec.text_methods` names a factory `(Tokenizer) -> TextMethod`. A request asks for it by
    `methods={NAME: value}`; edgedec's own options json_close, predicate, futures and stop_unsure are short for that.

    Attributes:
        takes: The type of the value, where a person may give it by `--method NAME:VALUE`.
    """

    takes: ClassVar[type[bool | float] | None] = None

    def draw(self, value: Any) -> Mapping[str, float]:
        """Return options of the draw, and the values that they have in place of the model's own defaults."""
        return {}

    def constraint(self, value: Any, text: AskedText) -> Constraint | None:
        """Return the constraint of one text; None where that is left to the text's grammar.

        Raises:
            RequestError: The value, or another option of the request, does not go with the method.
        """
        return None

    def early_end(self, value: Any, card: ModelCard) -> EarlyEnd | None:
        """Return what may end one text early; None where nothing does."""
        return None
