"""The projector of a model is found beside it; marks stand for pictures while a chat is rendered, then ids of rows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_projectors import KINDS, M_ROPE_KINDS, tiny_projector

from edgedec.control_tokens import MARK
from edgedec.errors import ModelFormatError, PromptTooLongError, RequestError, TemplateError, UnsupportedModelError
from edgedec.pictures import Block
from edgedec_runtimes.pictures.contract import PictureLayout
from edgedec_runtimes.pictures.finding import content_hash, find_projector, fitting_projector
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.prompts import prompt_ids, with_marks


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


class Words:
    """A tokenizer of characters, with one special token, <mark>, which is 1000; BOS is 1."""

    n_vocab = 1001
    bos_token = "<s>"
    control_texts = ("<mark>",)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        pieces = text.split("<mark>") if parse_special else [text]
        ids = [1] if add_special else []
        for i, piece in enumerate(pieces):
            ids += [1000] * bool(i) + [ord(letter) for letter in piece]
        return ids

    def least_tokens(self, text: str) -> int:
        return len(text) // 4


LAYOUT = PictureLayout(("<mark>", 0, "<mark>"), (Block(2, 2, 1),))
IDS = ((-5, -6),)


def ids(text: str, markers: Sequence[str], n_most: int = 100) -> list[int]:
    spelled = [(marker, LAYOUT, IDS) for marker in markers]
    return prompt_ids(Words(), text, spelled, n_most)  # type: ignore[arg-type]


def test_a_mark_becomes_the_models_marks_and_the_ids_of_rows() -> None:
    assert ids("aMb", ["M"]) == [1, 97, 1000, -5, -6, 1000, 98]
    assert ids("MM", ["M"]) == [1, 1000, -5, -6, 1000, 1000, -5, -6, 1000]


def test_what_a_user_writes_like_a_mark_stays_text() -> None:
    assert ids(f"aMb<{MARK}mark>M", ["M"]) == [1, 97, 1000, -5, -6, 1000, *map(ord, "b<mark>"), 1000, -5, -6, 1000]


def test_pictures_stand_where_their_parts_do_and_those_of_the_list_first() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": b"1", "name": "one.png"},
        {"type": "text", "text": "b"},
    ]
    marked, given = with_marks(
        [{"role": "user", "content": parts, "images": [b"0"]}, {"role": "assistant", "content": "c"}]
    )
    assert [(one.image, one.name) for one in given] == [(b"0", ""), (b"1", "one.png")]
    assert marked[0] == {"role": "user", "content": f"{given[0].marker}a{given[1].marker}b"}
    assert marked[1]["content"] == "c"


def test_texts_that_follow_each_other_stay_parts() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image", "image": b"1"}]
    marked, given = with_marks([{"role": "user", "content": texts}])
    assert [part["text"] for part in marked[0]["content"]] == ["a", f"b{given[0].marker}"]


def test_marks_are_drawn_anew_for_each_request() -> None:
    message = {"role": "user", "content": "a", "images": [b"x"]}
    assert with_marks([message])[1][0].marker != with_marks([message])[1][0].marker


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image"}]}, "needs 'image'"),
        ({"role": "user", "content": [{"type": "audio", "audio": b""}]}, "a text or a picture"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "a text or a picture"),
        ({"role": "user", "content": "", "images": b"12"}, "a list of pictures"),
        ({"role": "user", "content": "", "images": [b"1"] * 65}, "more than 64 pictures"),
    ],
)
def test_malformed_messages_are_refused_by_their_part(message: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        with_marks([{"role": "user", "content": "", "images": [b"1"]}, message])


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_encoded() -> None:
    assert len(ids("aMb", ["M"], n_most=7)) == 7
    with pytest.raises(PromptTooLongError, match="about 8 tokens"):
        ids("aMb", ["M"], n_most=6)


def test_a_template_that_leaves_a_picture_out_is_named() -> None:
    with pytest.raises(TemplateError, match="leaves out picture 2"):
        ids("aMb", ["M", "N"])
