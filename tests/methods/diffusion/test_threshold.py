"""The threshold's rule against its sentence."""

import numpy as np
from support.decoding.denoising_passes import check, histories

from edgedec_methods.diffusion.threshold import threshold


def test_positions_with_that_probability_are_committed() -> None:
    """All of them, and the best one where there is none."""
    its = next(histories(1))[0]
    least = float(np.sort(its.confidences)[-2])
    assert len(threshold(least)([its])) == 2  # a probability that is the threshold is enough
    check(threshold(0.9), lambda passes: [i for i, p in enumerate(passes[-1].confidences) if p >= 0.9])
