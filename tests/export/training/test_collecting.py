"""Lessons are what the target writes and computes alone, whatever stopped the runs that collected them."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.errors import CancelledError, RequestError
from edgedec.progress import CancelToken, Progress
from edgedec_apps.bench.prompts import read_prompts as benchmark_prompts
from edgedec_export.training.lessons.collecting import Collecting, benchmark_hashes, collect
from edgedec_export.training.lessons.collecting_processes import AnswerModel, collect_together
from edgedec_export.training.lessons.decode_many import halves
from edgedec_export.training.lessons.lesson_files import Lesson, first_files, lesson_files, prompt_hash
from edgedec_export.training.lessons.openings import Opening, opening_of

pytestmark = pytest.mark.slow

LAYERS = (1, 2, 3, 5)


def opened(path: Path) -> edgedec.Engine:
    """Return an engine on the cpu runtime without drafts."""
    return edgedec.load(path, runtime="cpu", draft="off", n_ctx=512, n_threads=1)


def lessons_in(folder: Path) -> list[Lesson]:
    """Return all lessons of a folder."""
    return [lesson for file in lesson_files(folder).values() for lesson in file.read()]


def check_against_single_forwards(engine: edgedec.Engine, lesson: Lesson) -> None:
    """Compare a lesson with one forward over its tokens: the runtime is batch-invariant, so bits are equal."""
    session = engine.session()
    n, tokens = lesson.n_prompt, lesson.token_ids
    rows = np.arange(n - 1, len(tokens) - 1, dtype=np.int32)
    forward = session.forward(tokens[:-1], n_past=0, rows=rows, taps=LAYERS)
    taps = np.concatenate([halves(forward.hidden[layer]) for layer in LAYERS[:-1]], axis=1)
    assert_array_equal(lesson.taps, taps, strict=True)
    assert_array_equal(lesson.last, halves(forward.hidden[LAYERS[-1]])[n - 1 :], strict=True)
    assert_array_equal(lesson.best, forward.logits.argmax(axis=1).astype(np.int32), strict=True)
    if lesson.temperature == 0:
        assert_array_equal(lesson.best, tokens[n:])
    session.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_architecture(tmp_path: Path, name: str) -> None:
    """Without a chat template the target continues the opening, and its continuation is the lesson."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], n_layer=7))
    folder = tmp_path / "lessons"
    folder.mkdir()
    with opened(path) as engine:
        collect(engine, Collecting(folder, LAYERS, 40, n_answer=8, n_message=8, n_ctx=512))
        lessons = lessons_in(folder)
        assert sum(lesson.n_answer for lesson in lessons) >= 40
        for lesson in lessons[:6]:
            check_against_single_forwards(engine, lesson)


