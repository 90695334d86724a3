"""The comparison of EAGLE-3's relatives: how each method drafts, learns and is priced, and that a training can stop."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec.gguf.file import read_gguf
from edgedec_export.training.lessons.lesson_files import Lesson, lesson_files, write_lessons
from edgedec_export.training.simulation import Drafted, replay
from edgedec_export.training.target_parts import TargetParts

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "studies"))
if True:  # after the skip
    import relatives
    from relatives_costs import ByBytes, ByExits, ByRows, DraftBytes, best_placed, replay_placed
    from relatives_heads import Heads
    from relatives_learning import unit
    from relatives_methods import METHODS, Given
    from relatives_narrow import variation
    from relatives_report import Kept, MeasuredCurve, report
    from relatives_report import Row as TableRow

    from edgedec_export.training.arithmetic import in_product_type
    from edgedec_export.training.batches import batch_of
    from edgedec_export.training.kinds import row_bytes
    from edgedec_export.training.network import cross_entropy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
CURVE = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 2.0}
N_MOST = 6


@pytest.fixture(scope="module")
def given(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Lessons of random numbers for the tiny target, one file of them held back."""
    parts, folder = TargetParts.of(read_gguf(target)), tmp_path_factory.mktemp("lessons")
    for number in range(12):
        write_lessons(folder, number, [_lesson(parts, number, *sizes) for sizes in ((3, 20), (2, 14), (4, 9))])
    return Given(parts, list(lesson_files(folder).values()), 40)


def _lesson(parts: TargetParts, seed: int, n_prompt: int, n_answer: int) -> Lesson:
    rng, n = np.random.default_rng([seed, n_prompt]), parts.network.n_embd
    token_ids = rng.integers(0, 60, n_prompt + n_answer).astype(np.int32)
    taps = rng.standard_normal((len(token_ids) - 1, 3 * n)).astype(np.float16)
    last = rng.standard_normal((n_answer, n)).astype(np.float16)
    kind, name = f"kind {n_prompt % 2}", f"{seed:08}{n_prompt:08}"
    return Lesson(kind, name, 0.0, n_prompt, token_ids, token_ids[n_prompt:].copy(), taps, last)


@pytest.mark.parametrize("name", METHODS)
def test_a_draft_depends_on_nothing_that_comes_after_it(name: str, given: Given) -> None:
    """Token k of a draft after answer token i is made of the states before i, and of the tokens up to i + k."""
    parts, i = given.parts, 5
    lesson, other = _lesson(parts, 50, 3, 16), _lesson(parts, 51, 3, 16)
    method = METHODS[name].new(given)
    method.learn(given.first_lessons()[:2], 0.2)
    (whole,) = method.drafted(method.weights, [lesson])
    n_most = min(N_MOST, whole.sure.shape[1])
    for k in range(n_most):
        n_tokens, n_states = lesson.n_prompt + i + k + 1, lesson.n_prompt + i
        known = Lesson(
            lesson.kind,
            lesson.prompt_hash,
            0.0,
            lesson.n_prompt,
            np.concatenate([lesson.token_ids[:n_tokens], other.token_ids[n_tokens:]]),
            lesson.best,
            np.concatenate([lesson.taps[:n_states], other.taps[n_states:]]),
            np.concatenate([lesson.last[: i + 1], other.last[i + 1 :]]),
        )
        (cut,) = method.drafted(method.weights, [known])
        assert_allclose(cut.sure[i, k::n_most], whole.sure[i, k::n_most], rtol=1e-5, err_msg=f"token {k} of a draft")
        assert not np.allclose(cut.sure[i + 2 :], whole.sure[i + 2 :], rtol=1e-3) or name == "ppd"


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_learns_and_the_loss_falls(name: str, given: Given) -> None:
    """A step on two lessons changes all tensors that learn; more steps on them lower the loss."""
    method, lessons = METHODS[name].new(given), given.first_lessons()[:2]
    first = method.learn(lessons, 0.1)
    before = {key: values.detach().clone() for key, values in method.weights.items() if values.requires_grad}
    losses = [method.learn(lessons, 0.1) for _ in range(12)]
    unchanged = [key for key, values in before.items() if torch.equal(values, method.weights[key])]
    assert not unchanged
    assert losses[-1] < first


