"""A narrow draft model in torch computes what its file computes, and learns what can be learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import edgedec
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.training.narrow import gguf as narrow_gguf
from edgedec_export.training.narrow.gguf import write_narrow
from edgedec_export.training.narrow.initial import initial_weights
from edgedec_export.training.narrow.shape import shape_of
from edgedec_export.training.target_parts import TargetParts

torch = pytest.importorskip("torch", reason="training needs torch, which is not installed")
if True:  # after the skip
    from edgedec_export.training.narrow.student import NarrowStudent, states_of


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def student(parts: TargetParts, lessons: Any, seed: int = 0) -> NarrowStudent:
    """Return a student of the default shape."""
    shape = shape_of(parts.network)
    weights = initial_weights(parts, shape, lessons, seed, ())
    return NarrowStudent(parts, shape, weights, np.arange(200, dtype=np.int32), "cpu")


def test_the_network_is_the_files(
    parts: TargetParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_lessons: Any
) -> None:
    """Logits in torch are those of the cpu runtime with the file in floats, whatever follows in the batch."""
    monkeypatch.setattr(narrow_gguf, "MATRIX_TYPE", GGMLType.F32)
    shape = shape_of(parts.network, 3, 32)
    weights = initial_weights(parts, shape, make_lessons([(4, 20)], n_embd=64), 0)
    rng = np.random.default_rng(3)
    for name in ("0.attn_norm", "1.ffn_norm", "output_norm"):
        weights[name] = rng.uniform(0.5, 1.5, 32).astype(np.float32)
    out = tmp_path / "draft.gguf"
    write_narrow(out, parts, shape, weights, "{}")
    tokens = rng.integers(4, 200, 12).astype(np.int32)
    padded = np.concatenate([tokens, [0, 0]])
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    states = states_of(shape, tensors, torch.from_numpy(parts.embeddings(padded))[None])[0, :12]
    ours = (states @ tensors["leave"].T).numpy() @ parts.output_rows(np.arange(260)).T
    with edgedec.load(out, runtime="cpu", draft="off", n_ctx=64) as engine:
        session = engine.session()
        assert_allclose(session.forward(tokens, n_past=0, rows="all").logits[:], ours, rtol=0, atol=0.02)
        session.close()


def test_a_draft_is_right_where_the_model_writes_the_text(parts: TargetParts, make_lessons: Any) -> None:
    """Token k after token i counts by the model's best token in its place; a draft never reaches past the answer."""
    lessons = make_lessons([(3, 9), (2, 1), (5, 4)], n_embd=64)
    one = student(parts, lessons)
    drafted = one.drafted(one.weights, lessons)
    assert [text.right.shape for text in drafted] == [(3, 6), (8, 6)]  # by length; a single token is left out
    for text, lesson in zip(drafted, (lessons[2], lessons[0]), strict=True):
        embeddings = torch.from_numpy(parts.embeddings(lesson.token_ids))[None]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            states = states_of(one.shape, one.weights, embeddings)[0] @ one.weights["leave"].T
            rows = torch.from_numpy(parts.output_rows(np.arange(260))).bfloat16()
            chances = (states.bfloat16() @ rows.T).float().softmax(-1)
        best = chances.argmax(-1).numpy()
        n = len(lesson.token_ids)
        for i in range(lesson.n_answer - 1):
            for k in range(6):
                at = lesson.n_prompt + i + k  # the token that was read before
                right = at + 1 < n and best[at] == lesson.token_ids[at + 1]
                assert text.right[i, k] == right
                assert text.sure[i, k] == pytest.approx(float(chances[at].max()) if at + 1 < n else 0.0, rel=0.05)


def test_it_learns_what_can_be_learned(parts: TargetParts, make_lessons: Any) -> None:
    """Where every answer repeats one token, some steps suffice; a restored student goes on with the same bits."""
    lessons = make_lessons([(4, 20)] * 6, n_embd=64)
    for lesson in lessons:
        lesson.token_ids[4:] = 17
        lesson.last[:] = 8 * parts.output_rows(np.array([17]))[0] / parts.output_norm
    first = student(parts, lessons)
    losses = [first.learn(lessons, 0.1) for _ in range(60)]
    assert losses[-1] < losses[0] / 2
    assert np.concatenate([text.right[:, 0] for text in first.drafted(first.weights, lessons)]).mean() > 0.9
    second = student(parts, lessons, seed=5)
    second.restore(first.state())
    assert [first.learn(lessons, 0.2), first.learn(lessons, 0.2)] == [
        second.learn(lessons, 0.2),
        second.learn(lessons, 0.2),
    ]
