"""EOSER against its formula."""

from math import log2

from support.decoding.denoising_passes import check

from edgedec_methods.diffusion.eoser import eoser
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the 1, 2, 4 or 8 best positions, with ends counted less at first."""
    its, i = passes[-1], len(passes)
    done = (2**i - 1) / 2 ** int(log2(len(passes[0].places)))
    factor = 0.1 + 0.9 * min(1, done)
    counted = [p * factor if is_end else p for p, is_end in zip(its.confidences, its.ends, strict=True)]
    return sorted(range(len(counted)), key=lambda j: -counted[j])[: 2 ** (i - 1)]


def test_ends_count_less_in_early_passes() -> None:
    """By a factor that grows with what the passes have committed."""
    check(eoser(0.1), expected)
