"""Prophet against its sentence."""

from support.decoding.denoising_passes import SIZE, by_confidence, histories

from edgedec_methods.diffusion.prophet import prophet


def test_everything_is_committed_once_the_model_is_sure() -> None:
    """By the mean distance of the two greatest logits, which has to be smaller where more is committed."""
    n_all, rule = 0, prophet(6.0)
    for passes in histories(300):
        its = passes[-1]
        gaps = [sorted(row)[-1] - sorted(row)[-2] for row in its.logits.astype(float)]
        done = (SIZE - len(gaps)) / SIZE
        needed = 6.0 if done < 1 / 3 else 4.0 if done < 2 / 3 else 2.0
        is_sure = sum(gaps) / len(gaps) >= needed
        which = range(len(gaps)) if is_sure else by_confidence(its)[:1]
        assert dict(rule(passes)) == {int(its.places[i]): int(its.tokens[i]) for i in which}
        n_all += is_sure and len(gaps) > 1
    assert n_all > 10
