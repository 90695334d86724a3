"""CCD's choice against its sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.coherent import coherent
from edgedec_methods.diffusion.rules import Pass

N = 8


def test_what_two_passes_are_sure_of_is_committed_together() -> None:
    """If the surest of the later one is among it, and only where both have the same token."""

    def expected(passes: list[Pass]) -> list[int]:
        its, sure = passes[-1], by_confidence(passes[-1])
        if len(passes) == 1:
            return []
        places, before = its.places.tolist(), passes[-2]
        left = [i for i in by_confidence(before) if before.places[i] in places][:N]
        token_of = {int(before.places[i]): before.tokens[i] for i in left}
        if places[sure[0]] not in token_of:
            return []
        return [i for i in sure[:N] if token_of.get(places[i]) == its.tokens[i]]

    check(coherent(N), expected, 600)
