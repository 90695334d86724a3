"""The contract of denoising: which masked positions of a block get their tokens after a pass, and what it evaluates.

An entry point `denoising_rule.NAME` of `edgedec.sessions` names a RuleKind or a LayoutKind. A rule is called
after each pass of one block, and looks at nothing but the passes. One that revises also looks at positions that it has
committed, and may change them or mask them again; a block is shown when a pass of it changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec import plugins
from edgedec.errors import OptionError


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward over a block said of its masked positions.

    Attributes:
        size: Positions of the block.
        places: int64[n], the masked positions within the block, ascending; of a rule that revises all new ones.
        tokens: int64[n], the token that each of them would get.
        confidences: f64[n], the model's probabilities of these tokens.
        logits: f32[n, n_vocab], the rows that they were drawn from; none of a pass before the latest one.
        ends: bool[n], whether the token ends a text.
        pieces: The bytes that each token adds to the text.
        committed: int64[n], of a rule that revises: the token that stands at each position, MASKED at masked ones.
    """

    size: int
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    confidences: NDArray[np.float64]
    logits: NDArray[np.float32]
    ends: NDArray[np.bool_]
    pieces: tuple[bytes, ...]
    committed: NDArray[np.int64] | None = None

    def surest(self, n: int) -> NDArray[np.bool_]:
        """Return which positions are the `n` most confident ones, of equal ones the first."""
        return np.isin(np.arange(len(self.places)), np.argsort(-self.confidences, kind="stable")[:n])

    def first(self, n: int) -> "Pass":
        """Return what it says of the first `n` positions of the block, which then has no more."""
        inside = slice(int((self.places < n).sum()))
        places, tokens, confidences = self.places[inside], self.tokens[inside], self.confidences[inside]
        return Pass(n, places, tokens, confidences, self.logits[inside], self.ends[inside], self.pieces[inside])

    def chosen(self, which: NDArray[np.bool_]) -> dict[int, int]:
        """Return the tokens of some of the positions by position; of none, that of the most confident one."""
        if not which.any():
            which = np.arange(len(self.places)) == int(self.confidences.argmax())
        return dict(zip(self.places[which].tolist(), self.tokens[which].tolist(), strict=True))


MASKED = -1
Chosen = Mapping[int, int]
"""The positions to commit with their tokens, at least one of those that are masked; MASKED masks one again."""

Rule = Callable[[Sequence[Pass]], Chosen]
"""(the passes of a block so far, the latest last) -> what is committed."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """A text before a pass, in a model whose rows see the whole text.

    Attributes:
        ids: The tokens of all positions, the mask where none is committed.
        start, end: The block that is being denoised.
        masked: The masked positions of the block, ascending.
        observed: The positions whose rows the pass looks at.
        n_passes: The passes over the block so far.
        held: The positions whose keys and values the last pass has left, in the order of slots.
    """

    ids: Sequence[int]
    start: int
    end: int
    masked: Sequence[int]
    observed: frozenset[int]
    n_passes: int
    held: Sequence[int]


Layout = Callable[[Canvas], tuple[list[int], list[int]]]
"""(a text) -> positions whose keys and values of an earlier pass will do, in the order of slots, and those to evaluate.

All wanted positions are evaluated. What is in neither list is left out, and no row sees it.
"""


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A kind of rules with one number, or with what a file holds.

    Attributes:
        choose: (passes, number) -> what is committed, as Rule.
        default: The number where none is given.
        least, most: Between which it must be.
        revises: Passes look at committed positions, too.
        ends: (first pass over a block, number) -> how many of its positions the block has; the next one begins behind
            them. None where all blocks have one size.
        looks_ahead: The number says how many later states of a block are evaluated beside the current one.
        read: Returns what stands in the number's place for the path of a file; None where it is a number.
    """

    choose: Callable[[Sequence[Pass], Any], Chosen]
    default: float = 0.0
    least: float = 0.0
    most: float = 0.0
    revises: bool = False
    ends: Callable[[Pass, Any], int] | None = None
    looks_ahead: bool = False
    read: Callable[[str], Any] | None = None


@dataclass(frozen=True, slots=True)
class LayoutKind:
    """A kind of layouts with one number from `least` to `most`: (text, number) -> the two lists of Layout."""

    lay_out: Callable[[Canvas, float], tuple[list[int], list[int]]]
    default: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Denoising:
    """What a text such as "threshold:0.8,window:64" names.

    Attributes:
        n_ahead: How many states ahead are evaluated.
        revises: Whether the rule looks at committed positions.
        ends: (first pass over a block) -> how many of its positions it has; None where all blocks have one size.
        layout: What a pass evaluates; None for everything.
    """

    rule: Rule
    n_ahead: int = 0
    revises: bool = False
    ends: Callable[[Pass], int] | None = None
    layout: Layout | None = None


def denoising_named(text: str) -> Denoising:
    """Return the rule and the layout that a text names, a rule first.

    Raises:
        OptionError: Nothing has that name, or its number is none or out of range.
    """
    first, comma, second = text.partition(",")
    kind, value = _named(text, first)
    if not isinstance(kind, RuleKind):
        raise OptionError("denoise", text, "a rule comes first, as in threshold,window:64")
    n_ahead, ends = int(value) if kind.looks_ahead else 0, kind.ends
    moved = None if ends is None else lambda its: ends(its, value)
    rule = Denoising(lambda passes: kind.choose(passes, value), n_ahead, kind.revises, moved)
    if comma:
        layout, number = _named(text, second)
        if kind.revises:
            raise OptionError("denoise", text, f"{first} looks at all positions; leave out what a pass evaluates")
        if not isinstance(layout, LayoutKind):
            raise OptionError("denoise", text, "one rule can be given; behind it comes what a pass evaluates")
        rule = replace(rule, layout=lambda canvas: layout.lay_out(canvas, number))
    return rule


_FORMER = {"ada_block": "lines"}
"""Names of earlier versions, and what has their place."""


def _named(text: str, part: str) -> tuple[RuleKind | LayoutKind, Any]:
    """Return the kind that a part of the text names, and its number, or what its file holds."""
    name, colon, number = part.partition(":")
    if not plugins.is_installed(plugins.DENOISING_RULES, name):
        if (now := _FORMER.get(name)) is not None:
            raise OptionError("denoise", text, f"{name} is called {now} now: it must be {now}{colon}{number}")
        names = ", ".join(plugins.plugins(plugins.DENOISING_RULES))
        raise OptionError("denoise", text, f"it must be one of {names}, perhaps with :NUMBER")
    kind: RuleKind | LayoutKind = plugins.load_plugin(plugins.DENOISING_RULES, name)
    if isinstance(kind, RuleKind) and kind.read is not None:
        return kind, kind.read(number)
    try:
        value = float(number) if colon else kind.default
    except ValueError:
        value = np.nan
    if not kind.least <= value <= kind.most:
        raise OptionError("denoise", text, f"the number of {name} must be from {kind.least:g} to {kind.most:g}")
    return kind, value
