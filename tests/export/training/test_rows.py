"""Rows that learn to draft in the target's own layers: what torch computes is what the reference and the runtime do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.heads.tiny_rows import arranged
from support.models.tiny_models import tiny_llama

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.network import KVCache, Row, evaluate, logits
from edgedec_runtimes.reference.weights import read_shape, read_weights
from edgedec_runtimes.trained_heads.card import Promise, RowShape

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
if True:  # after the skip
    from edgedec_export.training.arithmetic import product_type
    from edgedec_export.training.exits.student import ExitStudent
    from edgedec_export.training.kinds import N_ROWS, AskedShape, RowKind, kind_of
    from edgedec_export.training.rows.llama import TorchLlama
    from edgedec_export.training.rows.student import RowStudent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TOKEN_IDS = np.arange(3, 43, dtype=np.int32)


@pytest.fixture(autouse=True)
def floats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of float32, whatever the processor has instructions for."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    product_type.cache_clear()
    yield
    product_type.cache_clear()


def lesson_of(make_lessons: Any, parts: TargetParts, seed: int = 0) -> Lesson:
    """Return a lesson of random numbers for a target, whose answer has 10 tokens."""
    lesson: Lesson = make_lessons([(3, 10)], seed, n_embd=parts.network.n_embd)[0]
    return lesson


def student_of(parts: TargetParts, layer: int, lesson: Lesson) -> RowStudent:
    """Return rows that have learned nothing."""
    return RowStudent(parts, RowShape(N_ROWS, layer), TOKEN_IDS, [lesson], device="cpu")


def embedded(llama: TorchLlama, tokens: Any) -> Any:
    """Return what enters layer 0 of these tokens."""
    return torch.from_numpy(llama.parts.embeddings(np.asarray(tokens, np.int32)))


def foreseen(llama: TorchLlama, x: Any) -> Any:
    """Return float32[n], how sure the most probable of TOKEN_IDS is behind each row of what left the last layer."""
    rows = torch.from_numpy(llama.parts.output_rows(TOKEN_IDS))
    normed = llama.norm(x, torch.from_numpy(llama.parts.output_norm))
    return (normed @ rows.T).softmax(-1).max(-1).values.numpy()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_target_in_torch_computes_what_the_reference_computes(
    architecture: Literal["llama", "qwen2"], tmp_path: Path
) -> None:
    """The logits of every row of a text."""
    gguf = read_gguf(tiny_llama(tmp_path / "t.gguf", seed=5, n_layer=7, n_ff=96, architecture=architecture))
    weights, parts = read_weights(read_shape(gguf), 128), TargetParts.of(gguf)
    cache = KVCache.empty(weights.hyper, None, 16, np.dtype(np.float32))
    text = np.random.default_rng(1).integers(0, weights.hyper.n_vocab, 11).astype(np.int32)
    llama = TorchLlama.of(parts, torch.float32)
    x, past = llama.read(embedded(llama, text))
    matrix = parts.output_rows(np.arange(weights.hyper.n_vocab))
    rows = llama.norm(x, torch.from_numpy(parts.output_norm)).numpy() @ matrix.T
    for i, token in enumerate(text):
        state = evaluate(weights, cache, weights.embedding[token], Row(np.arange(i + 1))).state
        assert_allclose(rows[i], logits(weights, state), rtol=1e-3, atol=1e-3)
    assert len(past) == weights.hyper.n_layer


def test_rows_behind_a_place_are_rows_of_the_text(parts: TargetParts, make_lessons: Any) -> None:
    """Prompt tokens begin as frequent words: they draft what the target foresees behind the text and these words."""
    lesson = lesson_of(make_lessons, parts)
    student, llama = student_of(parts, 0, lesson), TorchLlama.of(parts, torch.float32)
    (drafted,) = student.drafted(student.weights, [lesson])
    for i in range(9 - N_ROWS):
        x, _ = llama.read(embedded(llama, [*lesson.token_ids[: lesson.n_prompt + i], *TOKEN_IDS[:N_ROWS]]))
        assert_allclose(drafted.sure[i], foreseen(llama, x[-N_ROWS:]), rtol=1e-4)


def test_transferred_rows_begin_as_the_state_and_pass_the_layers_above(parts: TargetParts, make_lessons: Any) -> None:
    """Before it learns, hidden transfer drafts with the state of the newest row, as if that came later as well."""
    lesson, n, layer, i = lesson_of(make_lessons, parts), parts.network.n_embd, parts.taps[1], 4
    student, llama = student_of(parts, layer, lesson), TorchLlama.of(parts, torch.float32)
    (drafted,) = student.drafted(student.weights, [lesson])
    states = torch.from_numpy(lesson.taps[:, n : 2 * n].astype(np.float32))
    after = lesson.n_prompt + i - 1
    x, _ = llama.read(torch.cat([states[: after + 1], states[after].expand(N_ROWS, -1)]), layer)
    assert_allclose(drafted.sure[i], foreseen(llama, x[-N_ROWS:]), rtol=1e-4)


@pytest.mark.parametrize("name", ["transfer", "prompts"])
def test_the_runtime_drafts_what_learned(name: str, make_lessons: Any, tmp_path: Path) -> None:
    """The file of rows that learned a little drafts, token by token of a text, what torch says that they draft.

    The target's rows are no whole blocks of 32, so that nothing is rounded.
    """
    target = tiny_llama(tmp_path / "t.gguf", seed=3, n_layer=7, n_embd=48, n_head=3, n_head_kv=1)
    parts = TargetParts.of(read_gguf(target))
    kind = kind_of(name, parts, AskedShape())
    assert isinstance(kind, RowKind)
    lesson = lesson_of(make_lessons, parts)
    student = student_of(parts, kind.shape.layer, lesson)
    losses = [student.learn([lesson], 0.1) for _ in range(8)]
    assert losses[-1] < losses[0]
    kind.write(tmp_path / "rows.gguf", student.weights, TOKEN_IDS, Promise((0.4, 0.1)), {"recipe": {}})
    tap, n = parts.taps[1] - 1, parts.network.n_embd
    with Cpu().load(target, LoadOptions(n_ctx=64, draft_head=tmp_path / "rows.gguf")) as model:
        session = model.session(64)
        head = session.draft_head
        assert head is not None
        assert arranged(session) is None
        text, rows, states = lesson.token_ids, list[list[int]](), list[Any]()
        for i, token in enumerate(text[:-1]):
            session.forward(np.array([token], np.int32), n_past=i)
            rows.append([])
            scores = head.begin(i + 1, int(text[i + 1]))
            while scores is not None:
                rows[-1].append(int(head.token_ids[scores.argmax()]))
                scores = head.next(0)
        for i, token in enumerate(text[:-1]):  # without rows, as a forward with taps has none
            states.append(session.forward(np.array([token], np.int32), n_past=i, taps=(tap,)).hidden[tap][0].copy())
    taps = np.zeros((len(text) - 1, 3 * n), np.float16)
    taps[:, n : 2 * n] = states
    known = Lesson("kind", "0" * 16, 0.0, lesson.n_prompt, text, lesson.best, taps, lesson.last)
    (drafted,) = student.drafted(student.weights, [known])
    answer, drafts = text[lesson.n_prompt :], np.array(rows[lesson.n_prompt - 1 :])
    right = np.zeros_like(drafted.right)
    for k in range(N_ROWS):
        right[: 9 - k, k] = drafts[: 9 - k, k] == answer[k + 1 :]
    assert_array_equal(right, drafted.right)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_runtime_drafts_what_an_exit_learned(
    architecture: Literal["llama", "qwen2"], make_lessons: Any, tmp_path: Path
) -> None:
    """The scores behind every token of a text are those of torch; a head that has learned is better than a new one."""
    target = tiny_llama(
        tmp_path / "t.gguf", seed=3, n_layer=7, n_embd=48, n_head=3, n_head_kv=1, architecture=architecture
    )
    parts = TargetParts.of(read_gguf(target))
    kind, lesson, tap = (
        kind_of("exit", parts, AskedShape()),
        lesson_of(make_lessons, parts),
        parts.taps[0] - 1,
    )
    student = kind.new_student(TOKEN_IDS, [], seed=0, device="cpu")
    losses = [student.learn([lesson], 0.1) for _ in range(8)]
    assert losses[-1] < losses[0]
    kind.write(tmp_path / "exit.gguf", student.weights, TOKEN_IDS, Promise((0.4, 0.1)), {})
    text, states, scores = lesson.token_ids, list[Any](), list[Any]()
    with Cpu().load(target, LoadOptions(n_ctx=64, draft_head=tmp_path / "exit.gguf")) as model:
        session = model.session(64)
        head = session.draft_head
        assert head is not None
        for i, token in enumerate(text[:-1]):
            scores.append(head.begin(i, int(token)))
            state = session.forward(np.array([token], np.int32), n_past=i, taps=(tap,)).hidden[tap]
            states.append(state[0].astype(np.float16))
            scores[-1] = None if scores[-1] is None else scores[-1].copy()
    taps = np.zeros((len(text) - 1, 3 * parts.network.n_embd), np.float16)
    taps[:, : parts.network.n_embd] = states
    known = Lesson("kind", "0" * 16, 0.0, lesson.n_prompt, text, lesson.best, taps, lesson.last)
    assert isinstance(student, ExitStudent)
    with torch.no_grad():
        outputs = student._outputs(student.weights, [known])[0].numpy()
    for i in range(1, len(text) - 1):  # before the first token there is nothing that the head knows
        assert_allclose(scores[i], parts.output_rows(TOKEN_IDS) @ outputs[i], rtol=0.01, atol=0.01)
    (drafted,) = student.drafted(student.weights, [known])
    hits = [TOKEN_IDS[scores[i].argmax()] == text[i + 1] for i in range(lesson.n_prompt, len(text) - 1)]
    assert_array_equal(drafted.right[:, 0], hits)
    assert_array_equal(drafted.right[:-1, 1], hits[1:])


def test_other_architectures_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose layers torch has no copy of."""
    parts = TargetParts.of(read_gguf(tiny_llama(tmp_path / "t.gguf", n_layer=7)))
    monkeypatch.setattr("edgedec_export.training.rows.llama.ARCHITECTURES", ("qwen2",))
    with pytest.raises(UnsupportedModelError, match="own layers are trained for qwen2 only"):
        TorchLlama.of(parts)
