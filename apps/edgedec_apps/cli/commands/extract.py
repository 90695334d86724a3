"""edgedec extract: quotations of a text that answer a question."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import PromptTooLongError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.cli.declared import argument, prompt_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags
from edgedec_apps.cli.output_files import require_writable, write_json_file
from edgedec_apps.cli.prompt import find_documents, say_found
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json, write_line

_INSTRUCTION_TOKENS = 64  # of the question's instruction and the template

if TYPE_CHECKING:
    from edgedec_apps.documents.search import Found
    from edgedec_apps.extraction import Extraction


def command(
    model: ModelName,
    question: Annotated[str, argument("QUESTION", "What to look for.")],
    *,
    file: Path | None = prompt_flag("--file -f FILE", "The text to quote from; - is standard input, the default."),
    count: int = prompt_flag("--count N", "How many quotations, 1 to 100.", 3, least=1, most=100),
    span_tokens: int = prompt_flag("--span-tokens N", "Most tokens of a quotation, 1 to 512.", 64, least=1, most=512),
    passages: int | None = prompt_flag(
        "--passages N",
        "Most passages that are read of a text longer than the context (default: a quarter of the context).",
        further=True,
        least=1,
    ),
    load: LoadFlags,
    output: OutputFlags,
) -> None:
    """Quote the stretches of a text that most probably answer a question, with their probabilities.

    Each line is a probability and a quotation, the most probable one first: cat FILE | edgedec extract MODEL "Who?".
    The search is exact: no other stretch of the text is as probable an answer of the model. Of a text that is longer
    than the context, the passages that match QUESTION best are read, and each line ends with the place of its passage.
    """
    from edgedec_apps.cli.opening import open_model
    from edgedec_apps.documents.asking import Asking
    from edgedec_apps.extraction import extract

    documents = find_documents([] if file is None else [file], load.memory, quiet=output.quiet)
    if not documents or not documents[0].whole.strip():
        raise RequestError("there is no text to quote from; name a file by --file, or pipe the text in")
    require_writable(output.json_out)
    load, unused = _without_drafts(load)
    if unused and not output.quiet:
        say(f"{', '.join(unused)}: no effect here, as quotations are searched for without drafts")

    def work(cancel: CancelToken) -> "tuple[Extraction, Found | None]":
        with (
            open_model(model, load, output, cancel, one_request=True) as engine,
            ProgressLine(quiet=output.quiet) as on_progress,
        ):

            def quote(passage: str | list[str]) -> "Extraction":
                return extract(
                    engine, question, passage, n=count, max_tokens=span_tokens, cancel=cancel, on_progress=on_progress
                )

            asking = Asking(engine, n_answer=span_tokens + _INSTRUCTION_TOKENS, n_passages=passages)
            try:
                return quote(documents[0].whole), None
            except PromptTooLongError:
                read = asking.search(documents, question, cancel, on_progress)
                if read is None:
                    raise
            if not output.quiet:
                say_found(documents, read, engine.n_ctx)
            return quote([each.text.strip() for each in read.passages]), read

    extraction, read = interruptible(work)
    document = _document(extraction, read, model)
    if output.as_json:
        write_json(document)
    else:
        for span, about in zip(extraction.spans, document["spans"], strict=True):
            place = f"  ({about['place']})" if "place" in about else ""
            write_line(f"{span.probability:.4f}  {one_line(span.text)}{place}")
    if output.json_out is not None:
        write_json_file(output.json_out, document)
    if not output.quiet:
        say(
            f"{extraction.n_prompt_tokens} prompt tokens · {extraction.n_rows} rows in {extraction.n_forwards} "
            f"forwards for {extraction.n_starts} places · {extraction.total_s:.1f} s"
        )


def _without_drafts(load: LoadFlags) -> tuple[LoadFlags, list[str]]:
    """Return the options without those of drafting, and the names of those that were given."""
    ignored = {
        "--draft": load.draft not in ("auto", "off"),
        "--draft-option": load.draft_option not in (None, ["head=off"]),
    }
    off = replace(load, draft="off", draft_option=None)
    return off, [name for name, is_given in ignored.items() if is_given]


def _document(extraction: "Extraction", read: "Found | None", model: str) -> dict[str, Any]:
    """Return the JSON object of what was found.

    In a text that was searched, the places of a quotation count in the passage of "search" that it stands in.
    """
    spans = [asdict(span) | {"probability": span.probability} for span in extraction.spans]
    document = {"model": model} | asdict(extraction) | {"spans": spans}
    if read is None:
        return document
    from edgedec_apps.extraction import BETWEEN

    for span in spans:
        begin, number = 0, 0
        while begin + len(read.passages[number].text.strip()) <= span["start"]:
            begin, number = begin + len(read.passages[number].text.strip()) + len(BETWEEN), number + 1
        span |= {"start": span["start"] - begin, "end": span["end"] - begin}
        span |= {"passage": number, "place": read.passages[number].place}
    return document | {"search": read.document()}
