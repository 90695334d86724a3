"""edgedec run: a prompt in, text out."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgedec.errors import CancelledError, RequestError, RuntimeLostError, ScorerError
from edgedec.progress import CancelToken
from edgedec_apps.cli.commands.chat import ChatJob, converse
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import (
    KeepHistory,
    LoadFlags,
    ModelName,
    OutputFlags,
    System,
    SystemFile,
    ToolFlags,
    prompt_option,
)
from edgedec_apps.cli.output_files import require_writable, write_json_file
from edgedec_apps.cli.pictures import picture_parts, pictures_document, pictures_lines, with_pictures
from edgedec_apps.cli.preset_options import with_preset
from edgedec_apps.cli.prompt import find_prompt, system_text
from edgedec_apps.cli.reports.memory_report import Held, held_by, held_document, held_line
from edgedec_apps.cli.sampling_options import ChoiceFlags, SamplingFlags
from edgedec_apps.cli.shown.explain import sampling_line
from edgedec_apps.cli.shown.log import telling_of_losses
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.replies import PlainText, cut_text, print_stream, print_texts, say_summary
from edgedec_apps.cli.shown.terminal import say, write_json
from edgedec_apps.cli.shown.thoughts import OwnMarks, own_marks, with_thoughts

if TYPE_CHECKING:
    from edgedec.api.best_text import BestOf
    from edgedec.api.engine import Engine
    from edgedec.chat import Message
    from edgedec.choosing.choice import ChosenText
    from edgedec.choosing.search_by import SearchBy
    from edgedec.sequence import Generation

    Written = tuple[Generation, ...] | ChosenText


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The arguments and options of `edgedec run`."""

    model: ModelName
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt, after the content of --file or of standard input. Without any of them, a chat.",
        ),
    ] = None
    file: Annotated[
        Path | None,
        prompt_option(
            "--file",
            "-f",
            help="A file (- is standard input) with the prompt, or with what it is about.",
            metavar="FILE",
        ),
    ] = None
    image: Annotated[
        list[Path] | None,
        prompt_option("--image", "-i", help="A picture that the prompt is about. Repeatable.", metavar="FILE"),
    ] = None
    raw: Annotated[bool, prompt_option("--raw", help="Continue the text, without the chat template.")] = False
    system: System = None
    system_file: SystemFile = None
    history: KeepHistory = True
    choice: ChoiceFlags
    load: LoadFlags
    sampling: SamplingFlags
    output: OutputFlags


def command(job: RunJob) -> None:
    """Run a model on a prompt: text goes to standard output, all else to standard error.

    A PROMPT with --file, or with a pipe, is about that content: cat FILE | edgedec run MODEL "Explain this". At a
    terminal, without a prompt, it becomes a chat.
    """
    text = find_prompt(job.prompt, job.file, job.load.memory, quiet=job.output.quiet)
    given = system_text(job.system, job.system_file)
    sampling, system = with_preset(job.model, job.sampling, given)
    job = replace(job, sampling=sampling, system=None if job.raw and given is None else system)
    if text is not None:
        _run_prompt(job, text)
    elif job.image:
        raise RequestError("--image needs a prompt; give one, or pipe it in (in a chat, /image attaches pictures)")
    elif job.choice != ChoiceFlags():
        raise RequestError("--texts, --choose and --search need a prompt; give one, or pipe it in")
    elif job.raw:
        raise RequestError("--raw needs a prompt to continue; give one, or pipe it in")
    else:
        converse(ChatJob(job.model, job.system, job.load, job.sampling, job.output, job.history, ToolFlags()))


def _run_prompt(job: RunJob, prompt: str) -> None:
    """Load the model, generate, print the text and report.

    Raises:
        CancelledError: Ctrl-C ended the generation; the text so far is printed.
        CutTextError: The text was cut before its grammar allowed an end; it is printed.
        EdgedecError: As edgedec.load and Engine.stream.
    """
    from edgedec_apps.cli.opening import open_model, sampling_options, save_draft_store
    from edgedec_apps.cli.sampling_options import grammar_options

    if job.raw and job.system is not None:
        raise RequestError("--system needs the chat template; leave out --raw")
    if job.raw and job.image:
        raise RequestError("--image needs the chat template; leave out --raw")
    if not job.raw and not prompt.strip():
        raise RequestError("the prompt is empty; give one as an argument, with --file or on standard input")
    require_writable(job.output.json_out)
    way, n_texts = None, 1
    if job.choice != ChoiceFlags():
        from edgedec_apps.cli.choice import n_texts_of, way_of

        way = way_of(job.choice)
        n_texts = n_texts_of(way, job.choice)
    grammar = grammar_options(job.sampling)
    options = sampling_options(job.sampling) | grammar
    pictures = picture_parts(job.image or [])

    def work(cancel: CancelToken) -> "tuple[Written, _About, bool]":
        plan: dict[str, Any] = {"n_texts": n_texts, "grammars": bool(grammar), "keeps_prompts": True}
        with open_model(job.model, job.load, job.output, cancel, one_request=True, **plan) as engine:
            progress = ProgressLine(quiet=job.output.quiet)
            given = _prompt(engine, job, prompt, pictures)
            seen = [] if isinstance(given, str) or not pictures else pictures_document(engine.mark_pictures, given)
            with progress as on_progress:
                started = options | {"cancel": cancel, "on_progress": on_progress}
                found = _written(engine, job, given, way, n_texts, started, progress)
            save_draft_store(engine)
            return found, _About(job.model, held_by(engine), sampling_line(engine, options), seen), cancel.cancelled

    try:
        found, about, interrupted = interruptible(work)
    except ScorerError as failed:
        if not job.output.as_json:
            print_texts(failed.texts)  # they were written; only their scores are missing
        raise
    _report(found, about, job.output)
    texts, unscored = (found, False) if isinstance(found, tuple) else ((found.generation,), interrupted)
    if unscored or any(text.finish_reason == "cancelled" for text in texts):
        raise CancelledError("interrupted")
    for text in texts:
        if error := cut_text(text):
            raise error


