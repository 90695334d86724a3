"""Let a model's draft head go on learning from answers that are there, and measure the old and the new one alike.

It is a training as train_drafter's, which begins with the head's tensors. A head that is taken is a GGUF beside the
model, where heads are looked for first; what was there before all learning is kept as `NAME.head.gguf.before`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.gguf.file import read_gguf, storage_error
from edgedec.head_kinds import usable_head
from edgedec.plugins import HEAD_KINDS, plugins
from edgedec.storage.cache_files import cache_folder
from edgedec.storage.whole_file import write_atomically
from edgedec_export.head_to_gguf import DEFAULT_TYPES, write_head_gguf
from edgedec_export.training.kinds import HeadKind, SplitKind, kind_of, require_torch
from edgedec_export.training.lessons.collecting import PROMPTS_PER_FILE
from edgedec_export.training.lessons.lesson_files import HELD_BACK_EVERY, LessonFile, first_files
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import replay
from edgedec_export.training.target_parts import TargetParts
from edgedec_export.training.train_drafter import TrainOptions, train_drafter
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.kind import places
from edgedec_runtimes.trained_heads.load import load_head

LEAST_TEXTS = 2 * HELD_BACK_EVERY * PROMPTS_PER_FILE


@dataclass(frozen=True, slots=True)
class LearnedHead:
    """A head that went on learning: its file, and tokens that a step adds on `n_judged` ones that no head learned from.

    Attributes:
        path: Its file.
        before: Tokens of a step with the old head.
        after: Tokens of a step with the new one.
        n_judged: Tokens of the answers that both were measured on.
    """

    path: Path
    before: float
    after: float
    n_judged: int

    @property
    def taken(self) -> bool:
        """Whether it is at least as good as the old head."""
        return self.after >= self.before


def learn_head(model: Path, texts: Sequence[Sequence[int]], work: Path, options: TrainOptions) -> LearnedHead:
    """Let the head that a model is used with learn, or go on with that; nothing outside the folder `work` is written.

    Args:
        model: The model.
        texts: As of Collecting; the same ones as long as `work` exists.
        work: The folder of lessons, checkpoints and the new head.
        options: How it learns; what is learned, and where, is of the other arguments.

    Raises:
        RequestError: The model has no head, or there are too few texts.
        UnsupportedModelError: The head is none that can go on learning.
        EdgedecError: As train_drafter.
    """
    require_torch()
    gguf, head = read_gguf(model), usable_head(model, tuple(plugins(HEAD_KINDS)), cache_folder(options.cache_dir))[0]
    if head is None:
        raise RequestError(f"{model.stem} has no draft head that fits; train one with edgedec train-drafter")
    if len(texts) < LEAST_TEXTS:
        raise RequestError(f"{len(texts)} answers are kept (edgedec serve --keep-answers); {LEAST_TEXTS} are needed")
    old = load_head(head)
    card = old.card
    name: Literal["exit", "head"] = "exit" if card.exits else "head"
    kind = kind_of(name, TargetParts.of(gguf), options)
    assert isinstance(kind, HeadKind | SplitKind)
    made = replace(kind.card(card.n_vocab_draft), name=card.name, target=card.target, promise=card.promise)
    if replace(made, own_output=card.own_output, notes=card.notes) != card:
        raise UnsupportedModelError(f"{head}: only heads and exits that edgedec train-drafter made can go on learning")
    n_tokens, path = sum(len(text) - 1 - text[0] for text in texts), work / f"{model.stem}-head.gguf"
    asked = replace(options, kind=name, work=work, head=head, texts=tuple(texts), n_tokens=n_tokens)
    out = train_drafter(model, path if card.exits else path.with_suffix(""), asked).path
    if out != path:
        types = f"{DEFAULT_TYPES},output=Q4_0"
        write_head_gguf(load_head(out), gguf, path, types=types, own_output=card.own_output, force=True)
    files = first_files(work / "lessons", n_tokens)
    before, after = (_judged(kind, each, files) for each in (old, load_head(path)))
    return LearnedHead(path, before, after, sum(file.n_tokens for file in files if file.is_judge))


def _judged(kind: HeadKind | SplitKind, head: Head, files: Sequence[LessonFile]) -> float:
    """Return the tokens that a step adds with a head, on the lessons that no head learns from or is chosen by."""
    from edgedec_export.training.teaching import default_device

    student = kind.new_student(head.d2t, files, seed=0, device=default_device())
    student.begin(head)
    drafted = student.drafted(student.weights, [lesson for file in files if file.is_judge for lesson in file.read()])
    return replay(drafted, lambda n: 1.0, MOST_DRAFTED).tokens_per_step


def take(head: Path, model: Path) -> None:
    """Put a head's file where a model's head is looked for first, and keep what was there before all learning.

    Raises:
        StorageError: A file can't be written; the old head is in its place then.
    """
    place, before = _places(model)
    try:
        if not before.exists():  # an empty one says that no file was there
            write_atomically(before, place.read_bytes() if place.exists() else b"", sync=True)
        write_atomically(place, head.read_bytes(), sync=True)
    except OSError as error:
        raise storage_error(place, error) from error


def go_back(model: Path) -> None:
    """Undo every take() of a model's heads.

    Raises:
        RequestError: None was taken.
        StorageError: A file can't be renamed or deleted.
    """
    place, before = _places(model)
    try:
        if before.stat().st_size:
            os.replace(before, place)
        else:
            place.unlink(missing_ok=True)
            before.unlink()
    except FileNotFoundError as error:
        raise RequestError(f"no head of {model.stem} has learned: there is no {before}") from error
    except OSError as error:
        raise storage_error(place, error) from error


def _places(model: Path) -> tuple[Path, Path]:
    place = places(model)[0]
    return place, place.with_name(f"{place.name}.before")
