"""The threshold's rule against its sentence."""

from support.decoding.denoising_passes import check

from edgedec_methods.diffusion.threshold import threshold


def test_positions_with_that_probability_are_committed() -> None:
    """At several thresholds; 0 commits everything."""
    for least in (0.5, 0.9):
        check(threshold(least), lambda passes: [i for i, p in enumerate(passes[-1].confidences) if p >= least])
