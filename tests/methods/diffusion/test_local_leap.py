"""LocalLeap against its sentence."""

from support.decoding.denoising_passes import check

from edgedec_methods.diffusion.local_leap import local_leap
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return anchors, and their neighbours with 0.6."""
    its = passes[-1]
    anchors = [place for place, p in zip(its.places, its.confidences, strict=True) if p >= 0.9]
    near = [any(abs(place - anchor) <= 4 for anchor in anchors) for place in its.places]
    return [i for i, p in enumerate(its.confidences) if p >= 0.9 or (near[i] and p >= 0.6)]


def test_neighbours_of_an_anchor_need_less() -> None:
    """Up to four places away."""
    check(local_leap(0.6), expected)
