"""Medusa's heads, Hydra's and prompt tokens, as the benchmark trains and counts them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.gguf.file import read_gguf
from edgedec_export.training.lessons.lesson_files import Lesson, lesson_files, write_lessons
from edgedec_export.training.simulation import Drafted, replay
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.reference.network import KVCache, Row, evaluate, logits
from edgedec_runtimes.reference.weights import read_shape, read_weights
from edgedec_runtimes.trained_heads.load import load_head

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "studies"))
if True:  # after the skip
    import relatives
    from relatives_costs import best_prompt_tokens, costs_of, heads_bytes, replay_prompt_tokens, row_bytes, step_bytes
    from relatives_heads import HeadLearner, HeadShape
    from relatives_methods import METHODS, Given
    from relatives_prompt import N_PROMPT_TOKENS, PromptLearner, TorchLlama, agreement, draft_outputs

    from edgedec_export.training.batches import batch_of
    from edgedec_export.training.head_folder import write_head
    from edgedec_export.training.learning import Borrowed
    from edgedec_export.training.network import folded, new_weights

F32 = NDArray[np.float32]
pytestmark = pytest.mark.usefixtures("one_thread")
SHORT_LIST = np.arange(0, 80, 2, dtype=np.int32)
CURVE = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 2.0}


def random_heads(parts: TargetParts, *, reads_drafts: bool) -> HeadLearner:
    """Return heads with random tensors, three of them, in float32."""
    shape = HeadShape(parts.network.n_embd, reads_drafts, 3)
    borrowed = Borrowed.of(parts, SHORT_LIST, "cpu")
    learner = HeadLearner(shape, borrowed, parts.network.rms_epsilon)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for values in learner.weights.values():
            values.copy_(torch.randn(values.shape, generator=draw) / values.shape[-1] ** 0.5)
    return learner


def unit(x: F32) -> F32:
    """Return x divided by the root of the mean square of its last axis."""
    normed: F32 = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
    return normed


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_head_reads_the_state_and_only_tokens_before_its_own(
    parts: TargetParts, make_lessons: Any, reads_drafts: bool
) -> None:
    """Head k after token i of an answer: from the state there, and for Hydra from the tokens i to i + k."""
    lessons = make_lessons([(3, 9), (2, 6)], n_embd=parts.network.n_embd)
    learner = random_heads(parts, reads_drafts=reads_drafts)
    weights = {name: values.detach().numpy() for name, values in learner.weights.items()}
    batch = batch_of(lessons, 3)
    with torch.no_grad():
        outputs = [found.numpy() for found in learner.outputs(batch)]
    rows = [
        (lesson, i)
        for lesson in sorted(lessons, key=lambda lesson: lessons.index(lesson))
        for i in range(lesson.n_answer)
    ]
    n_checked = 0
    for k in range(3):
        for output, which in zip(outputs[k], batch.which[k], strict=True):
            lesson, foreseen = rows[which]
            i = foreseen - k - 1
            answer = lesson.token_ids[lesson.n_prompt :]
            read = [unit(parts.embeddings(answer[i : i + k + 1])).reshape(-1)] if reads_drafts else []
            z = np.concatenate([unit(lesson.last[i].astype(np.float32)), *read])
            inner = weights[f"inner{k}"] @ z
            y = weights[f"through{k}"] @ z + inner / (1 + np.exp(-inner))
            assert_allclose(output, unit(y) * weights[f"norm{k}"], rtol=1e-4, atol=1e-5)
            n_checked += 1
    assert n_checked == (8 + 7 + 6) + (5 + 4 + 3)


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_draft_is_right_where_the_best_token_is_the_texts(
    parts: TargetParts, make_lessons: Any, reads_drafts: bool
) -> None:
    """Row i, column k: whether head k's most probable token is token i + 1 + k of the answer, and its probability."""
    lessons = make_lessons([(3, 9), (4, 12), (2, 1)], n_embd=parts.network.n_embd)
    learner = random_heads(parts, reads_drafts=reads_drafts)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = learner.outputs(batch_of(lessons[:1], 3))
    lessons[0].token_ids[lessons[0].n_prompt + 2] = _best(parts, outputs[1])[0]  # head 1 after token 0 is right
    drafted = {len(text.right): text for text in learner.drafted(lessons)}
    assert sorted(drafted) == [8, 11], "the lesson of one token is left out"
    found, answer = drafted[8], lessons[0].token_ids[3:]
    assert found.right[0, 1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = learner.outputs(batch_of(lessons[:1], 3))
    for k in range(3):
        best = _best(parts, outputs[k])
        assert_array_equal(found.right[: 8 - k, k], best == answer[k + 1 :])
        assert not found.right[8 - k :, k].any(), "nothing comes after the answer"
        assert ((found.sure[: 8 - k, k] > 1 / len(SHORT_LIST)) & (found.sure[: 8 - k, k] <= 1)).all()


def _best(parts: TargetParts, outputs: Any) -> NDArray[np.int32]:
    rows = torch.from_numpy(parts.output_rows(SHORT_LIST)).bfloat16()
    best: NDArray[np.int32] = SHORT_LIST[(outputs.bfloat16() @ rows.T).float().argmax(-1).numpy()]
    return best


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_heads_learn(parts: TargetParts, make_lessons: Any, reads_drafts: bool) -> None:
    """The loss on the same lessons falls."""
    shape = HeadShape(parts.network.n_embd, reads_drafts, 3)
    learner = HeadLearner(shape, Borrowed.of(parts, SHORT_LIST, "cpu"), parts.network.rms_epsilon)
    batch = batch_of(make_lessons([(3, 40), (2, 30)], n_embd=parts.network.n_embd), 3)
    losses = [learner.learn(batch, 0.2) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_target_in_torch_computes_what_the_reference_computes(target: Path, parts: TargetParts) -> None:
    """The logits of every row of a text; and the lessons' most probable tokens are counted."""
    gguf = read_gguf(target)
    weights = read_weights(read_shape(gguf), 128)
    hyper = weights.hyper
    cache = KVCache.empty(hyper, 16, np.dtype(np.float32))
    text = np.random.default_rng(1).integers(0, hyper.n_vocab, 11).astype(np.int32)
    llama = TorchLlama.of(parts, torch.float32)
    x, _ = llama.read(text)
    found = (llama.outputs(x) @ llama.output.T).numpy()
    best = []
    for i, token in enumerate(text):
        state = evaluate(weights, cache, weights.embedding[token], Row(np.arange(i + 1))).state
        expected = logits(weights, state)
        assert_allclose(found[i], expected, rtol=1e-3, atol=1e-3)
        best.append(int(expected.argmax()))
    lesson = _lesson(text, 4, np.array(best[3:-1], np.int32))
    assert agreement(llama, [lesson]) == 1
    lesson.best[0] += 1
    assert agreement(llama, [lesson]) == 6 / 7


def _lesson(token_ids: NDArray[np.int32], n_prompt: int, best: NDArray[np.int32], n_embd: int = 64) -> Lesson:
    n_answer = len(token_ids) - n_prompt
    rng = np.random.default_rng(0)
    last = rng.standard_normal((n_answer, n_embd)).astype(np.float16)
    return Lesson("kind", "0" * 16, 0.0, n_prompt, token_ids, best, np.zeros((len(token_ids) - 1, 1), np.float16), last)


def test_prompt_tokens_see_the_text_before_them_and_each_other(parts: TargetParts) -> None:
    """Prompt tokens with the embeddings of words give what these words give behind the same text."""
    rng = np.random.default_rng(2)
    text = rng.integers(0, 200, 9).astype(np.int32)
    words = rng.integers(0, 200, N_PROMPT_TOKENS).astype(np.int32)
    llama = TorchLlama.of(parts, torch.float32)
    after = torch.tensor([2, 5, 8])
    with torch.no_grad():
        _, past = llama.read(text)
        found = draft_outputs(llama, torch.from_numpy(parts.embeddings(words)), after, past)
        for group, place in zip(found, after.tolist(), strict=True):
            x, _ = llama.read(np.concatenate([text[: place + 1], words]))
            assert_allclose(group.numpy(), llama.outputs(x[-len(words) :]).numpy(), rtol=1e-3, atol=1e-4)


def test_prompt_tokens_learn_and_nothing_else_does(parts: TargetParts) -> None:
    """The loss falls, the target stays, and drafts are judged against the text."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 200, 40).astype(np.int32)
    lesson = _lesson(text, 4, text[4:])
    llama = TorchLlama.of(parts, torch.float32)
    before = {name: values.clone() for name, values in llama.tensors.items()}
    learner = PromptLearner(llama, np.array([1, 2, 3]), n_places=12)
    places = learner.places(lesson)
    assert len(places) == 12
    assert (np.diff(places) > 0).all()
    assert (places < 35).all()
    losses = [learner.learn(lesson, places, 0.2) for _ in range(30)]
    assert losses[-1] < 0.97 * losses[0]
    assert learner.places(lesson).tolist() != places.tolist()
    for name, values in llama.tensors.items():
        assert torch.equal(values, before[name])
    with torch.no_grad():
        _, past = llama.read(text)
        outputs = draft_outputs(
            llama, learner.embeddings, torch.arange(4, 38), past
        )  # after the answer's tokens 0 to 33
        best = (outputs @ llama.output.T).argmax(-1).numpy()
    text[6 + 10] = best[10, 0]  # which the prompt tokens behind the answer's token 10 do not see
    (drafted,) = learner.drafted([lesson])
    assert drafted.right.shape == (35, N_PROMPT_TOKENS)
    assert drafted.right[11, 0]
    assert not drafted.right[34:, 1:].any()


def test_the_rows_of_prompt_tokens_are_counted() -> None:
    """By hand: two behind the newest token, none behind a draft, so every second step has no draft."""
    right, sure = np.ones((7, 2), np.bool_), np.full((7, 2), 0.5, np.float32)
    seconds = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    outcome, n_rows = replay_prompt_tokens([Drafted("a", right, sure)], seconds, (2, 0, 0))
    # 3 tokens with 1 + 2 + 2 rows, then 1 with 1 + 2 rows, then 3 with 5 rows.
    assert outcome.tokens_per_step == pytest.approx(7 / 3)
    assert n_rows == pytest.approx(13 / 3)
    assert outcome.speed == pytest.approx(7 / (4 + 2 + 4))
    shorter, n_rows = replay_prompt_tokens([Drafted("a", right, sure)], seconds, (2, 1, 0), 0.4)
    # A draft of one token at most: 2 tokens a step with 1 + 1 + 3 rows, and one token at the end.
    assert shorter.drafted_per_step == 1
    assert (shorter.tokens_per_step, n_rows) == (7 / 4, 5)


def test_prompt_tokens_behind_every_row_draft_as_heads_do() -> None:
    """Where rows cost nothing, the steps are those of chains that are always there."""
    rng = np.random.default_rng(4)
    texts = [Drafted("a", rng.random((n, 3)) < 0.4, rng.random((n, 3)).astype(np.float32)) for n in (50, 1, 31)]
    for least in (0.0, 0.1, 0.4):
        everywhere, _ = replay_prompt_tokens(texts, [1.0] * 16, (3, 3, 3, 3), least)
        chains = replay(texts, lambda n: 1.0, 3, least)
        assert (everywhere.tokens_per_step, everywhere.drafted_per_step) == (
            chains.tokens_per_step,
            chains.drafted_per_step,
        )
    best, _, placed = best_prompt_tokens(texts, [1.0] * 16)
    assert placed == (3, 3, 3, 3)
    assert best.speed >= everywhere.speed


def test_bytes_of_heads(parts: TargetParts) -> None:
    """Medusa's heads read the output rows once for all tokens of a draft, Hydra's for each."""
    n, rows = parts.network.n_embd, 40 * row_bytes(parts)
    assert row_bytes(parts) == 4 * n
    medusa, hydra = (heads_bytes(HeadShape(n, reads, 3), 40, parts) for reads in (False, True))
    assert (medusa(0), hydra(0)) == (0, 0)
    assert medusa(2) == pytest.approx(2 * 2 * n * n * 1.0625 + rows)
    assert hydra(2) == pytest.approx((2 * n * 2 * n + 2 * n * 3 * n) * 1.0625 + 2 * rows)
    costs = costs_of(CostCurve(CURVE), hydra, step_bytes(parts), 3)
    assert costs(0) == 1
    assert costs(3) == pytest.approx(1.2 + hydra(3) / step_bytes(parts))


@pytest.mark.parametrize("method", METHODS)
def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    method: str, parts: TargetParts, make_lessons: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the stops, a method drafts the same at the end; and its row of the table counts these drafts."""
    monkeypatch.setattr(relatives, "_ROWS", 100)
    given = _given(parts, make_lessons, tmp_path)
    assert relatives.train(method, given, tmp_path / "whole", 250, float("inf"))
    n_runs = 1
    while not relatives.train(method, given, tmp_path / "parts", 250, 0.0):
        n_runs += 1
        assert n_runs < 100
    whole, n_seen = relatives.kept(tmp_path / "whole" / relatives.DRAFTED)
    again, n_again = relatives.kept(tmp_path / "parts" / relatives.DRAFTED)
    assert n_seen == n_again >= 250
    assert n_runs > 2
    for text, other in zip(whole, again, strict=True):
        assert_array_equal(text.right, other.right)
        assert_array_equal(text.sure, other.sure)
    row = relatives.row_of(method, n_seen, whole, given, CostCurve(CURVE))
    n_most = 3 if method == "ppd" else 6
    assert row.tokens_per_step["all"] == replay(whole, lambda n: 1.0, n_most).tokens_per_step
    assert (row.n_bytes == 0) == (method == "ppd")
    assert len(whole) == len(given.held_back())


def _given(parts: TargetParts, make_lessons: Any, folder: Path) -> Given:
    """Return lessons of random numbers, some of them held back, and a head."""
    lessons = folder / "lessons"
    lessons.mkdir()
    for number in range(12):
        sizes = [(3, 20), (2, 14), (4, 9)]
        write_lessons(lessons, number, make_lessons(sizes, number, parts.network.n_embd, parts.network.n_vocab))
    card = card_of(parts, "head", len(SHORT_LIST), None)
    scale = np.ones(3 * card.n_embd_target, np.float32)
    arrays = folded(new_weights(card, parts.output_norm, scale, 0))
    write_head(folder / "head", card, arrays, SHORT_LIST, {})
    return Given(parts, load_head(folder / "head"), list(lesson_files(lessons).values()))
