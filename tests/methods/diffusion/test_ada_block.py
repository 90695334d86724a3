"""AdaBlock against its sentences."""

from support.decoding.denoising_passes import SIZE, check

from edgedec_methods.diffusion.ada_block import ada_block
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return the sure positions of the part, or the best one of it."""
    end = 0
    for its in passes:
        if min(its.places) < end:
            continue
        breaks = [i for i, piece in enumerate(its.pieces) if piece == b"\n" and its.confidences[i] >= 0.3]
        end = 1 + int(its.places[max(breaks, key=lambda i: its.confidences[i])]) if breaks else SIZE
    its = passes[-1]
    inside = [i for i, place in enumerate(its.places) if place < end]
    sure = [i for i in inside if its.confidences[i] >= 0.9]
    return sure or [max(inside, key=lambda i: its.confidences[i])]


def test_a_part_is_finished_before_the_next_begins() -> None:
    """A part ends at the most confident end of a line."""
    check(ada_block(0.3), expected)
