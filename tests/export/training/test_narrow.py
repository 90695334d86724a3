"""A narrow draft model begins as the target that it is cut from, and its file computes what its arrays say."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.errors import OptionError, RequestError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.training.kinds import AskedShape, NarrowKind, kind_of
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.narrow import gguf as narrow_gguf
from edgedec_export.training.narrow.gguf import bytes_per_token, write_narrow
from edgedec_export.training.narrow.initial import basis, initial_weights
from edgedec_export.training.narrow.shape import shape_of
from edgedec_export.training.target_parts import TargetParts

TOKENS = np.array([1, 70, 3, 99, 5, 200, 44, 3, 70], np.int32)


def parts_of(path: Path) -> TargetParts:
    """Return the parts of a file."""
    return TargetParts.of(read_gguf(path))


def logits_of(path: Path) -> Any:
    """Return float32[n, n_vocab], the logits after each of TOKENS on the cpu runtime."""
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=64) as engine:
        session = engine.session()
        try:
            return session.forward(TOKENS, n_past=0, rows="all").logits[:].copy()
        finally:
            session.close()


@pytest.fixture
def lessons(make_lessons: Any) -> list[Lesson]:
    """Lessons of a target of 64 elements."""
    made: list[Lesson] = make_lessons([(4, 30)] * 5, n_embd=64)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_at_the_targets_own_size_the_logits_are_the_targets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lessons: list[Lesson],
    architecture: Literal["llama", "qwen2"],
    tied: bool,
) -> None:
    """Moving norms, turning states and reordering q and k change nothing, where no layer and no width is left out."""
    monkeypatch.setattr(narrow_gguf, "MATRIX_TYPE", GGMLType.F32)
    target = tiny_llama(tmp_path / "t.gguf", seed=5, n_layer=7, n_ff=96, architecture=architecture, tied=tied)
    parts = parts_of(target)
    shape = shape_of(parts.network, 7, 64)
    weights = initial_weights(parts, shape, lessons, 0)
    write_narrow(tmp_path / "whole.gguf", parts, shape, weights, "{}")
    assert_allclose(logits_of(tmp_path / "whole.gguf"), logits_of(target), rtol=1e-3, atol=2e-3)


@pytest.mark.slow
def test_the_file_has_the_shape_and_the_targets_tokenizer(target: Path, tmp_path: Path, lessons: list[Lesson]) -> None:
    """Every size is in the header; the bytes that a drafted token reads are those of layers and output."""
    parts = parts_of(target)
    shape = shape_of(parts.network)
    assert (shape.n_layer, shape.n_embd, shape.n_ff) == (4, 32, 64)
    out = tmp_path / "draft.gguf"
    write_narrow(out, parts, shape, initial_weights(parts, shape, lessons, 0), "{}")
    written = read_gguf(out)
    assert _tokenizer(written) == _tokenizer(parts.gguf)
    read = [tensor for tensor in written.tensors.values() if len(tensor.shape) == 2]
    assert sum(t.n_bytes for t in read if t.name != "token_embd.weight") == bytes_per_token(shape)
    assert written.tensors["output.weight"].shape == (32, 260)
    assert logits_of(out).shape == (len(TOKENS), 260)
    write_narrow(out, parts, shape, initial_weights(parts, shape, lessons, 0), "{}")  # replaces the file
    with pytest.raises(RequestError):
        write_narrow(target, parts, shape, initial_weights(parts, shape, lessons, 0), "{}")


def _tokenizer(gguf: GGUF) -> dict[str, str]:
    return {key: str(value) for key, value in gguf.metadata.items() if key.startswith("tokenizer.")}


def test_the_basis_is_orthonormal_and_begins_with_the_largest_direction(target: Path, lessons: list[Lesson]) -> None:
    """Where one direction makes up nearly all of every hidden state, it is the first column."""
    parts = parts_of(target)
    direction = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    for lesson in lessons:
        lesson.taps[:] = (lesson.taps.astype(np.float32) + 50 * np.tile(direction, 3)).astype(np.float16)
        lesson.last[:] = (lesson.last.astype(np.float32) + 50 * direction).astype(np.float16)
    found = basis(lessons, parts, 32)
    assert_allclose(found.T @ found, np.eye(32), atol=1e-5)
    assert abs(float(found[:, 0] @ direction)) / float(np.linalg.norm(direction)) > 0.99


def test_layers_of_other_architectures_begin_at_random(target: Path, lessons: list[Lesson]) -> None:
    """By the seed; the embeddings are the target's in any case."""
    parts = parts_of(target)
    shape = shape_of(parts.network)
    one, same, other = (initial_weights(parts, shape, lessons, seed, ()) for seed in (1, 1, 2))
    assert_array_equal(one["0.q"], same["0.q"])
    assert not np.array_equal(one["0.q"], other["0.q"])
    assert_array_equal(one["enter"], other["enter"])


@pytest.mark.parametrize(
    ("n_layers", "width", "message"),
    [
        (0, None, "n_layers is 0; it must be from 1 to the target's 7"),
        (8, None, "n_layers is 8"),
        (None, 40, "width is 40; it must be a multiple of 32, at most the target's 64"),
        (None, 96, "width is 96"),
        (None, -32, "width is -32"),
    ],
)
def test_shapes_that_cannot_be(target: Path, n_layers: int | None, width: int | None, message: str) -> None:
    """Each is refused by name."""
    with pytest.raises(OptionError, match=message):
        kind_of("model", parts_of(target), AskedShape(n_layers=n_layers, width=width))


def test_a_head_has_no_layers_to_choose(target: Path) -> None:
    """Nor is there a third kind."""
    parts = parts_of(target)
    with pytest.raises(OptionError, match="the kind head has no such choice, only the kinds block and model"):
        kind_of("head", parts, AskedShape(n_layers=2))
    with pytest.raises(OptionError, match="one of head, block, model"):
        kind_of("tail", parts, AskedShape())


def test_a_drafted_tokens_share_is_that_of_the_bytes(target: Path) -> None:
    """Of the draft model's layers and output matrix to the target's; the output matrix counts whole."""
    parts = parts_of(target)
    kind = NarrowKind(parts=parts, shape=shape_of(parts.network))
    tensors = parts.gguf.tensors
    n_target = sum(tensor.n_bytes for name, tensor in tensors.items() if name != "token_embd.weight")
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64
    expected = (4 * layer + 260 * 32) * 34 / 32 / n_target
    assert kind.price(100, [], CostCurve()).of(3) == pytest.approx(3 * expected)
