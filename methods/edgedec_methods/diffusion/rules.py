"""The contract of a denoising rule: which masked positions of a block get their tokens after a pass.

An entry point of `edgedec.denoising_rules` names a RuleKind. A rule is a pure function of the passes of one block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec import plugins
from edgedec.errors import OptionError


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward over a block said of its masked positions.

    Attributes:
        size: Positions of the block.
        places: int64[n], the masked positions within the block, ascending.
        tokens: int64[n], the token that each of them would get.
        confidences: f64[n], the model's probabilities of these tokens.
        logits: f32[n, n_vocab], the rows that they were drawn from.
    """

    size: int
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    confidences: NDArray[np.float64]
    logits: NDArray[np.float32]

    def chosen(self, which: NDArray[np.bool_]) -> dict[int, int]:
        """Return the tokens of some of the positions by position; of none, that of the most confident one."""
        if not which.any():
            which = np.arange(len(self.places)) == int(self.confidences.argmax())
        return dict(zip(self.places[which].tolist(), self.tokens[which].tolist(), strict=True))


Rule = Callable[[Sequence[Pass]], Mapping[int, int]]
"""(the passes of a block so far, the latest last) -> the positions to commit, at least one, with their tokens."""


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A kind of rules with one number.

    Attributes:
        make: Returns the rule of a number; it is called for each text.
        default: The number where none is given.
        least, most: Between which it must be.
        looks_ahead: The number says how many later states of a block are evaluated beside the current one.
    """

    make: Callable[[float], Rule]
    default: float
    least: float
    most: float
    looks_ahead: bool = False


def rule_named(text: str) -> tuple[Callable[[], Rule], int]:
    """Return what makes the rule that a text such as "threshold:0.8" names, and how many states ahead it looks.

    Raises:
        OptionError: No rule has that name, or the number is none or out of range.
    """
    name, colon, number = text.partition(":")
    names = plugins.plugins(plugins.DENOISING_RULES)
    if name not in names:
        raise OptionError("denoise", text, f"it must be one of {', '.join(names)}, perhaps with :NUMBER")
    kind: RuleKind = plugins.load_plugin(plugins.DENOISING_RULES, name)
    try:
        value = float(number) if colon else kind.default
    except ValueError:
        value = np.nan
    if not kind.least <= value <= kind.most:
        raise OptionError("denoise", text, f"the number of {name} must be from {kind.least:g} to {kind.most:g}")
    return lambda: kind.make(value), int(value) if kind.looks_ahead else 0
