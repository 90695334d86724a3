"""The fixed schedule against its sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.schedule import schedule


def test_as_many_positions_are_committed_in_each_pass() -> None:
    """The most confident ones."""
    for n in (2, 5):
        check(schedule(n), lambda passes: by_confidence(passes[-1])[:n])
