"""Blocks in torch compute what the float64 head computes one block after another, and learn what can be learned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.heads.reference_block import ReferenceBlock

from edgedec_export.training.block.blocks import Blocks, Cuts, blocks_of
from edgedec_export.training.block.shape import block_card, block_shape, price_of
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
if True:  # after the skip
    from edgedec_export.training.block.network import MARKOV_TABLE, finished, new_weights, states_of
    from edgedec_export.training.block.shape import first_attention, markov_table
    from edgedec_export.training.block.student import BlockStudent, Scorer, loss_of
    from edgedec_export.training.network import TAP_SCALE, Weights, rms, target_shares, turned, turns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
N_LIST, SIZE = 40, 4
TOKEN_IDS = np.arange(7, 7 + N_LIST, dtype=np.int32)


def some_drafter(parts: TargetParts, seed: int = 1) -> tuple[HeadCard, Weights]:
    """Return a drafter of two layers whose tensors are all random, so that each of them counts."""
    shape = BlockShape(2, SIZE, True, causal=True, markov="vanilla", rank=8)
    card = block_card(parts, shape, N_LIST, None)
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 50, 3 * card.n_embd_target).astype(np.float32)
    weights = new_weights(card, parts.output_norm, scale, rng.standard_normal(card.n_embd), seed)
    for name, values in weights.items():
        if name.endswith("_norm"):
            weights[name] = torch.from_numpy(rng.uniform(0.5, 1.5, len(values)).astype(np.float32))
    weights["markov_w2"] = torch.from_numpy(rng.standard_normal((N_LIST, 8)).astype(np.float32))
    return card, weights


def anchors(parts: TargetParts, blocks: Blocks) -> Any:
    """Return the embeddings of the anchors' tokens."""
    return torch.from_numpy(parts.embeddings(blocks.before[blocks.depths == 0]))


def some_lessons(make_lessons: Any, parts: TargetParts) -> list[Lesson]:
    """Return three lessons for the tiny target."""
    lessons: list[Lesson] = make_lessons([(3, 9), (6, 4), (1, 7)], n_embd=parts.network.n_embd)
    return lessons


def test_blocks_by_hand(make_lessons: Any) -> None:
    """A prompt of 2 tokens and an answer of 5: four blocks begin there, with 3, 3, 2 and 1 rows."""
    (lesson,) = make_lessons([(2, 5)])
    tokens = lesson.token_ids.tolist()
    found = blocks_of([lesson], 3)
    assert found.anchors.tolist() == [2, 2, 2, 3, 3, 3, 4, 4, 5]
    assert found.depths.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    assert found.before.tolist() == [*tokens[2:5], *tokens[3:6], *tokens[4:6], tokens[5]]
    assert found.answers[found.which].tolist() == [*tokens[3:6], *tokens[4:7], *tokens[5:7], tokens[6]]
    assert found.answers.tolist() == tokens[2:]
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_a_block_cannot_draft_ends_it(make_lessons: Any) -> None:
    """A row whose most probable token is not in the list is left out, as are the rows behind it in the block."""
    (lesson,) = make_lessons([(2, 6)])
    lesson.best[:] = [1, 2, 3, 4, 5, 6]
    can_draft = np.ones(50, np.bool_)
    can_draft[4] = False
    cuts = Cuts(can_draft, np.random.default_rng(0), 1 - 1e-12)
    found = blocks_of([lesson], 3, cuts)
    pairs = zip(found.anchors.tolist(), found.depths.tolist(), strict=True)
    assert list(pairs) == [(2, 0), (2, 1), (3, 0), (5, 0), (5, 1), (6, 0)]


def test_blocks_are_shortened_at_random(make_lessons: Any) -> None:
    """So many of the rows are kept as the chance says; the first rows all are, and another draw gives others."""
    lessons = make_lessons([(2, 500)] * 2)
    every = np.ones(50, np.bool_)
    found = blocks_of(lessons, 4, Cuts(every, np.random.default_rng(0), 0.5))
    counts = np.bincount(found.depths)
    assert counts[0] == 998
    assert_allclose(counts / 998, [1, 0.5, 0.25, 0.125], atol=0.05)
    same, other = (blocks_of(lessons, 4, Cuts(every, np.random.default_rng(seed), 0.5)).anchors for seed in (0, 1))
    assert_array_equal(same, found.anchors)
    assert len(other) != len(same)


def test_lessons_side_by_side_are_each_alone(make_lessons: Any) -> None:
    """Each span has the rows and the blocks of its lesson."""
    lessons = make_lessons([(3, 9), (5, 2), (4, 6)])
    together = blocks_of(lessons, 4)
    for lesson, span in zip(lessons, together.spans, strict=True):
        alone = blocks_of([lesson], 4)
        assert_array_equal(together.taps[span.context], lesson.taps)
        assert_array_equal(together.anchors[span.rows], alone.anchors)
        assert_array_equal(together.depths[span.rows], alone.depths)
        assert_array_equal(together.before[span.rows], alone.before)
        assert_array_equal(together.answers[together.which[span.rows]], alone.answers[alone.which])


