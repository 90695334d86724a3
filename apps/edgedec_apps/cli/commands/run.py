"""edgedec run: a prompt in, text out."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import CancelledError, OptionError, RequestError, RuntimeLostError, ScorerError
from edgedec.memory.system import peak_held_bytes
from edgedec.progress import CancelToken
from edgedec_apps.cli.commands.chat import ChatJob
from edgedec_apps.cli.commands.chat import command as chat
from edgedec_apps.cli.declared import argument, prompt_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, System, ToolFlags
from edgedec_apps.cli.output_files import require_writable, write_json_file
from edgedec_apps.cli.pictures import picture_parts, pictures_document, pictures_lines, split_pictures, with_pictures
from edgedec_apps.cli.prompt import argument_text, find_documents, say_found
from edgedec_apps.cli.reports.memory_report import Held, held_document, held_line
from edgedec_apps.cli.sampling_options import SamplingFlags
from edgedec_apps.cli.shown.explain import sampling_line
from edgedec_apps.cli.shown.log import telling_of_losses
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.replies import (
    PlainText,
    cut_text,
    generation_document,
    print_stream,
    print_texts,
    say_summary,
)
from edgedec_apps.cli.shown.terminal import one_line, say, write_json, write_text
from edgedec_apps.cli.shown.thoughts import OwnMarks, own_marks, with_thoughts

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec.chat import Message
    from edgedec.choosing.choice import ChosenText
    from edgedec.sequence import Generation
    from edgedec_apps.choices import Choices
    from edgedec_apps.cli.choice import Way
    from edgedec_apps.documents.files import Document
    from edgedec_apps.documents.search import Found

    Written = tuple[Generation, ...] | ChosenText


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The arguments and options of `edgedec run`."""

    model: ModelName
    prompt: Annotated[
        list[str] | None,
        argument(
            "PROMPT...",
            "The prompt, after the content of --file or of standard input. Several, each about that content, are "
            "answered one after another. Without any of these, a chat.",
        ),
    ] = None
    file: list[Path] | None = prompt_flag(
        "--file --image -f -i FILE",
        'A text, a PDF or a picture that the prompt is about ("-": standard input). Repeatable.',
    )
    raw: bool = prompt_flag("--raw", "Continue the text, without the chat template.", False)
    system: System = None
    texts: str | None = prompt_flag(
        "--texts -k N|auto",
        "Write N texts of the prompt together, text k with the seed plus k. --method vote prints one of them, "
        "and auto writes as many as that needs.",
    )
    choices: str | None = prompt_flag(
        "--choices LIST",
        'Answer with the most probable of these: yes,no or ["yes", "no, sir"]. --json has each probability.',
        further=True,
    )
    load: LoadFlags
    sampling: SamplingFlags
    output: OutputFlags


