"""Train a drafter for a target: collect answers, learn from them, measure, write the drafter.

    train_drafter(Path("model.gguf"), Path("head"), TrainOptions())
    train_drafter(Path("model.gguf"), Path("draft.gguf"), TrainOptions(kind="model"))
    learn_head(Path("model.gguf"), texts, Path("work"), TrainOptions())

Every part goes on where an earlier run stopped, whatever stopped that.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgedec.api.load import load
from edgedec.cost_curve import CostCurve
from edgedec.errors import OptionError, RequestError, StorageError, UnsupportedModelError, argument
from edgedec.gguf.file import read_gguf, storage_error
from edgedec.head_kinds import usable_head
from edgedec.load_options import LoadOptions
from edgedec.plugins import HEAD_KINDS, plugins
from edgedec.progress import CancelToken, OnProgress, check_cancelled, stage
from edgedec.sessions.cost_probe import cost_curve
from edgedec.storage.cache_files import cache_folder
from edgedec.storage.whole_file import remove_temporaries
from edgedec_export.head_to_gguf import DEFAULT_TYPES, write_head_gguf
from edgedec_export.training import recipe
from edgedec_export.training.kinds import AskedShape, HeadKind, Kind, SplitKind, kind_of, require_torch
from edgedec_export.training.lessons.collecting import PROMPTS_PER_FILE, TEMPERATURES, Collecting
from edgedec_export.training.lessons.collecting_processes import AnswerModel, collect_alone, collect_together
from edgedec_export.training.lessons.lesson_files import HELD_BACK_EVERY, LessonFile, first_files
from edgedec_export.training.lessons.openings import Opening
from edgedec_export.training.report import MOST_DRAFTED, DrafterReport, drafter_report
from edgedec_export.training.short_list import count_tokens, coverage, renewed, short_list
from edgedec_export.training.simulation import replay
from edgedec_export.training.target_parts import TargetParts
from edgedec_models.draft_heads import remember_head
from edgedec_runtimes.shared.file_lock import try_lock
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import target_of

LEAST_TEXTS = 2 * HELD_BACK_EVERY * PROMPTS_PER_FILE
"""Texts to different prompts that a head needs to go on learning."""
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TrainOptions(AskedShape):
    """How a drafter is trained, beside what is asked of its shape.

    Attributes:
        kind: What is trained: "head" (an EAGLE-3 head), "block" (a block drafter), "model" (a narrow draft model),
            "transfer" or "prompts" (rows that draft in the target's own layers), or "exit" (a block behind its first
            layers).
        work: The folder of answers and checkpoints; None for `NAME.training` beside the drafter. Drafters of one
            target may share it, one after the other.
        prompts: The user's own prompts.
        head: A trained head, which learns further; None trains a new drafter.
        texts: Learned in place of answers to prompts, in Collecting's form; `n_tokens` counts their answers' tokens.
        n_tokens: Tokens of the target's answers to learn from and to measure with.
        n_answer: Most tokens of an answer.
        n_vocabulary: Tokens that the head can draft, or the draft model learns to tell apart; None for as many as make
            up 90 % or 99.5 % of the answers.
        n_passes: How often the drafter learns from every answer.
        n_threads: Threads; None for as many as there are cores that this process may use.
        n_parallel: Answers that are written in one forward.
        n_processes: Processes that write answers, each with the model in memory, with a part of the threads.
        seed: Another seed gives another training.
        save_every_s: Seconds between two checkpoints.
        cache_dir: The cache's root; None for this installation's default.
        on_progress: Called with the tokens of each part.
        cancel: Ends the training; the next run goes on.
    """

    kind: Literal["head", "block", "model", "transfer", "prompts", "exit"] = "head"
    work: Path | None = None
    prompts: tuple[Opening, ...] = ()
    head: Path | None = None
    texts: tuple[Sequence[int], ...] = ()
    n_tokens: int = 500_000
    n_answer: int = 256
    n_vocabulary: int | None = None
    n_passes: float = 3.0
    n_threads: int | None = None
    n_parallel: int = 16
    n_processes: int = 1
    seed: int = 0
    save_every_s: float = 60.0
    cache_dir: Path | None = None
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None

    def check(self) -> None:
        """Raise OptionError for a number that is out of range."""
        limits: dict[str, tuple[float, float]] = {
            "n_tokens": (1, 10**12),
            "n_answer": (8, _MOST_TEXT),
            "n_vocabulary": (16, 1 << 24),
            "n_passes": (0.01, 1000),
            "n_threads": (1, 256),
            "n_parallel": (1, 256),
            "n_processes": (1, 256),
            "seed": (0, 2**32 - 1),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise OptionError(name, value, f"it must be from {least:g} to {most:g}")
        least_tokens = self.least_tokens
        if self.n_tokens < least_tokens and not self.texts:
            raise OptionError(
                "n_tokens",
                self.n_tokens,
                f"it must be from {least_tokens}, as answers may have {self.n_answer} tokens ({argument('n_answer')}) "
                f"and one file of answers in {HELD_BACK_EVERY} is held back to measure with",
            )

    @property
    def least_tokens(self) -> int:
        """The least `n_tokens` with which a file of answers is held back, however long the answers are."""
        return (HELD_BACK_EVERY - 1) * PROMPTS_PER_FILE * len(TEMPERATURES) * self.n_answer + 1


@dataclass(frozen=True, slots=True)
class Trained:
    """A drafter that was written.

    Attributes:
        path: The head's folder, or the draft model's file.
        n_vocabulary: The tokens that it can draft, or learned to tell apart.
        report: What it accepts, and what that brings on this machine.
        coverage: The share of the answers' tokens that these are.
        history: Each time it was measured: the tokens seen, and the tokens that a step adds.
    """

    path: Path
    n_vocabulary: int
    report: DrafterReport
    coverage: float
    history: list[tuple[int, float]]


def train_drafter(model: Path, out: Path, options: TrainOptions) -> Trained:
    """Train a drafter for a GGUF and write it to `out`; an earlier run's work is used.

    Raises:
        RuntimeUnavailableError: torch is not installed.
        UnsupportedModelError: The cpu runtime does not run the model.
        RequestError: An option is out of range, or the folder of work is of another training.
        StorageError: A file can't be written, or another process trains in the folder.
        CancelledError: The cancel token was cancelled.
    """
    options.check()
    require_torch()
    gguf = read_gguf(model)
    parts = TargetParts.of(gguf)
    kind = kind_of(options.kind, parts, options)
    work = options.work or out.with_name(f"{out.name}.training")
    n_ctx = min(max(1024, 2 * options.n_answer), parts.network.n_ctx_train)
    texts = [opening.text for opening in options.prompts] + list(map(str, options.texts))
    sizes = {"n_answer": options.n_answer, "n_ctx": n_ctx, "seed": options.seed}
    made = recipe.Recipe.of(target_of(gguf), parts.taps, texts, **sizes)
    recipe.keep(work, made)
    try:
        lock = try_lock(work / recipe.FILE)
        if lock is None:
            raise StorageError(
                f"another process trains in {work}; wait for it, or choose another folder ({argument('work')})"
            )
        with lock:
            for folder in (work, work / "lessons", out):
                remove_temporaries(folder)
            files = _collected(model, parts, work / "lessons", n_ctx, options)
            return _taught(kind, out, work, made.key, files, options)
    except OSError as error:
        raise storage_error(Path(error.filename) if error.filename else work, error) from error


def _collected(model: Path, parts: TargetParts, folder: Path, n_ctx: int, options: TrainOptions) -> list[LessonFile]:
    """Return the files of lessons to use, after collecting what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if files := first_files(folder, options.n_tokens):
        return files
    job = Collecting(
        folder,
        parts.layers_kept,
        options.n_tokens,
        options.n_answer,
        seed=options.seed,
        n_ctx=n_ctx,
        n_at_once=options.n_parallel,
        prompts=options.prompts,
        texts=options.texts,
    )
    target = AnswerModel(model, n_ctx, options.n_threads, options.cache_dir)
    if options.n_processes == 1:
        collect_alone(target, job, options.on_progress, options.cancel)
    else:
        collect_together(target, job, options.n_processes, options.on_progress, options.cancel)
    return first_files(folder, options.n_tokens)