@pytest.mark.parametrize("name", METHODS)
def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    name: str, given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the stops, a method drafts the same at the end; and its row of the table counts these drafts."""
    monkeypatch.setattr(relatives, "_ROWS", 100)
    assert relatives.train(name, given, tmp_path / "whole", 250, float("inf"))
    n_runs = 1
    while not relatives.train(name, given, tmp_path / "parts", 250, 0.0):
        n_runs += 1
        assert n_runs < 100
    whole, again = (Kept.read(tmp_path / folder / relatives.DRAFTED) for folder in ("whole", "parts"))
    assert n_runs > 2
    assert whole.n_seen == again.n_seen >= 250
    assert whole.n_trained == again.n_trained > 0
    for text, other in zip(whole.drafted, again.drafted, strict=True):
        assert_array_equal(text.right, other.right)
        assert_array_equal(text.sure, other.sure)
    price = METHODS[name].price(given)
    row = TableRow.of(name, whole, price, CostCurve(CURVE))
    chains = price.chains(whole.drafted)
    assert row.tokens_per_step["all"] == replay(chains, lambda n: 1.0, N_MOST).tokens_per_step
    assert (row.round_bytes + row.token_bytes == 0) == (name in ("ppd", "transfer"))
    assert len(chains) == len(given.held_back()) == 3


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_head_reads_the_state_and_only_tokens_before_its_own(given: Given, reads_drafts: bool) -> None:
    """Head k after token i of an answer: from the state there, and for Hydra from the tokens i to i + k."""
    lessons = [_lesson(given.parts, 60, 3, 9), _lesson(given.parts, 61, 2, 6)]
    heads = Heads(given.parts, reads_drafts=reads_drafts)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for values in heads.weights.values():
            values.copy_(torch.randn(values.shape, generator=draw) / values.shape[-1] ** 0.5)
        batch = batch_of(lessons, 3)
        outputs = [step.outputs.numpy() for step in heads.steps(batch)]
    weights = {name: values.detach().numpy() for name, values in heads.weights.items()}
    rows = [(lesson, i) for lesson in lessons for i in range(lesson.n_answer)]
    n_checked = 0
    for k in range(3):
        for output, which in zip(outputs[k], batch.which[k], strict=True):
            lesson, foreseen = rows[which]
            i, answer = foreseen - k - 1, lesson.token_ids[lesson.n_prompt :]
            read = _unit(given.parts.embeddings(answer[i : i + k + 1])).ravel()[: None if reads_drafts else 0]
            z = np.concatenate([_unit(lesson.last[i].astype(np.float32)), read])
            inner = weights[f"inner{k}"] @ z
            y = weights[f"through{k}"] @ z + inner / (1 + np.exp(-inner))
            assert_allclose(output, _unit(y) * weights[f"norm{k}"], rtol=1e-4, atol=1e-5)
            n_checked += 1
    assert n_checked == (8 + 7 + 6) + (5 + 4 + 3)


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = unit(torch.from_numpy(x)).numpy()
    return found


@pytest.mark.parametrize("name", ["hydra", "clover"])
def test_a_draft_is_right_where_the_best_token_is_the_texts(name: str, given: Given) -> None:
    """Row i, column k: whether the most probable token k is token i + 1 + k of the answer, and its probability."""
    lesson, short = _lesson(given.parts, 70, 3, 9), _lesson(given.parts, 71, 4, 1)
    method, borrowed = METHODS[name].new(given), given.borrowed

    def best() -> list[NDArray[np.int32]]:
        with torch.no_grad(), in_product_type("cpu"):
            steps = list(method.network.steps(batch_of([lesson], N_MOST)))  # type: ignore[attr-defined]
        rows = [(step.outputs.to(borrowed.rows.dtype) @ borrowed.rows.T).float().argmax(-1).numpy() for step in steps]
        return [borrowed.token_ids[places] for places in rows]

    lesson.token_ids[lesson.n_prompt + 2] = best()[1][0]  # token 1 of the draft after token 0 is right
    (found,) = method.drafted(method.weights, [lesson, short])
    answer = lesson.token_ids[3:]
    assert found.right.shape == (8, N_MOST), "the lesson of one token is left out"
    assert found.right[0, 1]
    for k, tokens in enumerate(best()):
        assert_array_equal(found.right[: 8 - k, k], tokens == answer[k + 1 :])
        assert not found.right[8 - k :, k].any(), "nothing comes after the answer"
        assert ((found.sure[: 8 - k, k] > 1 / 40) & (found.sure[: 8 - k, k] <= 1)).all()


def test_the_gradient_of_tvd_is_that_of_the_variation_but_for_its_size(given: Given) -> None:
    """TVD++ points where the total variation distance falls fastest, row by row."""
    rows = given.borrowed.rows.float()
    draw = torch.Generator().manual_seed(1)
    outputs = torch.randn(5, rows.shape[1], generator=draw, requires_grad=True)
    shares, which = torch.randn(5, len(rows), generator=draw).softmax(-1), torch.arange(5)
    loss, gradient = variation(outputs.detach(), shares, which, rows)
    distance = 0.5 * ((outputs @ rows.T).softmax(-1) - shares).abs().sum(-1).mean()
    distance.backward()
    assert loss.item() == pytest.approx(distance.item(), rel=1e-5)
    size = float(gradient.norm() / outputs.grad.norm())
    assert_allclose(gradient.numpy(), size * outputs.grad.numpy(), rtol=1e-3, atol=1e-6)
    entropy, _ = cross_entropy(outputs.detach(), shares, which, rows)
    assert float(entropy) > 0


def test_drafting_rows_are_counted() -> None:
    """By hand: two behind the newest token, none behind a draft, so every second step has no draft."""
    right, sure = np.ones((7, 2), np.bool_), np.full((7, 2), 0.5, np.float32)
    seconds = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    texts = [Drafted("a", right, sure)]
    outcome, n_rows = replay_placed(texts, lambda n_tokens, n_rows: seconds[n_rows - 1], (2, 0, 0))
    # 3 tokens with 1 + 2 + 2 rows, then 1 with 1 + 2 rows, then 3 with 5 rows.
    assert outcome.tokens_per_step == pytest.approx(7 / 3)
    assert n_rows == pytest.approx(13 / 3)
    assert outcome.speed == pytest.approx(7 / (4 + 2 + 4))
    shorter, n_rows = replay_placed(texts, lambda n_tokens, n_rows: seconds[n_rows - 1], (2, 1, 0), 0.4)
    # A draft of one token at most: 2 tokens a step with 1 + 1 + 3 rows, and one token at the end.
    assert shorter.drafted_per_step == 1
    assert (shorter.tokens_per_step, n_rows) == (7 / 4, 5)


def test_rows_that_enter_a_layer_cost_the_layers_above_it() -> None:
    """Half of a forward has the tokens' rows, half all rows."""
    right, sure = np.ones((4, 1), np.bool_), np.ones((4, 1), np.float32)
    curve = CostCurve({1: 1.0, 2: 1.1, 4: 1.3})
    priced = ByRows(0.5).best([Drafted("a", right, sure)], curve)
    # Every step drafts one token, which is right: two rows of tokens, and a drafting row behind each.
    assert priced.way.startswith("rows (1, 1)")
    assert priced.n_rows == 4
    assert priced.outcome.speed == pytest.approx(4 / (2 * (0.5 * 1.1 + 0.5 * 1.3)))


