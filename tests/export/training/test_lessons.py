"""Lessons: files hold what was written, damaged ones are deleted, batches have each row at its place."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgedec.errors import ModelFormatError
from edgedec_export.training.batches import LessonPlace, batch_of, endless_groups, grouped_by_length, tap_scale
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


STEPS = 3


def test_a_batch_by_hand(make_lessons: Any) -> None:
    """A prompt of 2 tokens and an answer of 4: after the answer's first token, 3, 2 and 1 tokens can be foreseen."""
    (lesson,) = make_lessons([(2, 4)])
    batch = batch_of([lesson], STEPS)
    assert batch.taps.shape == (1, 5, 12)
    assert batch.token_ids.tolist() == [[*lesson.token_ids.tolist(), 0, 0, 0]]
    assert [at.tolist() for at in batch.at] == [[1, 2, 3], [1, 2], [1]]
    assert [which.tolist() for which in batch.which] == [[1, 2, 3], [2, 3], [3]]
    assert batch.answers.tolist() == lesson.token_ids[2:].tolist()
    assert batch.read_by(1)[0, 0] == lesson.token_ids[2]


def test_every_row_foresees_the_token_two_after_it(make_lessons: Any) -> None:
    """For any lengths: row t of step k foresees token t + 2 + k, from the last token of the prompt on."""
    lessons = make_lessons([(3, 9), (5, 2), (2, 1), (4, 6)])
    batch = batch_of(lessons, STEPS)
    n_rows = batch.taps.shape[1]
    for k in range(STEPS):
        expected = [
            (i * n_rows + t, int(lesson.token_ids[t + 2 + k]))
            for i, lesson in enumerate(lessons)
            for t in range(lesson.n_prompt - 1, len(lesson.token_ids) - 2 - k)
        ]
        found = list(zip(batch.at[k].tolist(), batch.answers[batch.which[k]].tolist(), strict=True))
        assert found == expected
    for i, lesson in enumerate(lessons):
        assert_array_equal(batch.taps[i, : len(lesson.taps)], lesson.taps)
    assert_array_equal(batch.last, np.concatenate([lesson.last for lesson in lessons]))


def test_rows_that_the_head_cannot_get_right_do_not_count(make_lessons: Any) -> None:
    """They are those whose most probable token is not in the head's vocabulary."""
    (lesson,) = make_lessons([(2, 30)])
    can_draft = np.zeros(50, np.bool_)
    can_draft[::2] = True
    batch = batch_of([lesson], STEPS, can_draft)
    for which in batch.which:
        assert all(lesson.best[which] % 2 == 0)
    everything = batch_of([lesson], STEPS)
    assert all(
        len(a) + int((lesson.best[k + 1 :] % 2).sum()) == len(b)
        for k, (a, b) in enumerate(zip(batch.at, everything.at, strict=True))
    )


def test_groups_keep_to_the_number_of_rows(make_lessons: Any) -> None:
    """Padding counts; a lesson that is longer than allowed is a group by itself."""
    lessons = make_lessons([(1 + i % 7, 2 + 5 * i) for i in range(20)])
    groups = grouped_by_length(lessons, 60)
    assert sum(map(len, groups)) == len(lessons)
    for group in groups:
        assert len(group) * max(len(lesson.token_ids) for lesson in group) <= 60 or len(group) == 1


@pytest.mark.slow
def test_a_pass_has_every_lesson_once_and_goes_on_from_any_place(tmp_path: Path, make_lessons: Any) -> None:
    """Passes differ in their order; what comes after a place does not depend on where the run began."""
    files = [write_lessons(tmp_path, i, make_lessons([(2, 3 + j) for j in range(4)], seed=i)) for i in range(19)]

    def names(groups: Any) -> list[tuple[LessonPlace, list[str]]]:
        return [(place, [lesson.prompt_hash for lesson in group]) for place, group in groups]

    whole = names(islice(endless_groups(files, 20, 3, LessonPlace()), 150))
    passes = [[name for place, group in whole if place.n_pass == n for name in group] for n in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(set(passes[0]))
    assert len(passes[0]) == 19 * 4
    assert passes[0] != passes[1]
    for i in range(0, 80, 9):
        assert names(islice(endless_groups(files, 20, 3, whole[i][0]), 20)) == whole[i + 1 : i + 21]


def test_the_scale_of_taps_leaves_the_prompt_out(make_lessons: Any) -> None:
    """It is the root of the mean square over the answers' rows."""
    lessons = make_lessons([(2, 5), (3, 4)])
    for lesson in lessons:
        lesson.taps[0] = 20_000
    rows = np.concatenate([lesson.taps[lesson.n_prompt :] for lesson in lessons]).astype(np.float64)
    np.testing.assert_allclose(tap_scale(lessons), np.sqrt((rows**2).mean(axis=0)), rtol=1e-5)
