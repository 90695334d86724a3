"""The bound of entropies against its sentence."""

from support.decoding.denoising_passes import check, entropy_of

from edgedec_methods.diffusion.entropy_bound import entropy_bound
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the most positions, from the surest on, whose entropies but the greatest sum to at most 0.5 nats."""
    found = sorted((entropy_of(passes[-1], i), i) for i in range(len(passes[-1].places)))
    n = max(n for n in range(1, len(found) + 1) if sum(h for h, _ in found[: n - 1]) <= 0.5)
    return [i for _, i in found[:n]]


def test_the_surest_positions_within_the_bound_are_committed() -> None:
    """The greatest of their entropies does not count."""
    check(entropy_bound(0.5), expected)