def _written(
    engine: "Engine",
    job: RunJob,
    prompt: "str | list[Message]",
    way: "BestOf | SearchBy | None",
    n: int,
    options: dict[str, Any],
    progress: ProgressLine,
) -> "Written":
    """Generate and print the text, or the texts; several are printed one after another when all are written.

    Where a text is chosen or searched for, that one is printed, and the choice is returned; else `n` texts are written.
    """
    n_most = options.get("max_tokens")
    own = OwnMarks() if isinstance(prompt, str) else own_marks(engine)
    show = None if job.output.as_json else with_thoughts(PlainText(), own)
    if way is not None:
        with telling_of_losses(quiet=job.output.quiet, before=progress.stop):
            chosen = engine.best(prompt, way, **options)
        progress.stop()
        if show is not None:
            show.write(chosen.text)
            show.end()
        return chosen
    if n > 1:
        stream = engine.samples_stream(prompt, n, **options)
        try:
            print_stream(stream, progress, n_most=n_most and n_most * n, show=None)
        except RuntimeLostError:
            if show is not None:  # what was written before is not lost
                print_texts([text.text for text in stream.generations])
            raise
        if show is not None:
            print_texts([text.text for text in stream.generations])
        return stream.generations
    one = engine.stream(prompt, **options) if isinstance(prompt, str) else engine.chat_stream(prompt, **options)
    print_stream(one, progress, n_most=n_most, show=show, hidden=own.hidden)
    return (one.generation,)


def _prompt(engine: "Engine", job: RunJob, prompt: str, pictures: list[dict[str, Any]]) -> "str | list[Message]":
    """Return the messages for the chat template, or the text to continue: with --raw, or for a model that has none."""
    if not job.raw and engine.can_chat:
        messages = [{"role": "system", "content": job.system}] if job.system is not None else []
        return [*messages, {"role": "user", "content": with_pictures(pictures, prompt)}]
    if pictures:
        raise RequestError("the model has no chat template, which --image needs; leave --image out")
    if job.system is not None:
        raise RequestError("the model has no chat template, which --system needs; leave --system out")
    if not job.raw and not job.output.quiet:
        say("edgedec: the model has no chat template; the prompt is continued, as with --raw")
    return prompt


@dataclass(frozen=True, slots=True)
class _About:
    """What is reported beside the texts.

    Attributes:
        model: The model's name.
        held: The memory that was held.
        sampled: A line on the options of sampling.
        pictures: The pictures of the prompt, with their sizes and tokens.
    """

    model: str
    held: Held
    sampled: str
    pictures: list[dict[str, Any]]


def _report(found: "Written", about: _About, output: OutputFlags) -> None:
    texts = found if isinstance(found, tuple) else found.texts
    if not output.quiet:
        shown = texts if isinstance(found, tuple) else (found.generation,)
        for number, text in enumerate(shown, 1):
            lines = [about.sampled, *pictures_lines(about.pictures), held_line(about.held)]
            say_summary(text, output.detail, lines if number == len(shown) else [])
        if not isinstance(found, tuple):
            from edgedec_apps.cli.choice import say_choice

            say_choice(found, others=output.detail != "none" or output.verbose)
    if not output.as_json and output.json_out is None:
        return
    documents = [_document(text, about.model) for text in texts]
    document = documents[0] if len(texts) == 1 else {"model": about.model, "texts": documents}
    if not isinstance(found, tuple):
        from edgedec_apps.cli.choice import choice_document

        document = documents[found.place] | {"choice": choice_document(found), "texts": documents}
    document |= ({"pictures": about.pictures} if about.pictures else {}) | {"memory": held_document(about.held)}
    if output.as_json:
        write_json(document)
    if output.json_out is not None:
        write_json_file(output.json_out, document)


def _document(generation: "Generation", model: str) -> dict[str, Any]:
    """Return the JSON object of a generation."""
    document: dict[str, Any] = {
        "model": model,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        **({} if generation.is_whole is None else {"is_whole": generation.is_whole}),
        **({} if generation.logprob_sum is None else {"logprob_sum": generation.logprob_sum}),
        "stats": generation.stats.as_dict(),
    }
    if any(output.logprob is not None for output in generation.outputs):
        document["logprobs"] = [
            {"token_id": output.token_id, "logprob": output.logprob, "top": dict(output.top_logprobs)}
            for output in generation.outputs
        ]
    return document
