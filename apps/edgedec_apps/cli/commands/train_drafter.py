"""edgedec train-drafter: a draft head or a narrow draft model for a model, trained on the model's own answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgedec.progress import CancelToken
from edgedec_apps.cli.declared import sampling_flag, training_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, Threads
from edgedec_apps.cli.output_files import default_name, report, require_writable
from edgedec_apps.cli.shown.progress import ProgressLine

if TYPE_CHECKING:
    from edgedec_export.training.train_drafter import Trained


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """The arguments and options of `edgedec train-drafter`."""

    model: ModelName
    kind: Literal["head", "block", "model", "transfer", "prompts", "exit"] = training_flag(
        "--kind",
        "A head (cpu and onnx), one that drafts blocks, a small model as a GGUF (every runtime); or, on cpu, rows in "
        "MODEL's own layers (transfer, prompts), or a block behind its first layers (exit).",
        "head",
    )
    out: Path | None = training_flag(
        "--out -o PATH",
        "The head's folder, or a GGUF (default: here, NAME-head, NAME-draft.gguf, NAME-rows.gguf, NAME-exit.gguf).",
    )
    layers: int | None = training_flag(
        "--layers N", "Layers of a small model (default: 4), or of a block head (default: 2)."
    )
    block: int | None = training_flag("--block N", "Tokens that a block drafts (default: 6 or 8, by MODEL).")
    rank: int | None = training_flag(
        "--rank N",
        "Rank by which a block's tokens heed the one before (default: 64 or 128, by MODEL).",
    )
    width: int | None = training_flag(
        "--width N", "Width of a small model's hidden states (default: a third of MODEL's)."
    )
    work: Path | None = training_flag(
        "--work PATH",
        "Folder of answers and checkpoints, which a later run goes on with (default: OUT.training).",
    )
    prompts: list[Path] | None = training_flag(
        "--prompts FILE",
        "Also train on these prompts: one a line, or JSON lines with turns; may be repeated.",
    )
    tokens: int = training_flag("--tokens N", "Train on N tokens of the model's answers.", 500_000)
    answer_tokens: int = training_flag("--answer-tokens N", "Most tokens of an answer.", 256)
    vocabulary: int | None = training_flag(
        "--vocabulary N",
        "Tokens that a head can draft, or a small model tells apart (default: those of most answers).",
    )
    passes: float = training_flag("--passes X", "Learn from every answer X times at most.", 3.0)
    processes: int = training_flag(
        "--processes N",
        "Write answers in N processes, each with MODEL in memory: faster with many cores.",
        1,
    )
    seed: int = sampling_flag("--seed N", "Same seed, same drafter.", 0)
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False


def command(job: TrainJob) -> None:
    """Train a drafter for a model on the model's own answers; the same command resumes.

    A head is a small network that guesses the model's next tokens from its hidden states, on cpu and onnx. With --kind
    block it guesses several tokens at once instead of one after the other. With --kind model it is a small model of its
    own, which drafts on every runtime (--draft-option model). With --kind transfer or prompts, rows behind the newest
    token's go through MODEL's own layers and draft from there; there is next to nothing else to read. With --kind exit,
    drafts leave MODEL behind its first layers, and are verified from there on. MODEL writes prompts and answers itself,
    and the drafter learns to foresee the answers. Two cores need hours, a GPU minutes. Ctrl-C, or a crash, loses a
    minute at most: the same command goes on where it stopped. Training ends when the drafter no longer gets better on
    prompts that it does not learn from. MODEL is a GGUF that the cpu runtime runs.
    """

    def work(cancel: CancelToken) -> dict[str, Any]:
        with ProgressLine(f"training a drafter for {job.model}", quiet=job.quiet) as on_progress:
            return _document(job, _train(job, on_progress, cancel))

    require_writable(job.json_out)
    report(interruptible(work), _lines, as_json=job.as_json, json_out=job.json_out)


def _train(job: TrainJob, on_progress: Any, cancel: CancelToken) -> "Trained":
    """Find the model and train."""
    from edgedec.load_options import ResolveOptions
    from edgedec.loading.resolve import resolve
    from edgedec.storage.cache_files import cache_folder
    from edgedec_export.training.kinds import require_torch
    from edgedec_export.training.lessons.prompt_files import read_prompts
    from edgedec_export.training.train_drafter import TrainOptions, train_drafter

    require_torch()  # before a model is downloaded
    path = resolve(job.model, ResolveOptions(cache_folder(), job.offline, on_progress, cancel))
    options = TrainOptions(
        kind=job.kind,
        n_layers=job.layers,
        width=job.width,
        block=job.block,
        rank=job.rank,
        work=job.work,
        prompts=read_prompts(job.prompts or []),
        n_tokens=job.tokens,
        n_answer=job.answer_tokens,
        n_vocabulary=job.vocabulary,
        n_passes=job.passes,
        n_threads=job.threads,
        n_processes=job.processes,
        seed=job.seed,
        on_progress=on_progress,
        cancel=cancel,
    )
    endings = {"model": "draft.gguf", "transfer": "rows.gguf", "prompts": "rows.gguf", "exit": "exit.gguf"}
    ending = endings.get(job.kind, "head")
    return train_drafter(path, job.out or Path(f"{default_name(job.model, path)}-{ending}"), options)


def _document(job: TrainJob, trained: "Trained") -> dict[str, Any]:
    report = trained.report
    return {
        "kind": job.kind,
        "out": str(trained.path),
        "vocabulary": trained.n_vocabulary,
        "coverage": trained.coverage,
        "history": trained.history,
        "sentence": report.sentence(),
    } | report.as_json()


def _lines(document: dict[str, Any]) -> list[str]:
    """Return the report: a line for each kind of prompt, and what to expect."""
    from edgedec_apps.bench.table import columns

    rows = [["prompts", "tokens", "tokens a step", "reach 1, 2, 3", "expected speed"]]
    for kind, figures in document["kinds"].items():
        chances = ", ".join(f"{chance:.2f}" for chance in figures["reach"][:3])
        gained, speed = f"{figures['tokens_per_step']:.2f}", f"{figures['expected_speed']:.2f}"
        rows.append([kind, str(figures["tokens"]), gained, chances, speed])
    tokens = f"{document['vocabulary']} tokens, {document['coverage']:.1%} of what the model writes"
    use = "--draft model --draft-option model" if document["kind"] == "model" else "--draft-option head"
    return [
        *columns(rows),
        "",
        f"{document['out']}: learned {tokens}",
        document["sentence"],
        f"use it with {use}={document['out']}",
    ]
