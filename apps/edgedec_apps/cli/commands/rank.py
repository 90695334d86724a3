"""edgedec rank: documents in the order in which they match a query."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import RequestError
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken
from edgedec_apps.cli.declared import argument, flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, ModelName, OutputFlags, Quiet, UndraftedFlags
from edgedec_apps.cli.prompt import argument_text, piped_lines
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json, write_line
from edgedec_apps.texts import read_text

if TYPE_CHECKING:
    from edgedec_apps.ranking import Ranking

_DOCUMENTS = "Documents"
_SHOWN = 200  # characters of a document at a terminal


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it comes from."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The arguments and options of `edgedec rank`."""

    model: ModelName
    query: Annotated[str, argument("QUERY", "The question, or the words to look for.")]
    files: Annotated[
        list[Path] | None,
        argument("FILE...", "The documents, a file each. Without any, or for -, each line of standard input is one."),
    ] = None
    lines: bool = flag("--lines", "Each line of a file is a document, not the file.", False, panel=_DOCUMENTS)
    document_tokens: int | None = flag(
        "--document-tokens N", "Cut documents to their first N tokens.", panel=_DOCUMENTS
    )
    truncate: bool = flag("--truncate", "Cut documents that are longer than the context.", False, panel=_DOCUMENTS)
    top: int | None = flag("--top N", "Show only the best N.", panel=_DOCUMENTS)
    normalize: bool = flag("--normalize", "Scores from 0 to 1, whatever the model gives.", False, panel=_DOCUMENTS)
    load: UndraftedFlags
    as_json: AsJson = False
    quiet: Quiet = False


def command(job: RankJob) -> None:
    """Rank documents by how well they match a query, the best first: a score and a document a line.

    MODEL is a reranker. Any model that chats ranks, too, by the probability that it answers yes; it ranks less well. A
    line of a file that ends in .jsonl is a document, and so is one of standard input; an object with "text" stands for
    that text.
    """
    if job.top is not None and job.top < 1:
        raise RequestError(f"--top is {job.top}; it must be 1 or more")
    query = argument_text(job.query, "the query") or ""
    documents = _documents(job, None if job.load.memory is None else parse_size(job.load.memory, "memory"))
    if not documents:
        raise RequestError("there are no documents; name files, or pipe one document a line in")
    ranking = interruptible(lambda cancel: _rank(job, query, [each.text for each in documents], cancel))
    _write(job, documents, ranking)


def _documents(job: RankJob, cap_bytes: int | None) -> list[Document]:
    """Return the documents that the arguments name."""
    documents: list[Document] = []
    for file in job.files or [Path("-")]:
        if str(file) == "-":
            if sys.stdin.isatty() and not job.quiet:
                say("reading documents from standard input, one a line")
            texts = [_text_of(line) for line in piped_lines(cap_bytes)]
        else:
            content = read_text(file)
            if not (job.lines or file.suffix == ".jsonl"):
                documents.append(Document(str(file), content))
                continue
            texts = [_text_of(line) for line in content.splitlines() if line.strip()]
        name = "" if str(file) == "-" else f"{file}:"
        documents += [Document(f"{name}{number}", text) for number, text in enumerate(texts, start=1)]
    return documents


def _text_of(line: str) -> str:
    """Return the text that a line stands for: that of a JSON object with "text", a JSON string's, else the line.

    >>> _text_of('{"text": "a", "id": 3}'), _text_of('"a"'), _text_of("{a}")
    ('a', 'a', '{a}')
    """
    if line.lstrip()[:1] in ("{", '"'):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return line
        text = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, str):
            return text
    return line


def _rank(job: RankJob, query: str, documents: list[str], cancel: CancelToken) -> "Ranking":
    """Load the model and return the scores."""
    from edgedec_apps.cli.opening import open_model
    from edgedec_apps.ranking import rank

    with (
        open_model(job.model, job.load.flags, OutputFlags(quiet=job.quiet), cancel, one_request=True) as engine,
        ProgressLine(quiet=job.quiet) as on_progress,
    ):
        cut = engine.n_ctx if job.truncate and job.document_tokens is None else job.document_tokens
        return rank(engine, query, documents, max_document_tokens=cut, cancel=cancel, on_progress=on_progress)


def _write(job: RankJob, documents: list[Document], ranking: "Ranking") -> None:
    """Write the documents, the best first."""
    best, kind = ranking.best(job.top, normalize=job.normalize)
    if job.as_json:
        results: list[dict[str, Any]] = [
            {"index": i, "score": score, "source": documents[i].source, "text": documents[i].text} for i, score in best
        ]
        counts = {"n_tokens": sum(ranking.n_tokens), "total_s": ranking.total_s, "notes": list(ranking.notes)}
        write_json({"model": job.model, "query": job.query, "score_kind": kind, "results": results} | counts)
        return
    width = max((len(documents[i].source) for i, _ in best), default=0)
    most = _SHOWN if sys.stdout.isatty() else None
    for i, score in best:
        write_line(f"{score:9.4f}  {one_line(documents[i].source):{width}}  {one_line(documents[i].text)[:most]}")
    if not job.quiet:
        for note in ranking.notes:
            say(f"note: {note}")
        n_tokens = sum(ranking.n_tokens)
        said = "probability of yes" if kind == "probability" else kind
        say(f"{len(documents)} documents, scored by {said} · {n_tokens} tokens · {ranking.total_s:.1f} s")
