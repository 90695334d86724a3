"""dParallel's decoding against its sentence."""

from support.decoding.denoising_passes import check, entropy_of

from edgedec_methods.diffusion.entropy import entropy
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the positions below 0.5 nats, or the one with the lowest entropy."""
    found = [entropy_of(passes[-1], i) for i in range(len(passes[-1].places))]
    return [i for i, h in enumerate(found) if h < 0.5] or [found.index(min(found))]


def test_positions_of_low_entropy_are_committed() -> None:
    """Where there is none, the one with the lowest."""
    check(entropy(0.5), expected)
