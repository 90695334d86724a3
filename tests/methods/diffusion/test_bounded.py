"""BACD against its formula."""

import itertools

from support.decoding.denoising_passes import check

from edgedec_methods.diffusion.bounded import bounded
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the positions with the mean of those that were committed, or with the greatest in the first pass."""
    its, committed = passes[-1], []
    for one, then in itertools.pairwise(passes):
        left = {*then.places.tolist()}
        committed += [p for place, p in zip(one.places, one.confidences, strict=True) if place not in left]
    committed = committed or [max(its.confidences)]
    bound = min(max(sum(committed) / len(committed), 0.6), 0.9)
    return [i for i, p in enumerate(its.confidences) if p >= bound]


def test_what_was_committed_sets_the_bound() -> None:
    """Between two bounds."""
    check(bounded(0.6), expected)
