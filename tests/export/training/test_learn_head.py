"""A head that goes on learning from texts: what it begins as, what it learns from, and what a kill does not change."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec_export.training.kinds import AskedShape, HeadKind, SplitKind, kind_of
from edgedec_export.training.lessons.lesson_files import first_files
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
from pathlib import Path
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


def with_head(kind: str, target: Path, folder: Path) -> tuple[Path, Path]:
    """Link the target into a folder, with a head of 64 tokens that has learned nothing; return model and head."""
    model = folder / "m.gguf"
    model.hardlink_to(target)
    if kind == "exit":
        kinds: Any = kind_of("exit", TargetParts.of(read_gguf(model)), AskedShape())
        head = folder / "m.head.gguf"
    else:
        kinds, head = kind_of("head", TargetParts.of(read_gguf(model)), AskedShape()), folder / "m.head"
    kinds.write(head, first_weights(kinds), TOKENS, Promise((0.5,)), {})
    return model, head


def first_weights(kind: HeadKind | SplitKind) -> dict[str, Any]:
    """Return random tensors of a head."""
    rng = np.random.default_rng(4)
    from edgedec_export.training.exits.student import new_exit
    from edgedec_export.training.network import new_weights

    if isinstance(kind, SplitKind):
        return new_exit(kind.parts)
    card = kind.card(len(TOKENS))
    scale = rng.uniform(0.5, 2, 3 * card.n_embd).astype(np.float32)
    return new_weights(card, kind.parts.output_norm, scale, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "exit"])
def test_a_head_learns_and_kills_change_nothing(
    kind: str, target: Path, texts: list[list[int]], tmp_path: Path, one_thread: None
) -> None:
    """It begins as the old one, gets the answers' tokens, and drafts more; killed twice it comes out the same."""
    pytest.importorskip("torch", reason="training needs torch, which is not installed")
    model, place = with_head(kind, target, tmp_path)
    old, gguf = load_head(place), read_gguf(model)
    learned = learn_head(model, texts, tmp_path / "whole", OPTIONS)
    new, files = (
        load_head(learned.path),
        first_files(tmp_path / "whole" / "lessons", sum(len(t) - 1 - t[0] for t in texts)),
    )
    assert fit(new, gguf).notes == ()
    assert (len(new.d2t), new.card.own_output) == (64, old.card.own_output)
    assert len(np.setdiff1d(new.d2t, old.d2t)) == 16
    assert [file.number for file in files if file.is_judge] == [6, 18]
    assert learned.n_judged == sum(len(t) - 1 - t[0] for t in (*texts[48:56], *texts[144:152]))
    assert learned.after > learned.before >= 1
    for lesson, text in zip(files[0].read(), texts, strict=False):
        assert (lesson.n_prompt, lesson.token_ids.tolist()) == (text[0], text[1:])
        assert lesson.best.tolist() == text[1 + text[0] :]
    maker = kind_of(kind, TargetParts.of(gguf), AskedShape())  # type: ignore[arg-type]
    student = maker.new_student(old.d2t, files, seed=0, device="cpu")
    student.begin(old)
    finished = (
        maker.finished(student.weights) if isinstance(maker, SplitKind) else maker._finished(student.weights, old.d2t)
    )
    for name, values in finished.items():
        assert_allclose(values, old.tensors[name].floats(), rtol=1e-5, atol=1e-7)
    import pickle

    for phase, done in (("answers", 100), ("training", 800)):
        data = pickle.dumps((model, texts, tmp_path / "torn", OPTIONS, phase, done))
        assert subprocess.run([sys.executable, "-c", _SCRIPT], input=data, check=False).returncode == -9
    again = learn_head(model, texts, tmp_path / "torn", OPTIONS)
    assert again.path.read_bytes() == learned.path.read_bytes()
    assert (again.before, again.after) == (learned.before, learned.after)
