"""The projector that belongs to a model is found beside it, and one of another model is not taken."""

from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_projectors import KINDS, M_ROPE_KINDS, tiny_projector

from edgedec.errors import ModelFormatError, RequestError, UnsupportedModelError
from edgedec_runtimes.pictures.finding import content_hash, find_projector, fitting_projector
from edgedec_runtimes.pictures.header import read_projector


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder / names[0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["SmolVLM-256M-Q8_0.gguf", "mmproj-SmolVLM-256M-f16.gguf"], "mmproj-SmolVLM-256M-f16.gguf"),
        (["SmolVLM-256M-Q8_0.gguf", "mmproj-SmolVLM-500M-f16.gguf"], None),
        (["a-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "a-Q8_0.gguf"], "mmproj-F16.gguf"),
        (["a-Q4_K_M.gguf", "mmproj-F16.gguf", "b-Q4_K_M.gguf"], None),
        (["a-Q4_K_M.gguf", "a-mmproj-F16.gguf", "a.mmproj-Q8_0.gguf", "b-Q4_K_M.gguf"], "a.mmproj-Q8_0.gguf"),
        (
            ["a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf", "mmproj-model-f16.gguf"],
            "mmproj-model-f16.gguf",
        ),
        (["a.gguf"], None),
    ],
)
def test_the_projector_beside_a_model(tmp_path: Path, names: list[str], expected: str | None) -> None:
    found = find_projector(made(tmp_path, *names))
    assert (found and found.name) == expected


@pytest.mark.parametrize("kind", [*KINDS, *M_ROPE_KINDS])
def test_the_header_says_how_wide_rows_are(tmp_path: Path, kind: str) -> None:
    header = read_projector(tiny_projector(tmp_path / "mmproj.gguf", kind, n_embd=96, n_deepstack=2))
    assert (header.projector_type, header.n_embd) == (kind, 96)
    assert header.row_width == 96 * (3 if kind == "qwen3vl_merger" else 1)
    assert header.is_mutual == (kind in ("gemma3", "gemma4v"))


def test_a_projector_of_another_width_is_not_the_models(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "a-f16.gguf")
    fitting = tiny_projector(tmp_path / "mmproj-a-f16.gguf", "idefics3")
    assert fitting_projector(fitting, model).n_embd == 64
    wrong = tiny_projector(tmp_path / "mmproj-a-f16.gguf", "idefics3", n_embd=96)
    with pytest.raises(RequestError, match=r"rows of 96 numbers, and the embeddings of a-f16.gguf .* have 64"):
        fitting_projector(wrong, model)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"more": {"clip.projector_type": "telepathy"}}, UnsupportedModelError, "'telepathy'; those that are read"),
        ({"more": {"clip.has_vision_encoder": False}}, UnsupportedModelError, "takes no pictures"),
        ({"without": ("mm.model.fc.weight",)}, ModelFormatError, "no tensor 'mm.model.fc.weight'"),
        ({"without": ("clip.vision.patch_size",)}, ModelFormatError, "no 'clip.vision.patch_size'"),
        ({"more": {"clip.vision.image_size": 2**31}}, ModelFormatError, "image_size"),
        (
            {"more": {"general.type": "model", "general.architecture": "llama"}},
            UnsupportedModelError,
            "no picture encoder",
        ),
    ],
)
def test_what_is_missing_or_absurd_is_named(
    tmp_path: Path, change: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_projector(tiny_projector(tmp_path / "mmproj.gguf", "idefics3", **change))  # type: ignore[arg-type]


def test_two_encoders_of_one_form_have_other_hashes(tmp_path: Path) -> None:
    hashes = [content_hash(tiny_projector(tmp_path / f"{seed}.gguf", "idefics3", seed=seed)) for seed in (0, 1, 0)]
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]
