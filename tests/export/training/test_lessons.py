"""Files of lessons hold what was written, and a damaged one is noticed and deleted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgedec.errors import ModelFormatError
from edgedec_export.training.lessons.lesson_files import HELD_BACK_EVERY, lesson_files, prompt_hash, write_lessons

ARRAYS = ("token_ids", "best", "taps", "last")
FACTS = ("kind", "prompt_hash", "temperature", "n_prompt", "n_answer")


def test_what_is_written_is_read(tmp_path: Path, make_lessons: Any) -> None:
    """Every number comes back, by read() and by the calls that read only a part."""
    lessons = make_lessons([(3, 5), (1, 1), (7, 2)])
    file = write_lessons(tmp_path, 11, lessons)
    (number, found), *others = lesson_files(tmp_path).items()
    assert (number, found, others) == (11, file, [])
    assert found.n_tokens == 8
    for lesson, again in zip(lessons, found.read(), strict=True):
        assert [getattr(lesson, name) for name in FACTS] == [getattr(again, name) for name in FACTS]
        for name in ARRAYS:
            assert_array_equal(getattr(lesson, name), getattr(again, name), strict=True)
    assert found.prompt_hashes() == {lesson.prompt_hash for lesson in lessons}
    for lesson, answer in zip(lessons, found.answers(), strict=True):
        assert_array_equal(lesson.token_ids[lesson.n_prompt :], answer, strict=True)


def test_a_file_without_lessons(tmp_path: Path) -> None:
    """Where every prompt of a file was dropped, the file is there all the same, so that it is not made again."""
    file = write_lessons(tmp_path, 0, [])
    assert (file.n_tokens, file.read(), file.answers(), file.prompt_hashes()) == (0, [], [], set())


def test_one_file_in_twelve_is_held_back(tmp_path: Path) -> None:
    """The choice depends on the number alone."""
    files = [write_lessons(tmp_path, number, []) for number in range(2 * HELD_BACK_EVERY)]
    assert [file.number for file in files if file.is_held_back] == [11, 23]


def test_damage_is_noticed(tmp_path: Path, make_lessons: Any) -> None:
    """Wherever a byte is changed or the end is missing, an error says so and the file is gone."""
    rng = np.random.default_rng(1)
    for case in range(30):
        file = write_lessons(tmp_path, 1, make_lessons([(3, 5), (2, 4)]))
        data = bytearray(file.path.read_bytes())
        if case % 3:
            data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
        else:
            del data[rng.integers(len(data)) :]
        file.path.write_bytes(data)
        for read in (file.prompt_hashes, file.answers):
            try:
                read()
            except ModelFormatError:
                file.path.write_bytes(data)
        with pytest.raises(ModelFormatError, match="was damaged and is deleted; run the command again"):
            file.read()
        assert lesson_files(tmp_path) == {}


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    """A temporary file of a run that was killed is no file of lessons."""
    (tmp_path / "lessons-000001-5-0123456789abcdef.npz.0123.tmp").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert lesson_files(tmp_path) == {}


def test_prompts_that_differ_in_case_spaces_and_punctuation_are_one() -> None:
    """Their words are compared."""
    assert prompt_hash(" What is\n3 + 4?") == prompt_hash("what is 3 4") != prompt_hash("what is 34")