def test_drafting_rows_everywhere_draft_as_heads_do() -> None:
    """Where rows cost nothing, the steps are those of chains that are always there."""
    rng = np.random.default_rng(4)
    texts = [Drafted("a", rng.random((n, 3)) < 0.4, rng.random((n, 3)).astype(np.float32)) for n in (50, 1, 31)]
    for least in (0.0, 0.1, 0.4):
        everywhere, _ = replay_placed(texts, lambda n_tokens, n_rows: 1.0, (3, 3, 3, 3), least)
        chains = replay(texts, lambda n: 1.0, 3, least)
        assert (everywhere.tokens_per_step, everywhere.drafted_per_step) == (
            chains.tokens_per_step,
            chains.drafted_per_step,
        )
    best, _, placed = best_placed(texts, lambda n_tokens, n_rows: 1.0)
    assert placed == (3, 3, 3, 3)
    assert best.speed >= everywhere.speed


def test_the_first_exit_that_is_sure_enough_is_taken() -> None:
    """By hand: two exits, drafts of two tokens; and the deepest exit is the longest chain."""
    right = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], np.bool_)
    sure = np.array([[0.6, 0.2, 0.9, 0.8], [0.4, 0.5, 0.3, 0.7]], np.float32)
    price = ByExits((10.0, 30.0), 100)
    taken, exits = price.taken(Drafted("a", right, sure), 0.5)
    assert exits.tolist() == [[0, 1], [1, 0]]
    assert taken.right.tolist() == [[True, True], [True, False]]
    assert_array_equal(taken.sure, np.array([[0.6, 0.8], [0.3, 0.5]], np.float32))
    (deepest,) = price.chains([Drafted("a", right, sure)])
    assert_array_equal(deepest.right, right[:, 2:])
    priced = price.best([Drafted("a", right, sure)], CostCurve({1: 1.0, 2: 1.0, 4: 1.0}))
    assert priced.bytes.round == 0
    assert 10 <= priced.bytes.token <= 30


