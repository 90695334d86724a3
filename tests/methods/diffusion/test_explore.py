"""ETE's choice against its sentence."""

from support.decoding.denoising_passes import check, entropy_of

from edgedec_methods.diffusion.explore import explore
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the positions with 0.95, or those with the lowest and the highest entropy."""
    its = passes[-1]
    found = [entropy_of(its, i) for i in range(len(its.places))]
    extremes = {found.index(min(found)), found.index(max(found))}
    return [i for i, p in enumerate(its.confidences) if p >= 0.95] or sorted(extremes)


def test_the_least_sure_position_is_tried_where_none_is_sure() -> None:
    """Beside the surest."""
    check(explore(0.95), expected)
