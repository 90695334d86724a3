"""Marks stand for pictures while a chat is rendered, and become marks of the model and ids of rows."""

from collections.abc import Sequence

import pytest

from edgedec.control_tokens import MARK
from edgedec.errors import PromptTooLongError, RequestError, TemplateError
from edgedec.pictures import Block
from edgedec_runtimes.pictures.contract import PictureLayout
from edgedec_runtimes.pictures.prompts import prompt_ids, with_marks


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
