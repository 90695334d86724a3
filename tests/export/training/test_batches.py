"""Batches hold each lesson's rows at their places, and a training goes on exactly where it stopped."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgedec_export.training.batches import LessonPlace, batch_of, endless_groups, grouped_by_length, tap_scale
from edgedec_export.training.lessons.lesson_files import write_lessons

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