def _curve(model: Path, options: TrainOptions) -> CostCurve:
    """Return the cost curve of the target on this machine, with as many threads as a user has by default."""
    cache_dir = cache_folder(options.cache_dir)
    with (
        load(model, runtime="cpu", draft="off", cache_dir=cache_dir, offline=True) as engine,
        closing(engine.session()) as session,
    ):
        return cost_curve(session, LoadOptions(cache_dir=cache_dir, on_progress=options.on_progress))


def _taught(kind: Kind, out: Path, work: Path, key: str, files: list[LessonFile], options: TrainOptions) -> Trained:
    """Train on lessons, and write the drafter with its report."""
    from edgedec_export.training.teaching import Teaching, set_threads, teach

    set_threads(options.n_threads)
    first = None if options.head is None else load_head(options.head)
    files = files if first is None else [file for file in files if not file.is_judge]
    job = Teaching(
        work / kind.checkpoint,
        key + kind.key,
        options.n_passes,
        seed=options.seed,
        save_every_s=options.save_every_s,
        first=first,
    )
    counts = _counts(files, kind.parts.network.n_vocab, options)
    chosen = partial(short_list, counts, options.n_vocabulary, kind.coverage)
    if first is not None:
        chosen = partial(renewed, first.d2t, counts)
    taught = teach(kind, files, chosen, job, options.on_progress, options.cancel)
    n = len(taught.token_ids)
    curve = _curve(kind.parts.gguf.paths[0], options)
    report = drafter_report(taught.drafted, curve, kind.price(n, taught.drafted, curve), kind.called)
    covered = coverage(counts, taught.token_ids)
    about = {
        "recipe": {
            "answer_tokens": sum(file.n_tokens for file in files),
            "passes": options.n_passes,
            "seed": options.seed,
            "vocabulary": n,
            "coverage": round(covered, 4),
        },
        "history": taught.history,
        "report": report.as_json(),
    }
    kind.write(out, taught.weights, taught.token_ids, report.promise, about)
    if options.kind != "model" and first is None:
        remember_head(out, cache_folder(options.cache_dir))
    return Trained(out, n, report, covered, taught.history)


