"""CCD's mean over passes against its sentence."""

from support.decoding.denoising_passes import N_VOCAB, histories, law

from edgedec_methods.diffusion.coherent import coherent


def test_the_mean_of_the_last_passes_decides() -> None:
    """Over the whole vocabulary; some tokens are not those of the last pass."""
    n_other = 0
    for passes in histories(60):
        rule = coherent(0.8)
        for i in range(1, len(passes) + 1):
            chosen = rule(passes[:i])
        its, best = passes[-1], []
        for place in its.places.tolist():
            seen = [p for p in passes[-3:] if place in p.places]
            laws = [law(p, p.places.tolist().index(place)) for p in seen]
            means = [sum(one[token] for one in laws) / len(laws) for token in range(N_VOCAB)]
            best.append((max(means), means.index(max(means))))
        which = [i for i, (p, _) in enumerate(best) if p >= 0.8] or [best.index(max(best, key=lambda one: one[0]))]
        assert dict(chosen) == {int(its.places[i]): best[i][1] for i in which}
        n_other += sum(token != own for (_, token), own in zip(best, its.tokens, strict=True))
    assert n_other
