"""edgedec train-drafter: a draft head or a narrow draft model for a model, trained on the model's own answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from edgedec.progress import CancelToken
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, JsonOut, ModelName, Offline, Quiet, Threads, option
from edgedec_apps.cli.output_files import report, require_writable
from edgedec_apps.cli.sampling_options import sampling_option
from edgedec_apps.cli.shown.progress import ProgressLine

if TYPE_CHECKING:
    from edgedec_export.training.train_drafter import Trained

_TRAINING = "Training"


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """The arguments and options of `edgedec train-drafter`."""

    model: ModelName
    kind: Annotated[
        Literal["head", "block", "model"],
        option(
            "--kind",
            help="A head (cpu and onnx), one that drafts blocks, or a small model as a GGUF (every runtime).",
            panel=_TRAINING,
        ),
    ] = "head"
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            help="The head's folder, or the model's GGUF (default: here, NAME-head or NAME-draft.gguf).",
            metavar="PATH",
            panel=_TRAINING,
        ),
    ] = None
    layers: Annotated[
        int | None,
        option(
            "--layers",
            help="Layers of a small model (default: 4), or of a block head (default: 2).",
            metavar="N",
            panel=_TRAINING,
        ),
    ] = None
    block: Annotated[
        int | None,
        option("--block", help="Tokens that a block drafts (default: 6 or 8, by MODEL).", metavar="N", panel=_TRAINING),
    ] = None
    rank: Annotated[
        int | None,
        option(
            "--rank",
            help="Rank by which a block's tokens heed the one before (default: 64 or 128, by MODEL).",
            metavar="N",
            panel=_TRAINING,
        ),
    ] = None
    width: Annotated[
        int | None,
        option(
            "--width",
            help="Width of a small model's hidden states (default: a third of MODEL's).",
            metavar="N",
            panel=_TRAINING,
        ),
    ] = None
    work: Annotated[
        Path | None,
        option(
            "--work",
            help="Folder of answers and checkpoints, which a later run goes on with (default: OUT.training).",
            metavar="PATH",
            panel=_TRAINING,
        ),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        option(
            "--prompts",
            help="Also train on these prompts: one a line, or JSON lines with turns; may be repeated.",
            metavar="FILE",
            panel=_TRAINING,
        ),
    ] = None
    tokens: Annotated[
        int, option("--tokens", help="Train on N tokens of the model's answers.", metavar="N", panel=_TRAINING)
    ] = 500_000
    answer_tokens: Annotated[
        int, option("--answer-tokens", help="Most tokens of an answer.", metavar="N", panel=_TRAINING)
    ] = 256
    vocabulary: Annotated[
        int | None,
        option(
            "--vocabulary",
            help="Tokens that a head can draft, or a small model tells apart (default: those of most answers).",
            metavar="N",
            panel=_TRAINING,
        ),
    ] = None
    passes: Annotated[
        float, option("--passes", help="Learn from every answer X times at most.", metavar="X", panel=_TRAINING)
    ] = 3.0
    processes: Annotated[
        int,
        option(
            "--processes",
            help="Write answers in N processes, each with MODEL in memory: faster with many cores.",
            metavar="N",
            panel=_TRAINING,
        ),
    ] = 1
    seed: Annotated[int, sampling_option("--seed", help="Same seed, same drafter.", metavar="N")] = 0
    threads: Threads = None
    offline: Offline = False
    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False


def command(job: TrainJob) -> None:
    """Train a drafter for a model on the model's own answers; the same command resumes.

    A head is a small network that guesses the model's next tokens from its hidden states, on cpu and onnx. With --kind
    block it guesses several tokens at once instead of one after the other. With --kind model it is a small model of its
    own, which drafts on every runtime (--draft-option model). MODEL writes prompts and answers itself, and the drafter
    learns to foresee the answers. Two cores need hours, a GPU minutes. Ctrl-C, or a crash, loses a minute at most: the
    same command goes on where it stopped. Training ends when the drafter no longer gets better on prompts that it does
    not learn from. MODEL is a GGUF that the cpu runtime runs.
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
    from edgedec_export.training.lessons.prompt_files import read_prompts
    from edgedec_export.training.torch_library import require_torch
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
    ending = "draft.gguf" if job.kind == "model" else "head"
    return train_drafter(path, job.out or Path(f"{_default_name(job.model)}-{ending}"), options)


def _default_name(model: str) -> str:
    """Return the beginning of a file name for a model's drafter.

    >>> _default_name("smollm2-135m"), _default_name("folder/some.Q4_K_M.gguf"), _default_name("hf:owner/repo:Q8_0")
    ('smollm2-135m', 'some.Q4_K_M', 'repo-Q8_0')
    """
    name = model.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return name.replace(":", "-")


def _document(job: TrainJob, trained: "Trained") -> dict[str, Any]:
    found = trained.report
    return {
        "kind": job.kind,
        "out": str(trained.path),
        "vocabulary": trained.n_vocabulary,
        "coverage": trained.coverage,
        "history": trained.history,
        "sentence": found.sentence(),
    } | found.as_json()


def _lines(document: dict[str, Any]) -> list[str]:
    """Return the report: a line for each kind of prompt, and what to expect."""
    from edgedec_apps.bench.table import columns

    rows = [["prompts", "tokens", "tokens a step", "reach 1, 2, 3", "expected speed"]]
    for kind, found in document["kinds"].items():
        chances = ", ".join(f"{chance:.2f}" for chance in found["reach"][:3])
        gained, speed = f"{found['tokens_per_step']:.2f}", f"{found['expected_speed']:.2f}"
        rows.append([kind, str(found["tokens"]), gained, chances, speed])
    tokens = f"{document['vocabulary']} tokens, {document['coverage']:.1%} of what the model writes"
    is_model = document["kind"] == "model"
    use = (
        f"--draft model --draft-option model={document['out']}"
        if is_model
        else f"--draft-option head={document['out']}"
    )
    return [*columns(rows), "", f"{document['out']}: learned {tokens}", document["sentence"], f"use it with {use}"]