def _counts(files: list[LessonFile], n_vocab: int, options: TrainOptions) -> NDArray[np.int64]:
    """Return how often the target writes each token in the lessons to learn from."""
    counts = np.zeros(n_vocab, np.int64)
    with stage(options.on_progress, "counting tokens"):
        for file in files:
            check_cancelled(options.cancel, "counting tokens")
            if not file.is_held_back:
                counts += count_tokens(file.answers(), n_vocab)
    return counts


class LearnedHead(NamedTuple):
    """A head that went on learning: its file, and tokens of a step with the old head and with it, on `n_judged`."""

    path: Path
    before: float
    after: float
    n_judged: int


def learn_head(model: Path, texts: Sequence[Sequence[int]], work: Path, options: TrainOptions) -> LearnedHead:
    """Let the head that a model is used with learn, or go on with that; nothing outside the folder `work` is written.

    Args:
        model: The model.
        texts: As of Collecting, of which each prompt's last counts; the same ones as long as `work` exists.
        work: The folder of lessons, checkpoints and the new head.
        options: How it learns; what is learned, and where, is of the other arguments.

    Raises:
        EdgedecError: As train_drafter; or the model has no head, one that can't learn, or too few texts.
    """
    require_torch()
    gguf, head = read_gguf(model), usable_head(model, tuple(plugins(HEAD_KINDS)), cache_folder(options.cache_dir))[0]
    chosen = tuple({tuple(text[1 : 1 + text[0]]): text for text in texts}.values())
    if head is None:
        raise RequestError(f"{model.stem} has no draft head that fits; train one with edgedec train-drafter")
    if len(chosen) < LEAST_TEXTS:
        raise RequestError(
            f"answers to {len(chosen)} prompts are kept (edgedec serve --keep-answers), and {LEAST_TEXTS} are needed"
        )
    old = load_head(head)
    name: Literal["head", "exit"] = "exit" if old.card.exits else "head"
    kind = kind_of(name, TargetParts.of(gguf), options)
    assert isinstance(kind, HeadKind | SplitKind), "by the name"
    made, has_output = kind.card(len(old.d2t)), old.card.own_output
    said = replace(old.card, name=made.name, target=made.target, promise=None, notes=(), own_output=False)
    if said != made:
        raise UnsupportedModelError(f"{head}: only heads and exits that edgedec train-drafter made can go on learning")
    n_tokens, path = sum(len(text) - 1 - text[0] for text in chosen), work / f"{model.stem}-head.gguf"
    asked = replace(options, kind=name, work=work, head=head, texts=chosen, n_tokens=n_tokens)
    out = train_drafter(model, path if name == "exit" else path.with_suffix(""), asked).path
    if out != path:
        types = f"{DEFAULT_TYPES},output=Q4_0"
        write_head_gguf(load_head(out), gguf, path, types=types, own_output=has_output, force=True)
    files = first_files(work / "lessons", n_tokens)
    before, after = (_judged(kind, each, files) for each in (old, load_head(path)))
    return LearnedHead(path, before, after, sum(file.n_tokens for file in files if file.is_judge))


def _judged(kind: Kind, head: Head, files: list[LessonFile]) -> float:
    """Return the tokens that a step adds with a head, on the lessons that no head learns from or is chosen by."""
    from edgedec_export.training.teaching import default_device

    student = kind.new_student(head.d2t, files, seed=0, device=default_device())
    student.begin(head)
    drafted = student.drafted(student.weights, [lesson for file in files if file.is_judge for lesson in file.read()])
    return replay(drafted, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
