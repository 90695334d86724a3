"""Diverse Beam Search: a beam in groups, each of which avoids the tokens that earlier groups took.

The groups are searched one after the other at each position: a token loses `penalty` for each time that an earlier
group took it there, so the groups say different things.

Paper: Diverse Beam Search, Vijayakumar et al. 2016, arXiv:1610.02424
Option: `--method diverse:8`, with the groups of one beam each
For: code with tests, which choose among the beams
Measured: 15 of 30 functions right for 60 plain steps; 8 drawn texts and the same tests have 16 of these for 67 (`python
    benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind functions --method diverse8 --tasks 30`)
Status: opt-in
"""

from collections import Counter

from edgedec.choosing.partial_texts import PartialTexts
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError
from edgedec_methods.beam import Beam, NextToken, carried_out, next_of_beam, ranked, require_beams
from edgedec_methods.step_scores import elected

PENALTY = 0.5
"""What a token loses for each earlier group that took it: lambda of the paper, from its range."""


def diverse_beams(
    texts: PartialTexts, n_beams: int, *, n_groups: int, penalty: float = PENALTY, length_penalty: float = 1.0
) -> list[Beam]:
    """Return the texts of the beam, the best first: by group, then by rank.

    With one group, or with a penalty of 0, it is plain beam search, in each group.

    Args:
        texts: Who holds the texts; nothing was begun there.
        n_beams: Texts of the beam, 1 to MOST_BEAMS.
        n_groups: Groups of the beam; n_beams is a multiple of it.
        penalty: What a token loses for each earlier group that took it at the same position, from 0 (lambda of the
            paper, with its Hamming diversity).
        length_penalty: As of edgedec_methods.beam.beam_search().

    Raises:
        OptionError: A value is out of range.
    """
    require_beams(n_beams, length_penalty)
    if not 1 <= n_groups <= n_beams or n_beams % n_groups:
        raise OptionError("n_groups", n_groups, f"it must divide the number of beams, {n_beams}")
    if not 0 <= penalty < 1e6:
        raise OptionError("penalty", penalty, "it must be from 0, and below 1e6")
    root = texts.begin()
    groups = [[Beam(root if g == 0 else texts.fork(root), 0.0)] for g in range(n_groups)]
    while any(beam.text.ended is None for group in groups for beam in group):
        taken: Counter[int] = Counter()
        plans: list[list[Beam | NextToken]] = []
        for group in groups:
            lost = {token_id: penalty * count for token_id, count in taken.items()}
            plans.append(next_of_beam(group, n_beams // n_groups, length_penalty, lost))
            taken.update(each.token_id for each in plans[-1] if isinstance(each, NextToken))
        groups = carried_out(texts, groups, plans)
    return [beam for group in groups for beam in ranked(group, length_penalty)]


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    beams = diverse_beams(texts, run.n, n_groups=run.n, penalty=PENALTY if run.n > 1 else 0.0)
    best = [beam.text for beam in beams]
    return elected(texts, best, [] if run.scorer is None else run.scorer(texts, best), run)


DIVERSE = Search(_run, n=4, most=64, n_texts=lambda n: 2 * n, scored="may")
"""`n` is the number of groups; the text with the caller's highest score is chosen, else the vote."""
