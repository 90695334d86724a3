"""The fixed schedule against its sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.schedule import schedule


def test_as_many_positions_are_committed_in_each_pass() -> None:
    """The most confident ones."""
    check(schedule(2), lambda passes: by_confidence(passes[-1])[:2])
    check(schedule(5), lambda passes: by_confidence(passes[-1])[:5])