def test_rows_are_those_of_the_float64_head(parts: TargetParts, make_lessons: Any) -> None:
    """Every row of every block of several texts gives the scores of the head that drafts one block after another."""
    card, weights = some_drafter(parts)
    lessons = some_lessons(make_lessons, parts)
    blocks = blocks_of(lessons, SIZE)
    states = states_of(card, weights, blocks, anchors(parts, blocks)).numpy()
    tensors = {name: HeadTensor.of(array) for name, array in finished(card, weights, TOKEN_IDS).items()}
    output = parts.output_rows(TOKEN_IDS)
    w1, w2 = (tensors[name].floats() for name in ("markov_w1", "markov_w2"))
    for lesson, span in zip(lessons, blocks.spans, strict=True):
        reference = ReferenceBlock(Head(card, tensors, TOKEN_IDS), parts.embeddings, output)
        reference.absorb(lesson.taps)
        features = reference.features
        for row in range(span.rows.start, span.rows.stop):
            anchor, depth = int(blocks.anchors[row]), int(blocks.depths[row])
            reference.features = features[:anchor]
            block = reference.block(int(lesson.token_ids[anchor]))
            assert_allclose(states[row], block.states[depth], rtol=1e-4, atol=1e-4)
            ours = states[row] @ output.T + w2 @ w1[blocks.before[row]]
            truth = lesson.token_ids[anchor + 1 : anchor + 1 + depth].tolist()
            assert_allclose(ours, reference.logits(block, truth), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("distance", [0.0, 0.8])
def test_gradients_are_those_of_the_loss(parts: TargetParts, make_lessons: Any, distance: float) -> None:
    """The gradients that are made by hand equal torch's of the same loss, for every tensor."""
    card, weights = some_drafter(parts)
    blocks = blocks_of(some_lessons(make_lessons, parts), SIZE)
    rows, which = torch.from_numpy(parts.output_rows(TOKEN_IDS)), torch.from_numpy(blocks.which)
    shares = target_shares(torch.from_numpy(blocks.last), torch.from_numpy(parts.output_norm), rows, card.rms_epsilon)
    places = torch.from_numpy(np.minimum(blocks.before, N_LIST))
    learned = sorted(weights.keys() - {TAP_SCALE})

    def fresh() -> tuple[Weights, Any, Scorer]:
        copies = {name: values.clone().requires_grad_(name in learned) for name, values in weights.items()}
        found = states_of(card, copies, blocks, anchors(parts, blocks))
        return copies, torch.cat([found, copies[MARKOV_TABLE][places]], -1), Scorer(rows, copies["markov_w2"])

    ours, states, scorer = fresh()
    loss, handle = loss_of(states, scorer, shares, which, distance)
    handle.backward()
    theirs, states, scorer = fresh()
    logs = (states @ torch.cat([scorer.rows, scorer.markov], 1).T).log_softmax(-1)
    p = shares[which]
    each = (1 - distance) * -(p * logs).sum(-1) + distance * 2 * (p - logs.exp()).abs().sum(-1)
    expected = each.mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name in learned:
        scale = float(theirs[name].grad.abs().max())
        assert scale > 0, name
        assert_allclose(ours[name].grad.numpy(), theirs[name].grad.numpy(), rtol=0, atol=1e-4 * scale, err_msg=name)


def test_a_drafter_learns_what_can_be_learned(parts: TargetParts, make_lessons: Any) -> None:
    """Where every answer repeats one token, a few steps suffice to draft it; a restored drafter goes on the same."""
    card = block_card(parts, replace(block_shape(64, None, SIZE, 8), n_layer=1), N_LIST, None)
    lessons = []
    for lesson in make_lessons([(4, 20)] * 6, n_embd=card.n_embd):
        lesson.token_ids[4:] = 17
        lesson.best[:] = 17
        lesson.last[:] = 8 * parts.output_rows(np.array([17]))[0] / parts.output_norm
        lessons.append(lesson)
    first = BlockStudent(parts, card, TOKEN_IDS, lessons, seed=0, device="cpu")
    losses = [first.learn(lessons, 0.1) for _ in range(20)]
    assert losses[-1] < losses[0]
    drafted = first.drafted(first.weights, lessons)
    assert [text.right.shape for text in drafted] == [(19, SIZE)] * 6
    right = np.concatenate([text.right for text in drafted])
    assert right[:16].mean() > 0.8
    assert not right[18, 1:].any(), "behind the text's end nothing is right"
    second = BlockStudent(parts, card, TOKEN_IDS, lessons, seed=0, device="cpu")
    second.restore(first.state())
    assert [first.learn(lessons, 0.5) for _ in range(2)] == [second.learn(lessons, 0.5) for _ in range(2)]


def test_answers_that_cannot_be_drafted_teach_nothing(parts: TargetParts, make_lessons: Any) -> None:
    """A batch without a row has no loss, and leaves the drafter sound."""
    card, _ = some_drafter(parts)
    lessons = some_lessons(make_lessons, parts)
    student = BlockStudent(parts, card, TOKEN_IDS, lessons, seed=0, device="cpu")
    for lesson in lessons:
        lesson.best[:] = 0
    assert student.learn(lessons, 0.5) == 0
    assert all(bool(values.isfinite().all()) for values in student.weights.values())


def test_a_new_drafters_first_layer_looks_at_the_last_tokens(parts: TargetParts, make_lessons: Any) -> None:
    """The first head of each group sees the token before the block best, the second the one before that, and so on.

    On average over anchors, where features have something in common, as those of a model do.
    """
    card, weights = some_drafter(parts)
    arrays = {name: values.numpy() for name, values in weights.items()}
    shared = np.random.default_rng(4).standard_normal(3 * card.n_embd)
    lessons = []
    for lesson in make_lessons([(9, 40)] * 4, n_embd=card.n_embd):
        taps = ((shared + 0.5 * lesson.taps) * arrays["tap_scale"]).astype(np.float16)
        lessons.append(replace(lesson, taps=taps))
    embeddings = parts.embeddings(np.concatenate([lesson.token_ids[9:] for lesson in lessons]))
    first_attention(card, arrays, lessons, embeddings)
    features = rms(torch.from_numpy(lessons[0].taps / arrays["tap_scale"]) @ weights["fc"].T, torch.ones(1), card)
    rows = rms(torch.from_numpy(parts.embeddings(lessons[0].token_ids)), torch.ones(1), card)
    keys = heads_at(features, weights["layers.0.k"], card)
    queries = heads_at(rows, weights["layers.0.q"], card)
    groups = card.n_head // card.n_head_kv
    for head in range(card.n_head):
        scores = queries[head] @ keys[head // groups].T
        back = [float(scores.diagonal(-i).mean()) for i in range(1, 7)]
        assert int(np.argmax(back)) == head % groups, back


def test_tokens_that_are_alike_begin_alike(parts: TargetParts) -> None:
    """The Markov embeddings of a list are the main components of the embeddings; a token off the list has none."""
    _, weights = some_drafter(parts)
    arrays = {name: values.numpy() for name, values in weights.items()}
    embeddings = parts.embeddings(TOKEN_IDS)
    embeddings[3] = embeddings[5]
    markov_table(arrays, embeddings, 1e-5)
    table = arrays[MARKOV_TABLE]
    assert_array_equal(table[3], table[5])
    assert_allclose(table[:-1].T @ table[:-1], N_LIST * np.eye(8), atol=1e-3)
    assert not table[-1].any()


def heads_at(rows: Any, matrix: Any, card: HeadCard) -> Any:
    """Return [heads, n, head_dim], rows times a matrix, turned to the positions from 0 on."""
    found = (rows @ matrix.T).unflatten(-1, (-1, card.head_dim)).transpose(0, 1)
    return turned(found, *turns(torch.arange(len(rows)), card.head_dim, card.rope_base))


def test_a_drafts_price_is_that_of_the_bytes() -> None:
    """Once: fc, two layers and the norms at 8 bits a weight, and the output rows; for each token: the Markov head's."""
    shape = BlockShape(2, 4, True, markov="vanilla", rank=3)
    card = HeadCard("h", 8, 8, 16, 2, 1, 4, 1e-5, 1e4, (1, 2, 3), 10, 99, block=shape)
    layer = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 4
    body = 8 * 24 + 2 * layer + 3 * 8  # with hidden_norm, output_norm and the mask
    found = price_of(card, 10_000, 9.0)
    assert found.level == pytest.approx(10 * 3 * 1.0625 / 10_000)
    assert found.once == pytest.approx((body * 1.0625 + 10 * 9) / 10_000)


def test_a_shape_follows_the_target() -> None:
    """Narrow targets have blocks of six and a rank of 64, wide ones eight and 128, unless the user says it."""
    narrow, wide = block_shape(576, None, None, None), block_shape(1536, None, None, None)
    assert (narrow.n_layer, narrow.size, narrow.rank) == (2, 6, 64)
    assert (wide.n_layer, wide.size, wide.rank) == (2, 8, 128)
    asked = block_shape(576, 1, 4, 32)
    assert (asked.n_layer, asked.size, asked.rank, asked.n_drafts) == (1, 4, 32, 4)
