"""NAP's decoding against its sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.parallel import parallel
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the best position of each third of the block."""
    its, best = passes[-1], dict[int, int]()
    for i in by_confidence(its):
        best.setdefault(int(its.places[i]) // 4, i)
    return sorted(best.values())


def test_every_stretch_commits_its_best_position() -> None:
    """Those that have a masked one."""
    check(parallel(3), expected)
