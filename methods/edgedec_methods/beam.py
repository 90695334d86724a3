"""Beam search: of the texts of each length, the most probable ones go on.

The two halves of a step, `next_of_beam` and `carried_out`, are public for searches that hold several beams.

Paper: The HARPY Speech Recognition System, Lowerre 1976
Option: `--method beam:4`, with the number of beams
For: the most probable text, where greedy decoding is not sure to find it
Measured: 26 of 30 word problems right with 4 beams for 59 plain steps; the likeliest of 4 texts has 26 for 60, too
    (`python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind arithmetic --method beam4 --tasks
    30`)
Status: opt-in
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgedec.choosing.partial_texts import PartialText, PartialTexts, best_tokens, row_log_probs
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError

MOST_BEAMS = 64


@dataclass(frozen=True, slots=True)
class Beam:
    """A text of a beam, with the score by which it was chosen there.

    Attributes:
        score: The sum of its log-probabilities, less the penalties of its tokens.
    """

    text: PartialText
    score: float

    def rank(self, length_penalty: float) -> float:
        """Return the score by which whole texts are compared: score / n_tokens^length_penalty."""
        return self.score / float(max(1, self.text.n_scored) ** length_penalty)


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token that a text of a beam goes on with."""

    parent: Beam
    token_id: int
    score: float


def beam_search(texts: PartialTexts, n_beams: int, *, length_penalty: float = 1.0) -> list[Beam]:
    """Return the texts of the beam by rank, the best first.

    A text that has ended keeps its place in the beam for as long as it ranks among the best. The search ends when all
    texts of the beam have ended. With one beam it is greedy decoding.

    Args:
        texts: Who holds the texts; nothing was begun there.
        n_beams: Texts of the beam, 1 to MOST_BEAMS.
        length_penalty: The power of the number of tokens that a text's score is divided by when whole texts are ranked;
            0 ranks by probability, which prefers short texts.

    Raises:
        OptionError: A value is out of range.
    """
    require_beams(n_beams, length_penalty)
    beam = [Beam(texts.begin(), 0.0)]
    while any(each.text.ended is None for each in beam):
        (beam,) = carried_out(texts, [beam], [next_of_beam(beam, n_beams, length_penalty)])
    return ranked(beam, length_penalty)


def require_beams(n_beams: int, length_penalty: float) -> None:
    """Raise OptionError where the number of beams or the power of the length is out of range."""
    if not 1 <= n_beams <= MOST_BEAMS:
        raise OptionError("n_beams", n_beams, f"it must be from 1 to {MOST_BEAMS}")
    if not 0 <= length_penalty <= 10:
        raise OptionError("length_penalty", length_penalty, "it must be from 0 to 10")


def ranked(beam: Sequence[Beam], length_penalty: float) -> list[Beam]:
    """Return a beam's texts by rank, the best first."""
    return sorted(beam, key=lambda each: -each.rank(length_penalty))


def next_of_beam(
    beam: Sequence[Beam], width: int, length_penalty: float, penalties: Mapping[int, float] | None = None
) -> list[Beam | NextToken]:
    """Return what a beam holds next: texts that have ended, and tokens to go on with.

    Ended texts and growing ones are compared by rank. Of equals, the one whose parent comes first
    stays, then the lower token.

    Args:
        beam: The texts that it holds now.
        width: How many it holds at most.
        length_penalty: As of beam_search().
        penalties: By token, what it loses.
    """
    choices: list[tuple[float, Beam | NextToken]] = []
    for each in beam:
        if each.text.ended is not None:
            choices.append((each.rank(length_penalty), each))
            continue
        n = each.text.n_scored + 1
        row = row_log_probs(each.text.logits)
        if penalties:
            row[np.fromiter(penalties.keys(), np.int64)] -= np.fromiter(penalties.values(), np.float64)
        for token_id in best_tokens(row, width):
            score = each.score + float(row[token_id])
            choices.append((score / n**length_penalty, NextToken(each, token_id, score)))
    choices.sort(key=lambda pair: -pair[0])
    return [each for _, each in choices[:width]]


def carried_out(
    texts: PartialTexts, beams: Sequence[Sequence[Beam]], plans: Sequence[Sequence[Beam | NextToken]]
) -> list[list[Beam]]:
    """Return several beams after one forward for all; texts that nobody goes on with are dropped.

    Args:
        texts: Who holds the texts.
        beams: What each beam holds now.
        plans: What each beam holds next.
    """
    choices = [each for plan in plans for each in plan if isinstance(each, NextToken)]
    used = {choice.parent.text.branch for choice in choices}
    used |= {each.text.branch for plan in plans for each in plan if isinstance(each, Beam)}
    texts.drop(*(each.text for beam in beams for each in beam if each.text.branch not in used))
    grown = iter(texts.advance([(choice.parent.text, choice.token_id) for choice in choices]))
    return [[each if isinstance(each, Beam) else Beam(next(grown), each.score) for each in plan] for plan in plans]


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    best = tuple(beam.text for beam in beam_search(texts, run.n))
    return SearchResult(best, 0, f"its mean log-probability of a token, {best[0].mean_logprob:.3f}, is the highest")


BEAM = Search(_run, n=4, most=64, n_texts=lambda n: 2 * n)
"""`n` is the number of beams; the text with the highest mean log-probability is chosen."""
