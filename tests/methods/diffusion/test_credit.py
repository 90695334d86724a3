"""CreditDecoding against its formula over the whole vocabulary."""

import numpy as np
from support.decoding.denoising_passes import N_VOCAB, SIZE, histories

from edgedec_methods.diffusion.credit import credit


def test_credits_are_added_to_logits() -> None:
    """A matrix of credits, as the paper has it; some of the tokens are not the model's own best ones."""
    n_other, rule = 0, credit(0.8)
    for passes in histories(300):
        credits = np.zeros((SIZE, N_VOCAB))
        for its in passes:
            credits *= 0.8
            for place, token, p in zip(its.places, its.tokens, its.confidences, strict=True):
                credits[place, token] += p**0.2
        its = passes[-1]
        fused = its.logits.astype(np.float64) + 0.7 * np.log1p(credits[its.places])
        laws = np.exp(fused) / np.exp(fused).sum(1, keepdims=True)
        tokens, confidences = fused.argmax(1), laws.max(1)
        which = np.flatnonzero(confidences >= 0.8)
        which = which if len(which) else np.array([confidences.argmax()])
        assert dict(rule(passes)) == {int(its.places[i]): int(tokens[i]) for i in which}
        n_other += int((tokens != its.tokens).sum())
    assert n_other
