"""The threshold's rule against its sentence."""

from support.decoding.denoising_passes import check

from edgedec_methods.diffusion.threshold import threshold


def test_positions_with_that_probability_are_committed() -> None:
    """All of them, and the best one where there is none."""
    check(threshold(0.9), lambda passes: [i for i, p in enumerate(passes[-1].confidences) if p >= 0.9])
