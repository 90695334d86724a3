"""CD4LM's decoding against its sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.adaptive import adaptive


def test_a_few_sure_positions_are_committed() -> None:
    """At most three, with 0.8 or more."""
    check(adaptive(3), lambda passes: [i for i in by_confidence(passes[-1])[:3] if passes[-1].confidences[i] >= 0.8])
