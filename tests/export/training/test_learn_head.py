"""A head that goes on learning from texts: what it begins as, what it learns from, and what a kill does not change."""

import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.heads.tiny_heads import TinyHead, write_head

import edgedec
from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf
from edgedec_export.training.kinds import AskedShape, HeadKind, SplitKind, kind_of
from edgedec_export.training.lessons.lesson_files import first_files
from edgedec_export.training.short_list import renewed
from edgedec_export.training.target_parts import TargetParts
from edgedec_export.training.train_drafter import LEAST_TEXTS, TrainOptions, learn_head
from edgedec_runtimes.trained_heads.card import Promise
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

TOKENS = np.arange(60, 124, dtype=np.int32)
OPTIONS = TrainOptions(n_passes=1.0, n_threads=1, save_every_s=0.0)
_SCRIPT = """
import os, pickle, sys
from dataclasses import replace
from edgedec_export.training.train_drafter import learn_head

model, texts, work, options, phase, done = pickle.load(sys.stdin.buffer)

def on_progress(progress):
    if progress.phase == phase and progress.done >= done:
        os.kill(os.getpid(), 9)

learn_head(model, texts, work, replace(options, on_progress=on_progress))
"""


@pytest.fixture(scope="module")
def texts(target: Path) -> list[list[int]]:
    """Answers of the target to different prompts: as many as are needed."""
    with edgedec.load(target, runtime="cpu", draft="off", n_ctx=64) as engine:
        prompts = [engine.tokenizer.encode(f"prompt {i}", add_special=True) for i in range(LEAST_TEXTS)]
        answers = [engine.generate(prompt, max_tokens=12, temperature=0).token_ids for prompt in prompts]
    return [[len(prompt), *prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]


def linked(target: Path, folder: Path) -> Path:
    """Return the target in a folder where a head may lie beside it."""
    model = folder / "m.gguf"
    model.hardlink_to(target)
    return model


def write_first(name: str, model: Path) -> Path:
    """Write a head of 64 tokens that has learned nothing beside its model, and return it."""
    from edgedec_export.training.exits.student import new_exit
    from edgedec_export.training.network import new_weights

    kind = maker(name, model)
    if isinstance(kind, SplitKind):
        place, weights = model.with_name("m.head.gguf"), new_exit(kind.parts)
    else:
        card, scale = kind.card(64), np.linspace(0.5, 2, 3 * 64, dtype=np.float32)
        place, weights = model.with_name("m.head"), new_weights(card, kind.parts.output_norm, scale, 3)
    kind.write(place, weights, TOKENS, Promise((0.5,)), {})
    return place


def maker(name: str, model: Path) -> HeadKind | SplitKind:
    """Return the kind of that name for a model."""
    kind = kind_of(name, TargetParts.of(read_gguf(model)), AskedShape())
    assert isinstance(kind, HeadKind | SplitKind)
    return kind


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="training needs torch, which is not installed")
@pytest.mark.parametrize("name", ["head", "exit"])
@pytest.mark.usefixtures("one_thread")
def test_a_head_learns_and_kills_change_nothing(
    name: str, target: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    """It begins as the old one, gets the answers' tokens, and drafts more; killed twice it comes out the same."""
    model = linked(target, tmp_path)
    old, sizes = load_head(write_first(name, model)), [len(text) - 1 - text[0] for text in texts]
    learned = learn_head(model, [[*texts[0][:-1], 7], *texts], tmp_path / "whole", OPTIONS)
    new, files = load_head(learned.path), first_files(tmp_path / "whole" / "lessons", sum(sizes))
    assert fit(new, read_gguf(model)).notes == ()
    assert (len(new.d2t), len(np.setdiff1d(new.d2t, old.d2t)), new.card.own_output) == (64, 16, False)
    assert [file.number for file in files if file.is_judge] == [6, 18]
    assert learned.n_judged == sum(sizes[48:56]) + sum(sizes[144:152])
    assert learned.after > learned.before >= 1
    for lesson, text in zip(files[0].read(), texts[:8], strict=True):
        assert (lesson.n_prompt, lesson.token_ids.tolist()) == (text[0], text[1:])
        assert lesson.best.tolist() == text[1 + text[0] :]

    kind = maker(name, model)
    student = kind.new_student(old.d2t, files, seed=0, device="cpu")
    student.begin(old)
    is_exit = isinstance(kind, SplitKind)
    finished = kind.finished(student.weights) if is_exit else kind._finished(student.weights, old.d2t)  # type: ignore[union-attr]
    for tensor, values in finished.items():
        assert_allclose(values, old.tensors[tensor].floats(), rtol=1e-5, atol=1e-7)

    for phase, done in (("answers", 100), ("training", 800)):
        data = pickle.dumps((model, texts, tmp_path / "torn", OPTIONS, phase, done))
        assert subprocess.run([sys.executable, "-c", _SCRIPT], input=data, check=False).returncode == -9
    again = learn_head(model, texts, tmp_path / "torn", OPTIONS)
    assert again[1:] == learned[1:]
    assert again.path.read_bytes() == learned.path.read_bytes()


@pytest.mark.slow
def test_what_can_not_learn_is_refused(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head, too few prompts, and a head of another make; nothing is written."""
    monkeypatch.setattr("edgedec_export.training.kinds.find_spec", lambda name: object())
    model, work, options = linked(target, tmp_path), tmp_path / "work", replace(OPTIONS, cache_dir=tmp_path / "cache")
    many = [[1, i, 5] for i in range(LEAST_TEXTS)]
    with pytest.raises(EdgedecError, match="m has no draft head that fits"):
        learn_head(model, many, work, options)
    n_vocab = TargetParts.of(read_gguf(model)).network.n_vocab
    tiny = TinyHead(n_embd=64, n_embd_target=64, taps=(2, 3, 4), n_vocab_target=n_vocab)
    write_head(tmp_path / "m.head", tiny)  # with fewer rows of gate than one from here
    with pytest.raises(EdgedecError, match=r"answers to 1 prompts are kept .*, and 192 are needed"):
        learn_head(model, [[1, 3, 5]] * 500, work, options)
    with pytest.raises(EdgedecError, match=r"m\.head: only heads and exits that edgedec train-drafter made can"):
        learn_head(model, many, work, options)
    assert not work.exists()


def test_a_list_takes_new_tokens_for_those_that_are_not_written() -> None:
    """A quarter at most; what comes twice is not often, and what is often written stays."""
    counts = np.array([0, 3, 9, 0, 5, 2, 0, 8, 0, 4])
    assert renewed(np.array([6, 1, 8, 0, 3, 2, 4, 5], np.int32), counts).tolist() == [6, 1, 8, 0, 2, 4, 7, 9]
    assert renewed(np.array([9, 7, 4, 2], np.int32), counts).tolist() == [9, 7, 4, 2]
    assert renewed(np.array([9, 7, 4, 2, 1, 0, 3, 6], np.int32), counts).tolist() == [9, 7, 4, 2, 1, 0, 3, 6]
