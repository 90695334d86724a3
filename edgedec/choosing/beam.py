"""Beam search and Diverse Beam Search (Vijayakumar et al. 2016, arXiv:1610.02424).

A beam holds the most probable texts of each length. The diverse form splits the beam into groups that are searched one
after the other at each position: a token loses `penalty` for each time that an earlier group took it there, so the
groups say different things.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgedec.choosing.partial_texts import PartialText, PartialTexts, best_tokens, row_log_probs
from edgedec.errors import OptionError

MOST_BEAMS = 64


@dataclass(frozen=True, slots=True)
class Beam:
    """A text of a beam, with the score by which it was chosen there.

    Attributes:
        text: The text.
        score: The sum of its log-probabilities, less the penalties of its tokens.
    """

    text: PartialText
    score: float

    def rank(self, length_penalty: float) -> float:
        """Return the score by which whole texts are compared: score / n_tokens^length_penalty."""
        return self.score / float(max(1, self.text.n_scored) ** length_penalty)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A token that a text of a group may go on with."""

    parent: Beam
    token_id: int
    score: float


def beam_search(
    texts: PartialTexts, n_beams: int, *, n_groups: int = 1, penalty: float = 0.0, length_penalty: float = 1.0
) -> list[Beam]:
    """Return the texts of the beam, the best first: by group, then by rank.

    A text that has ended keeps its place in the beam for as long as it ranks among the best of its group. The search
    ends when all texts of the beam have ended. With one group, or with a penalty of 0, it is plain beam search, in each
    group; with one beam it is greedy decoding.

    Args:
        texts: Who holds the texts; nothing was begun there.
        n_beams: Texts of the beam, 1 to MOST_BEAMS.
        n_groups: Groups of the beam; n_beams is a multiple of it.
        penalty: What a token loses for each earlier group that took it at the same position, from 0 (lambda of the
            paper, with its Hamming diversity).
        length_penalty: The power of the number of tokens that a text's score is divided by when whole texts are ranked;
            0 ranks by probability, which prefers short texts.

    Raises:
        OptionError: A value is out of range.
    """
    _require(n_beams, n_groups, penalty, length_penalty)
    width = n_beams // n_groups
    root = texts.begin()
    groups = [[Beam(root if g == 0 else texts.fork(root), 0.0)] for g in range(n_groups)]
    while any(beam.text.ended is None for group in groups for beam in group):
        taken: Counter[int] = Counter()
        plans = [_plan(group, width, taken, penalty, length_penalty) for group in groups]
        groups = _carried_out(texts, groups, plans)
    return [beam for group in groups for beam in sorted(group, key=lambda each: -each.rank(length_penalty))]


def _require(n_beams: int, n_groups: int, penalty: float, length_penalty: float) -> None:
    if not 1 <= n_beams <= MOST_BEAMS:
        raise OptionError("n_beams", n_beams, f"it must be from 1 to {MOST_BEAMS}")
    if not 1 <= n_groups <= n_beams or n_beams % n_groups:
        raise OptionError("n_groups", n_groups, f"it must divide the number of beams, {n_beams}")
    if not 0 <= penalty < 1e6:
        raise OptionError("penalty", penalty, "it must be from 0, and below 1e6")
    if not 0 <= length_penalty <= 10:
        raise OptionError("length_penalty", length_penalty, "it must be from 0 to 10")


def _plan(
    group: Sequence[Beam], width: int, taken: Counter[int], penalty: float, length_penalty: float
) -> list[Beam | _Choice]:
    """Return what a group holds next: texts that have ended, and tokens to go on with; note the tokens in `taken`.

    Ended texts and growing ones are compared by rank. Of equals, the one whose parent comes first
    stays, then the lower token.
    """
    found: list[tuple[float, Beam | _Choice]] = []
    for beam in group:
        if beam.text.ended is not None:
            found.append((beam.rank(length_penalty), beam))
            continue
        n = beam.text.n_scored + 1
        row = row_log_probs(beam.text.logits)
        if penalty and taken:
            ids = np.fromiter(taken.keys(), np.int64)
            row[ids] -= penalty * np.fromiter(taken.values(), np.float64)
        for token_id in best_tokens(row, width):
            score = beam.score + float(row[token_id])
            found.append((score / n**length_penalty, _Choice(beam, token_id, score)))
    found.sort(key=lambda pair: -pair[0])
    kept = [each for _, each in found[:width]]
    taken.update(each.token_id for each in kept if isinstance(each, _Choice))
    return kept


def _carried_out(
    texts: PartialTexts, groups: Sequence[Sequence[Beam]], plans: Sequence[Sequence[Beam | _Choice]]
) -> list[list[Beam]]:
    """Return the groups after one forward for all; texts that nobody goes on with are dropped."""
    choices = [each for plan in plans for each in plan if isinstance(each, _Choice)]
    used = {choice.parent.text.branch for choice in choices}
    used |= {each.text.branch for plan in plans for each in plan if isinstance(each, Beam)}
    texts.drop(*(beam.text for group in groups for beam in group if beam.text.branch not in used))
    grown = iter(texts.advance([(choice.parent.text, choice.token_id) for choice in choices]))
    return [[each if isinstance(each, Beam) else Beam(next(grown), each.score) for each in plan] for plan in plans]
