"""The head in torch computes what the numpy head computes, and its gradients are those of the loss."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.heads.reference_head import ReferenceHead

from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
if True:  # after the skip
    from edgedec_export.training.batches import batch_of
    from edgedec_export.training.head_student import HeadStudent
    from edgedec_export.training.network import (
        TAP_SCALE,
        Unroll,
        Weights,
        cross_entropy,
        folded,
        loss_of,
        new_weights,
        target_shares,
    )

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
N_TEXT = 12


def some_head(parts: TargetParts, seed: int = 1) -> tuple[HeadCard, Weights]:
    """Return a head whose tensors are all random, so that each of them counts."""
    card = card_of(parts, "head", 40, None)
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 50, 3 * card.n_embd_target).astype(np.float32)
    weights = new_weights(card, parts.output_norm, scale, seed)
    for name in ("input_norm", "hidden_norm", "post_attention_norm"):
        weights[name] = torch.from_numpy(rng.uniform(0.5, 1.5, card.n_embd).astype(np.float32))
    return card, weights


def test_drafts_are_those_of_the_numpy_head(parts: TargetParts) -> None:
    """Row t of step k is what the numpy head gives after t + 2 tokens and k drafted ones, the true ones here."""
    card, weights = some_head(parts)
    rng = np.random.default_rng(2)
    text = rng.integers(4, 200, N_TEXT)
    taps = (rng.standard_normal((N_TEXT - 1, 3 * card.n_embd_target)) * 20).astype(np.float32)
    d2t = np.arange(40, dtype=np.int32)
    tensors = {name: HeadTensor.of(array) for name, array in folded(weights).items()}
    output = parts.output_rows(d2t)
    embeddings = torch.from_numpy(parts.embeddings(text))
    unroll = Unroll.begin(card, weights, torch.from_numpy(taps)[None])
    states = []
    for k in range(3):
        padded = torch.cat([embeddings[1 + k :], torch.zeros(k, card.n_embd)])
        states.append(unroll.step(padded[None])[0].numpy())
    for t in range(1, N_TEXT - 4):
        reference = ReferenceHead(Head(card, tensors, d2t), parts.embeddings, output)
        reference.absorb(taps[: t + 1])
        state = reference.layer(text[1 : t + 2].astype(np.int32), reference.features, 0)[-1:]
        for k in range(3):
            assert_allclose(states[k][t] @ output.T, reference.logits(state)[0], rtol=1e-3, atol=1e-3)
            state = reference.layer(text[t + 2 + k : t + 3 + k].astype(np.int32), state, t + 1 + k)


def test_gradients_are_those_of_the_cross_entropy(parts: TargetParts, make_lessons: Any) -> None:
    """The gradient that is made by hand equals torch's of the same loss, for every tensor."""
    card, weights = some_head(parts)
    batch = batch_of(make_lessons([(3, 9), (2, 6)], n_embd=card.n_embd), 2)
    rows = torch.from_numpy(parts.output_rows(np.arange(40)))
    shares = target_shares(torch.from_numpy(batch.last), torch.from_numpy(parts.output_norm), rows, card.rms_epsilon)
    assert_allclose(shares.sum(-1).numpy(), 1, rtol=1e-5)
    embeddings = [torch.from_numpy(parts.embeddings(batch.read_by(k))) for k in range(2)]
    counted = [(torch.from_numpy(at), torch.from_numpy(which)) for at, which in zip(batch.at, batch.which, strict=True)]
    learned = sorted(weights.keys() - {TAP_SCALE})

    def fresh() -> tuple[Weights, Unroll]:
        copies = {name: values.clone().requires_grad_(name in learned) for name, values in weights.items()}
        return copies, Unroll.begin(card, copies, torch.from_numpy(batch.taps).float())

    ours, unroll = fresh()
    loss, handle = loss_of(unroll, embeddings, counted, {"rows": rows, "shares": shares})
    handle.backward()
    theirs, unroll = fresh()
    expected = torch.zeros(())
    for k, (at, which) in enumerate(counted):
        logs = (unroll.step(embeddings[k]).flatten(0, 1)[at] @ rows.T).log_softmax(-1)
        expected = expected - 0.8**k * (shares[which] * logs).sum(-1).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name in learned:
        scale = float(theirs[name].grad.abs().max())
        assert scale > 0, name
        assert_allclose(ours[name].grad.numpy(), theirs[name].grad.numpy(), rtol=0, atol=1e-4 * scale, err_msg=name)


def test_the_loss_of_no_rows_is_nothing() -> None:
    """A batch may have no row that counts in a step."""
    empty = torch.zeros(0, dtype=torch.int64)
    loss, gradient = cross_entropy(torch.zeros(0, 4), torch.zeros(0, 9), empty, torch.zeros(9, 4))
    assert (float(loss), gradient.shape) == (0.0, (0, 4))


def test_a_head_learns_what_can_be_learned(parts: TargetParts, make_lessons: Any) -> None:
    """Where every answer repeats one token, a few steps suffice to foresee it; a restored learner goes on the same."""
    card = replace(card_of(parts, "head", 40, None), n_vocab_draft=40)
    token_ids, lessons = np.arange(40, dtype=np.int32), []
    for lesson in make_lessons([(4, 20)] * 6, n_embd=card.n_embd):
        lesson.token_ids[4:] = 17
        lesson.best[:] = 17
        lesson.last[:] = 8 * parts.output_rows(np.array([17]))[0] / parts.output_norm
        lessons.append(lesson)
    first = HeadStudent(parts, card, token_ids, lessons, seed=0, device="cpu")
    losses = [first.learn(lessons, 0.1) for _ in range(20)]
    assert losses[-1] < losses[0]
    drafted = first.drafted(first.weights, lessons)
    right = np.concatenate([text.right for text in drafted])
    assert right[:, 0].mean() > 0.8
    second = HeadStudent(parts, card, token_ids, lessons, seed=5, device="cpu")
    second.restore(first.state())
    assert [first.learn(lessons, 0.2) for _ in range(2)] == [second.learn(lessons, 0.2) for _ in range(2)]
    assert math.isfinite(losses[-1])
