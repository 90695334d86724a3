"""WeDLM's choice against its sentence."""

from support.decoding.denoising_passes import check, entropy_of

from edgedec_methods.diffusion.near_first import near_first
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the positions below 0.4, or the lowest one."""
    its = passes[-1]
    found = [entropy_of(its, i) + 0.02 * (place - its.places[0]) for i, place in enumerate(its.places.tolist())]
    return [i for i, h in enumerate(found) if h < 0.4] or [found.index(min(found))]


def test_a_position_far_behind_has_to_be_surer() -> None:
    """By 0.02 nats for each place."""
    check(near_first(0.4), expected)