def test_bytes_of_drafts(given: Given) -> None:
    """Medusa's heads read the output rows once a round, Hydra's for each token; Clover's layer is read once a round."""
    n, parts = given.parts.network.n_embd, given.parts
    rows = 40 * row_bytes(parts)
    assert row_bytes(parts) == 4 * n
    medusa, hydra = (Heads(parts, reads_drafts=reads).draft_bytes(rows) for reads in (False, True))
    assert (medusa.of(0), hydra.of(0)) == (0, 0)
    assert medusa.of(2) == pytest.approx(2 * 2 * n * n * 1.0625 + rows)
    assert hydra.of(2) == pytest.approx((2 * n * 2 * n + 2 * n * 3 * n) * 1.0625 + 2 * rows)
    block, deer = (METHODS[name].price(given).bytes for name in ("block", "deer"))  # type: ignore[attr-defined]
    assert (block.round, deer.token) == (deer.round, 0)
    assert block.token == pytest.approx(1.0625 * 40 * 64)
    assert DraftBytes(1000.0, (100.0, 300.0)).token == 200
    assert METHODS["clover"].price(given).bytes.of(1) > METHODS["eagle3"].price(given).bytes.of(1)  # type: ignore[attr-defined]


def test_a_draft_that_ends_too_soon_pays_for_the_token_that_ended_it() -> None:
    """By hand: at a threshold only every second draft has a token, but all were begun."""
    right = np.array([[1], [0], [0], [1]], np.bool_)
    sure = np.array([[0.9], [0.9], [0.1], [0.9]], np.float32)
    curve = CostCurve({1: 1.0, 2: 1.1, 4: 1.2})
    priced = ByBytes(DraftBytes(10.0, (10.0,)), 100).best([Drafted("a", right, sure)], curve)
    # Two tokens in 1.1, one in 1, one in 1.1 as it ends the text; each step with 0.2 for the draft.
    assert priced.way == "up to 1 tokens, probability 0.15"
    assert priced.outcome.speed == pytest.approx(4 / (1.3 + 1.2 + 1.3))
    dear = ByBytes(DraftBytes(50.0, (50.0,)), 100).best([Drafted("a", right, sure)], curve)
    assert (dear.outcome.speed, dear.way) == (1.0, "up to 0 tokens, probability 0.0")


def test_the_table_has_a_row_for_each_method_and_length(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter trainings come first; an earlier table's curve prices them as the curve itself does."""
    monkeypatch.setattr(relatives, "_ROWS", 100)
    for n_tokens, name in ((200, "medusa"), (100, "medusa"), (100, "clover")):
        assert relatives.train(name, given, tmp_path / str(n_tokens) / name, n_tokens, float("inf"))
    measured = MeasuredCurve(CostCurve(CURVE), {"commit": "abc", "cpu": "a machine"})
    found = report(given, tmp_path, None, measured)
    rows = [(row["method"], row["tokens_learned"] // 100) for row in found["rows"]]
    assert [name for name, _ in rows] == ["clover", "medusa", "medusa"]
    assert rows[1][1] < rows[2][1]
    assert found["tokens_measured_on"] == 19 + 13 + 8
    (tmp_path / "table.json").write_text(json.dumps(found), encoding="utf-8")
    again = report(given, tmp_path, None, MeasuredCurve.of_table(tmp_path / "table.json"))
    assert (again["rows"], again["curve_measured"]) == (found["rows"], measured.where)
