"""edgedec embed: texts in, a vector for each out."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from edgedec.errors import RequestError
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, ModelName, OutputFlags, Quiet, UndraftedFlags
from edgedec_apps.cli.prompt import argument_text, piped_lines
from edgedec_apps.cli.shown.terminal import write_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_VECTORS = "Vectors"


@dataclass(frozen=True, kw_only=True)
class EmbedJob:
    """The arguments and options of `edgedec embed`."""

    model: ModelName
    texts: Annotated[
        list[str] | None,
        argument("TEXT...", "The texts. Without any, each line of standard input that is not blank is one."),
    ] = None
    pooling: str | None = flag(
        "--pooling NAME",
        "How tokens become one vector: mean, cls or last (default: as the model was trained).",
        complete=completion.one_of("mean", "cls", "last"),
        panel=_VECTORS,
    )
    dimensions: int | None = flag(
        "--dimensions N", "Keep only the first N numbers of each vector.", panel=_VECTORS, least=1
    )
    truncate: bool = flag("--truncate", "Cut texts that are longer than the context.", False, panel=_VECTORS)
    load: UndraftedFlags
    as_json: AsJson = False
    quiet: Quiet = False


def command(job: EmbedJob) -> None:
    """Make a vector of length 1 of each text; standard output gets a JSON array of numbers a line.

    MODEL is an embedding model. A model that writes texts embeds only with --pooling: its hidden states say something
    of a text, but less than an embedding model's.
    """
    if job.texts:
        texts = [argument_text(text, "a text") or "" for text in job.texts]
    else:
        texts = list(piped_lines(None if job.load.memory is None else parse_size(job.load.memory, "memory")))
    if not all(texts) or not texts:
        raise RequestError("there is no text, or an empty one; give texts as arguments or as lines of standard input")
    vectors, n_tokens = interruptible(lambda cancel: _embed(job, texts, cancel))
    if job.as_json:
        write_json({"model": job.model, "vectors": vectors.tolist(), "n_tokens": n_tokens})
        return
    for vector in vectors:
        typer.echo(json.dumps([float(f"{number:.7g}") for number in vector.tolist()]))


def _embed(job: EmbedJob, texts: list[str], cancel: CancelToken) -> "tuple[NDArray[np.float32], int]":
    """Load the model and return the vectors of the texts, and the number of their tokens."""
    from edgedec.callers import checked_value
    from edgedec.gguf.model_kinds import Pooling
    from edgedec_apps.cli.opening import open_model
    from edgedec_apps.embedding import embed

    pooling = None if job.pooling is None else checked_value("pooling", Pooling, job.pooling)
    with open_model(job.model, job.load.flags, OutputFlags(quiet=job.quiet), cancel, one_request=True) as engine:
        all_ids = [
            engine.requests.cut_ids(text) if job.truncate else engine.prompt_ids(text, as_said=True, continued=False)
            for text in texts
        ]
        vectors = embed(engine, all_ids, pooling=pooling, dimensions=job.dimensions, cancel=cancel)
        return vectors, sum(map(len, all_ids))