def test_lessons_are_the_engines_answers(target: Path, tmp_path: Path) -> None:
    """A whole prompt is answered as the engine answers it: greedy, and at 0.8 with the model's other defaults."""
    with opened(target) as engine:
        own = tuple(Opening("own", f"prompt {i}", is_whole=True) for i in range(8))
        collect(engine, Collecting(tmp_path, LAYERS, 1, n_answer=12, n_ctx=512, n_at_once=5, prompts=own))
        lessons = lessons_in(tmp_path)
        assert [(lesson.prompt_hash, lesson.temperature) for lesson in lessons] == [
            (prompt_hash(opening.text), float(np.float32(t))) for opening in own for t in (0.0, 0.8)
        ]
        for i, lesson in enumerate(lessons):
            message = [{"role": "user", "content": own[i // 2].text}]
            prompt_ids = engine.chat_ids(message)
            assert lesson.token_ids[: lesson.n_prompt].tolist() == prompt_ids
            seed = (i // 2) << 8 ^ (1 + i % 2)
            temperature = 0.8 if i % 2 else 0.0
            again = engine.generate(prompt_ids, temperature=temperature, seed=seed, max_tokens=12)
            answer = lesson.token_ids[lesson.n_prompt :].tolist()
            assert answer[: len(again.token_ids)] == list(again.token_ids)
            assert all(engine.tokenizer.is_end(token) for token in answer[len(again.token_ids) :])
            check_against_single_forwards(engine, lesson)


def test_ten_runs_that_were_stopped_collect_what_one_run_collects(target: Path, tmp_path: Path) -> None:
    """The files, whose names hold the hashes of their contents, are the same."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with opened(target) as engine:
        jobs = []
        for folder in (whole, cut):
            folder.mkdir()
            jobs.append(Collecting(folder, LAYERS, 900, n_answer=16, n_message=9, n_ctx=512, n_at_once=7, seed=5))
        collect(engine, jobs[0])
        draw = Random(2)
        for _ in range(10):
            cancel, reports_left = CancelToken(), [None] * draw.randrange(40)

            def stop(_: Progress, cancel: CancelToken = cancel, reports_left: list[None] = reports_left) -> None:
                if reports_left:
                    reports_left.pop()
                else:
                    cancel.cancel()

            try:
                collect(engine, jobs[1], stop, cancel)
            except CancelledError:
                continue
        if files := list(cut.iterdir()):
            files[0].unlink()  # a file that was lost is made again
        collect(engine, jobs[1])
    names = [[file.path.name for file in first_files(folder, 900)] for folder in (whole, cut)]
    assert names[0] == names[1]
    assert len(names[0]) > 3
    assert first_files(whole, 10**9) == []


def test_no_benchmark_prompt_is_learned_from(target: Path, tmp_path: Path) -> None:
    """A prompt of `edgedec bench` is dropped, in whatever case and spacing: its hash is in the list."""
    texts = [prompt.text for prompt in benchmark_prompts()]
    assert {prompt_hash(text) for text in texts} <= benchmark_hashes()
    own = (Opening("own", texts[0].upper() + "  ", is_whole=True), Opening("own", "hello", is_whole=True))
    with opened(target) as engine:
        collect(engine, Collecting(tmp_path, LAYERS, 1, n_answer=8, n_message=8, n_ctx=512, prompts=own))
    assert prompt_hash("hello") in {lesson.prompt_hash for lesson in lessons_in(tmp_path)}
    assert not {lesson.prompt_hash for lesson in lessons_in(tmp_path)} & benchmark_hashes()


def test_openings() -> None:
    """The user's own prompts come first; the drawn ones are the same for a seed, and of every kind."""
    own = (Opening("own", "mine", is_whole=True),)
    drawn = [opening_of(number, 4, own) for number in range(300)]
    assert drawn[0] == own[0]
    assert drawn == [opening_of(number, 4, own) for number in range(300)]
    assert drawn[1:] != [opening_of(number, 5, own) for number in range(1, 300)]
    kinds = {"chat", "code", "free", "math", "own", "qa", "rewriting", "summary", "translation"}
    assert {opening.kind for opening in drawn} == kinds
    assert not any("{topic}" in opening.text or "\\n" in opening.text for opening in drawn)


def test_several_processes_write_what_one_writes(target: Path, tmp_path: Path) -> None:
    """The files are the same, name by name, and names hold the hashes of contents; nothing else is left."""
    one, three = tmp_path / "one", tmp_path / "three"
    job = Collecting(one, LAYERS, 500, n_answer=8, n_message=8, n_ctx=512)
    for folder in (one, three):
        folder.mkdir()
    with opened(target) as engine:
        collect(engine, job)
    seen: list[Progress] = []
    collect_together(AnswerModel(target, 512, n_threads=1), replace(job, folder=three), 3, seen.append)
    assert (seen[-1].done, seen[-1].total) == (500, 500)
    wanted = [file.path.name for file in first_files(one, 500)]
    assert len(wanted) > 3
    assert [file.path.name for file in first_files(three, 500)] == wanted
    assert {path.suffix for path in three.iterdir()} == {".npz"}


def test_a_process_that_fails_ends_the_others(target: Path, tmp_path: Path) -> None:
    """What the process said last is in the message."""
    target.with_name("short.gguf").write_bytes(target.read_bytes()[:1000])
    with pytest.raises(RequestError, match=r"a process that writes answers stopped: .*short\.gguf"):
        collect_together(AnswerModel(target.with_name("short.gguf"), 512), Collecting(tmp_path, LAYERS, 500), 2)


def test_cancelling_ends_the_processes(target: Path, tmp_path: Path) -> None:
    """The files that are complete stay."""
    cancel = CancelToken()

    def on_progress(progress: Progress) -> None:
        if progress.done:
            cancel.cancel()

    job = Collecting(tmp_path, LAYERS, 10**9, n_answer=8, n_message=8, n_ctx=512)
    with pytest.raises(CancelledError):
        collect_together(AnswerModel(target, 512, n_threads=1), job, 2, on_progress, cancel)
    assert lesson_files(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
