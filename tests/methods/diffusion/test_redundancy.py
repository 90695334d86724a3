"""The three rules of R2-dLLM against their sentences."""

import pytest
from support.decoding.denoising_passes import SIZE, check

from edgedec_methods.diffusion.redundancy import redundancy
from edgedec_methods.diffusion.rules import Pass


def expected(passes: list[Pass]) -> list[int]:
    """Return sure positions, clusters of confidence, one of each cluster of a token, and what lasted."""
    its = passes[-1]
    at = {int(place): i for i, place in enumerate(its.places)}
    confidence = dict(zip(at, its.confidences.tolist(), strict=True))
    token = dict(zip(at, its.tokens.tolist(), strict=True))
    chosen = {place for place in at if confidence[place] >= 0.9}
    for start in range(SIZE - 2):
        inside = [place for place in (start, start + 1, start + 2) if place in at]
        if len(inside) >= 2 and sum(confidence[place] for place in inside) / len(inside) >= 0.7:
            chosen |= {*inside}
    place = 0
    while place < SIZE:
        run = [place]
        while place in at and run[-1] + 1 in at and token[run[-1] + 1] == token[place]:
            run.append(run[-1] + 1)
        best = max(run, key=lambda at_place: confidence.get(at_place, 0.0))
        if len(run) > 1 and confidence[best] > 0.7:
            chosen = (chosen - {*run}) | {best}
        place = run[-1] + 1
    for place in at:
        before = [dict(zip(p.places.tolist(), p.tokens.tolist(), strict=True)).get(place) for p in passes[-3:]]
        if before == [token[place]] * 3 and confidence[place] >= 0.7:
            chosen.add(place)
    return [at[place] for place in sorted(chosen)]


@pytest.mark.slow
def test_what_is_said_again_is_committed() -> None:
    """By neighbours, and by earlier passes."""
    check(redundancy(0.7), expected, n=600)