def command(job: RunJob) -> None:
    """Run a model on a prompt: text goes to standard output, all else to standard error.

    A PROMPT with --file, or with a pipe, is about that content: cat FILE | edgedec run MODEL "Explain this". Of content
    that is longer than the context, the passages that match PROMPT best are read. At a terminal, without a prompt, it
    becomes a chat.
    """
    from edgedec_apps.cli.methods import asked_methods

    files, images = split_pictures(job.file or ())
    asked = _Asked.of(job, files)
    if asked is not None:
        _run_prompt(job, asked, images)
    elif images:
        raise RequestError("--image needs a prompt; give one, or pipe it in (in a chat, /image attaches pictures)")
    elif job.texts is not None or job.choices is not None or asked_methods(job.load.method, "prompt"):
        raise RequestError("--texts, --choices and this --method need a prompt; give one, or pipe it in")
    elif job.raw:
        raise RequestError("--raw needs a prompt to continue; give one, or pipe it in")
    else:
        load, sampling, output = job.load, job.sampling, job.output
        chat(
            ChatJob(model=job.model, system=job.system, load=load, sampling=sampling, output=output, tools=ToolFlags())
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a command asks: questions, None for the documents themselves, and documents that each of them is about."""

    questions: "Sequence[str | None]"
    documents: "Sequence[Document]"

    @classmethod
    def of(cls, job: RunJob, files: Sequence[Path]) -> "_Asked | None":
        """Return what is asked; None for a chat, at a terminal without a prompt (raises as find_documents)."""
        prompts = [argument_text(prompt, "the prompt") for prompt in job.prompt or []]
        if len(prompts) > 1 and not files and sys.stdin.isatty():
            raise RequestError("several prompts need --file; put a prompt of several words in quotation marks")
        documents = find_documents(files, job.load.memory, quiet=job.output.quiet)
        return None if documents is None and not prompts else cls(prompts or [None], documents or [])


def _run_prompt(job: RunJob, asked: _Asked, images: Sequence[Path]) -> None:
    """Load the model, answer, and print the texts and reports.

    Raises:
        CancelledError: Ctrl-C ended the generation; the text so far is printed.
        CutTextError: The text was cut before its grammar allowed an end; it is printed.
        NotPassedError: No text passed the check; the best one is printed.
        EdgedecError: As edgedec.load and Engine.stream.
    """
    from edgedec_apps.cli.methods import asked_methods, method_named, values_of, without_stages
    from edgedec_apps.cli.opening import keep_learned, open_model, text_options_of

    methods = asked_methods(job.load.method, "prompt")
    way, n_texts, choices = None, 1, list[str]()
    if job.choices is not None:
        from edgedec_apps.cli.choice import choices_of

        ways = asked_methods(job.load.method, "text", "prompt").keys() - {method_named("passages")}
        writes = ways or job.texts or job.sampling.grammar or job.sampling.think not in (None, "off")
        choices = choices_of(job.choices, excluded=bool(writes))
        job = replace(job, load=replace(job.load, draft="off", draft_option=None))
    elif methods or job.texts is not None:
        from edgedec_apps.cli.choice import n_texts_of, way_of

        way = way_of(methods, job.texts)
        n_texts = n_texts_of(way, job.texts)
    asked_by_name = values_of(methods)
    refines, reading = "refine" in asked_by_name, asked_by_name.get("passages", {})
    system_text = argument_text(job.system, "--system")
    options, system = text_options_of(job.model, job.load, job.sampling, system_text)
    job = replace(job, system=None if job.raw and system_text is None else system)
    _require_complete(job, asked, images=bool(images), refines=refines)
    require_writable(job.output.json_out)
    if (n_passages := reading.get("n", 1)) < 1:
        raise OptionError("--method passages:n", n_passages, "it must be at least 1")
    writing = _Writing(job, asked, way, n_texts, options, picture_parts(images), reading, choices)
    load = replace(job.load, method=without_stages(job.load.method, "text", "prompt"))
    answers: list[_Answer] = []

    def work(cancel: CancelToken) -> bool:
        plan: dict[str, Any] = {"n_texts": n_texts, "grammars": "grammar" in options, "keeps_prompts": True}
        one = len(asked.questions) == 1
        with open_model(job.model, load, job.output, cancel, one_request=one, **plan) as engine:
            if way is None:
                _answer_all(engine, writing, answers, cancel)
            else:
                from edgedec_apps.cli.choice import with_reward_model

                with with_reward_model(way, load, job.output, cancel) as opened:
                    _answer_all(engine, replace(writing, way=opened), answers, cancel)
            keep_learned(job.model, engine)
            return cancel.cancelled

    try:
        interrupted = interruptible(work)
    except ScorerError as failed:
        if not job.output.as_json:
            print_texts(failed.texts)  # they were written; only their scores are missing
        raise
    _write_documents(answers, job.output)
    last = answers[-1].result
    stopped = any(text.finish_reason == "cancelled" for text in last) if isinstance(last, tuple) else interrupted
    if stopped:
        raise CancelledError("interrupted")
    for text in [text for answer in answers for text in answer.shown]:
        if error := cut_text(text):
            raise error
    if refines:
        from edgedec_apps.cli.choice import require_passed

        require_passed(answer.result for answer in answers)


@dataclass(frozen=True, slots=True)
class _Writing:
    """How texts are written: the command, what is asked, how one is chosen, how many, their options, pictures, how
    long documents are read, and the choices in place of texts.
    """

    job: RunJob
    asked: _Asked
    way: "Way | None"
    n_texts: int
    options: dict[str, Any]
    pictures: list[dict[str, Any]]
    reading: dict[str, Any]
    choices: list[str]


def _answer_all(engine: "Engine", writing: _Writing, answers: "list[_Answer]", cancel: CancelToken) -> None:
    """Answer the questions one after another, and append the answers; what was printed of one is not taken back."""
    job, questions = writing.job, writing.asked.questions
    for number, question in enumerate(questions, 1):
        if len(questions) > 1 and not job.output.as_json:
            write_text(f"--- question {number} of {len(questions)}: {one_line(question or '')} ---\n")
        progress = ProgressLine(quiet=job.output.quiet)
        with progress as on_progress:
            options = writing.options | {"cancel": cancel, "on_progress": on_progress}
            prompt, read = _prompt(engine, writing, question, options)
            mark = engine.requests.mark_pictures
            seen = [] if isinstance(prompt, str) or not writing.pictures else pictures_document(mark, prompt)
            weighed: Choices | None = None
            if writing.choices:
                from edgedec_apps.choices import choose

                weighed = choose(engine, prompt, writing.choices, cancel=cancel, on_progress=on_progress)
            written = _written(engine, writing, prompt, options, progress) if weighed is None else ()
        if weighed is not None and not job.output.as_json:
            write_text(weighed.ranked[0].text + "\n")
        sampled, held = sampling_line(engine, writing.options), Held(engine.plan, peak_held_bytes(engine.processes))
        answers.append(_Answer(written, job.model, held, sampled, seen, question, read, weighed))
        _say(answers[-1], job.output)
        if cancel.cancelled:
            return


def _require_complete(job: RunJob, asked: _Asked, *, images: bool, refines: bool) -> None:
    """Raise RequestError where options exclude each other, or a prompt is empty."""
    if job.raw and job.system is not None:
        raise RequestError("--system needs the chat template; leave out --raw")
    if job.raw and refines:
        raise RequestError(
            "--method refine needs the chat template, to show the model what the check said; leave out --raw"
        )
    if job.raw and job.sampling.think is not None:
        raise RequestError("--think needs the chat template; leave out --raw")
    if job.raw and images:
        raise RequestError("--image needs the chat template; leave out --raw")
    texts = [document.text for document in asked.documents]
    if not job.raw and not all("".join([*texts, question or ""]).strip() for question in asked.questions):
        raise RequestError("the prompt is empty; give one as an argument, with --file or on standard input")


def _written(
    engine: "Engine", writing: _Writing, prompt: "str | list[Message]", options: dict[str, Any], progress: ProgressLine
) -> "Written":
    """Generate and print the text, or the texts; several are printed one after another when all are written.

    Where a text is chosen or searched for, that one is printed, and the choice is returned.
    """
    n, n_most, output = writing.n_texts, options.get("max_tokens"), writing.job.output
    marks = OwnMarks() if isinstance(prompt, str) else own_marks(engine)
    show = None if output.as_json else with_thoughts(PlainText(), marks)
    if writing.way is not None:
        with telling_of_losses(quiet=output.quiet, before=progress.stop):
            from edgedec_apps.cli.choice import chosen

            choice = chosen(engine, prompt, writing.way, options)
        progress.stop()
        if show is not None:
            show.write(choice.text)
            show.end()
        return choice
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
    print_stream(one, progress, n_most=n_most, show=show, hidden=marks.hidden)
    return (one.generation,)


def _prompt(
    engine: "Engine", writing: _Writing, question: str | None, options: dict[str, Any]
) -> "tuple[str | list[Message], Found | None]":
    """Return the messages for the chat template, and what was searched for them.

    With --raw, or for a model that has no template, it is the text to continue instead of messages.
    """
    job, documents, pictures = writing.job, writing.asked.documents, writing.pictures
    if not job.raw and engine.template is not None:
        system = [{"role": "system", "content": job.system}] if job.system is not None else []
        text, passages = question or "", None
        if documents:
            from edgedec_apps.cli.opening import rank_by_model
            from edgedec_apps.documents.asking import ANSWER, Asking

            asking = Asking(
                engine,
                partial(with_pictures, pictures),
                system,
                n_answer=options.get("max_tokens") or ANSWER,
                with_names=len(documents) > 1,
                rank=rank_by_model(writing.reading.get("model"), job.load, job.output),
                n_passages=writing.reading.get("n"),
            )
            text, passages = asking.about(documents, question, options["cancel"], options["on_progress"])
            if passages is not None and not job.output.quiet:
                say_found(documents, passages, engine.n_ctx)
        return [*system, {"role": "user", "content": with_pictures(pictures, text)}], passages
    if pictures:
        raise RequestError("the model has no chat template, which --image needs; leave --image out")
    if "think" in options:
        raise RequestError("the model has no chat template, which --think needs; leave --think out")
    if job.system is not None:
        raise RequestError("the model has no chat template, which --system needs; leave --system out")
    from edgedec.model import writes_texts

    if writes_texts(engine.model) and not job.raw and not job.output.quiet:
        say("edgedec: the model has no chat template, so it reads the prompt as it stands, as with --raw")
    if not documents:
        return question or "", None
    from edgedec_apps.documents.search import whole

    return whole(documents, question, with_names=len(documents) > 1), None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was written to a prompt, and what is reported of it.

    Attributes:
        result: The texts, or the choice of one.
        model: The model's name.
        held: The memory that was held.
        sampled: A line on the options of sampling.
        pictures: The pictures of the prompt, with their sizes and tokens.
        question: The question, or None.
        read: What was searched for it in documents, or None.
        choices: The choices in place of texts, or None.
    """

    result: "Written"
    model: str
    held: Held
    sampled: str
    pictures: list[dict[str, Any]]
    question: str | None
    read: "Found | None"
    choices: "Choices | None"

    @property
    def shown(self) -> "tuple[Generation, ...]":
        """The texts that are printed."""
        return self.result if isinstance(self.result, tuple) else (self.result.generation,)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        result = self.result
        texts = result if isinstance(result, tuple) else result.texts
        documents = [generation_document(text, self.model) for text in texts]
        document = documents[0] if len(texts) == 1 else {"model": self.model, "texts": documents}
        if (weighed := self.choices) is not None:
            document = {"model": self.model, "text": weighed.ranked[0].text, "mass": weighed.mass} | asdict(weighed)
        if not isinstance(result, tuple):
            from edgedec_apps.cli.choice import choice_document

            document = documents[result.place] | {"choice": choice_document(result), "texts": documents}
        pictures = {"pictures": self.pictures} if self.pictures else {}
        read = {} if self.read is None else {"search": self.read.document()}
        return document | pictures | read | {"memory": held_document(self.held)}


def _say(answer: _Answer, output: OutputFlags) -> None:
    """Print the summary of an answer, and what explains it."""
    if output.quiet:
        return
    read = [] if answer.read is None else [one_line(line) for line in answer.read.lines()]
    lines = [answer.sampled, *pictures_lines(answer.pictures), *read, held_line(answer.held)]
    for number, text in enumerate(answer.shown, 1):
        say_summary(text, output.detail, lines if number == len(answer.shown) else [])
    if answer.choices is not None:
        from edgedec_apps.cli.choice import say_choices

        say_choices(answer.choices, all_of_them=output.detail != "none" or output.verbose)
    if not isinstance(answer.result, tuple):
        from edgedec_apps.cli.choice import say_choice

        say_choice(answer.result, others=output.detail != "none" or output.verbose)


def _write_documents(answers: "Sequence[_Answer]", output: OutputFlags) -> None:
    """Write the JSON object, where one is wanted; that of several questions has a list of their answers."""
    if not output.as_json and output.json_out is None:
        return
    document = answers[0].document()
    if len(answers) > 1:
        document = {"answers": [{"question": each.question} | each.document() for each in answers]}
    if output.as_json:
        write_json(document)
    if output.json_out is not None:
        write_json_file(output.json_out, document)
