"""A chat with a loaded model: its messages so far, and how the last of them is answered."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import Message
from edgedec.errors import CancelledError, PromptTooLongError, TemplateError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.cli.chat.tool_calls import MOST_ROUNDS, ChatTools, Tools
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.opening import preset_of
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.pictures import with_pictures
from edgedec_apps.cli.prompt import say_found
from edgedec_apps.cli.shown.explain import Detail, sampling_line
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.replies import PlainText, ShownText, cut_text, print_stream, say_summary
from edgedec_apps.cli.shown.terminal import say
from edgedec_apps.cli.shown.thoughts import OwnMarks, answer_message, own_marks, with_thoughts
from edgedec_apps.cli.wording import in_options
from edgedec_apps.documents.asking import Asking
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.search import Found
from edgedec_apps.reply_marks import marks_of, opened_mark, schemas_of


@dataclass(slots=True)
class Conversation:
    """The messages of a chat so far, and how it is answered.

    Attributes:
        model: The model's name, as it was given.
        open: Loads a model by its name, for this chat.
        check: Raises an error where a model of this name can't answer in a chat, as far as its header tells.
        options: The options of each generation.
        typed: Whether a person types the messages; else they come from a pipe.
        markdown: Whether answers are shown as Markdown, with colours.
        quiet, detail: What is printed after an answer.
        messages: The messages that the next answer follows.
        last: The last answer.
        attached: Texts of files, which come before the next message.
        searched: Documents that are longer than the context; passages of them come before each message.
        tools: The tools that the model may call.
        pictures: Pictures, as parts of a message, which come before these.
    """

    engine: Engine
    model: str
    open: Callable[[str], Engine]
    check: Callable[[str], None]
    options: dict[str, Any]
    typed: bool
    markdown: bool
    quiet: bool
    detail: Detail
    messages: list[Message] = field(default_factory=list)
    last: Generation | None = None
    attached: list[str] = field(default_factory=list)
    searched: list[Document] = field(default_factory=list)
    tools: ChatTools = field(default_factory=ChatTools)
    pictures: list[dict[str, Any]] = field(default_factory=list)

    def reset(self, system: str | None) -> None:
        """Forget all messages, and begin with a system message unless it is None."""
        self.messages, self.attached, self.searched, self.pictures = [], [], [], []
        self.last = None
        self.instruct(system)

    def instruct(self, system: str | None) -> None:
        """Replace the system message, and keep the other messages; None leaves no system message."""
        others = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([] if system is None else [{"role": "system", "content": system}]), *others]

    @property
    def system(self) -> str | None:
        """The text of the system message; None where there is none."""
        first = self.messages[0] if self.messages else None
        return str(first["content"]) if first and first["role"] == "system" else None

    def tell(self, text: str) -> None:
        """Print a note in brackets, unless the chat is quiet."""
        if not self.quiet:
            say(f"({text})")


def ask(conversation: Conversation, text: str) -> None:
    """Answer a message, behind the pictures and texts that are attached. One without an answer is removed again.

    Raises:
        EdgedecError: As Engine.chat_stream.
        CancelledError: Ctrl-C stopped the answer to a message from a pipe.
    """
    asked = _with_passages(conversation, text) if conversation.searched else text
    _send(conversation, with_pictures(conversation.pictures, "\n\n".join([*conversation.attached, asked])))
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":  # else Ctrl-C came before a word
        conversation.attached, conversation.pictures = [], []


def _with_passages(conversation: Conversation, text: str) -> str:
    """Return a message behind the passages of the documents that match it best, in half of the context."""
    engine, system = conversation.engine, conversation.system
    before = [] if system is None else [{"role": "system", "content": system}]
    asking = Asking(
        engine,
        lambda passages: with_pictures(conversation.pictures, "\n\n".join([*conversation.attached, passages])),
        before,
        conversation.tools.definitions(engine),
        n_answer=engine.n_ctx // 2,
    )

    def work(cancel: CancelToken) -> Found | None:
        with ProgressLine(quiet=conversation.quiet) as on_progress:
            return asking.search(conversation.searched, text, cancel, on_progress)

    passages = interruptible(work)
    if passages is None:
        conversation.tell("no passage of the documents matches; nothing of them is read")
        return text
    if not conversation.quiet:
        say_found(conversation.searched, passages, engine.n_ctx)
    return passages.content


def regenerate(conversation: Conversation) -> None:
    """Answer the last message of the user again."""
    while conversation.messages and conversation.messages[-1]["role"] in ("assistant", "tool"):
        conversation.messages.pop()
    if conversation.messages and conversation.messages[-1]["role"] == "user":
        _send(conversation, conversation.messages.pop()["content"])
    else:
        say("(nothing to answer again)")


def _send(conversation: Conversation, content: str | list[dict[str, Any]]) -> None:
    """Answer a message; where that fails the messages are as before."""
    before = list(conversation.messages)
    conversation.messages.append({"role": "user", "content": content})
    try:
        _answer(conversation)
    except BaseException:
        conversation.messages = before
        raise


def _answer(conversation: Conversation) -> None:
    """Answer the last message; where the model calls tools, it goes on with what they answered."""
    for n_round in range(1, MOST_ROUNDS + 1):
        calls = _reply(conversation)
        if not calls:
            return
        messages, goes_on = conversation.tools.run(calls, conversation.engine, quiet=conversation.quiet)
        conversation.messages += messages
        if not goes_on:
            if not conversation.typed:
                raise CancelledError("interrupted")
            return
        if n_round == MOST_ROUNDS:
            say(f"(the model called tools {MOST_ROUNDS} times in a row; write a message to let it go on)")


def _reply(conversation: Conversation) -> Sequence[ToolCall]:
    """Let the model write its next message, and append it; return the calls in it that are to be run."""
    engine, tools = conversation.engine, conversation.tools.definitions(conversation.engine)
    _make_room(conversation, tools)
    marks = _own_marks(conversation, tools)
    progress = ProgressLine(quiet=conversation.quiet)

    def work(cancel: CancelToken) -> Generation:
        options = conversation.options
        if tools is not None and "json_schema" not in options:
            from edgedec_apps.call_grammar import bound_calls, may_bind

            if may_bind(options):
                options = {**options, "grammar": bound_calls(engine, tools)}
        with progress as on_progress:
            stream = engine.chat_stream(
                conversation.messages, tools=tools, cancel=cancel, on_progress=on_progress, **options
            )
            print_stream(stream, progress, show=_shown(conversation, marks), hidden=marks.hidden)
        return stream.generation

    generation = conversation.last = interruptible(work)
    if not conversation.quiet:
        say_summary(generation, conversation.detail, [sampling_line(engine, conversation.options)])
    if generation.finish_reason == "cancelled":
        if not conversation.typed:
            raise CancelledError("interrupted")
        if not generation.text:
            if conversation.messages[-1]["role"] == "user":  # what a tool answered stands beside its call
                conversation.messages.pop()
            return ()
    if error := cut_text(generation):
        say(f"edgedec: {in_options(error)}")
    message, calls = answer_message(generation, marks)
    if calls and generation.finish_reason != "stop":
        say("(the answer was cut, so its calls of tools are not run)")
        message, calls = {"role": "assistant", "content": generation.text}, ()
    conversation.messages.append(message)
    return calls


def _own_marks(conversation: Conversation, tools: Tools | None) -> OwnMarks:
    """Return the marks by which the next answer is split."""
    engine = conversation.engine
    if tools is None:
        return own_marks(engine)
    rendered, template = engine.requests.render(conversation.messages, tools=tools), engine.requests.require_template()
    return own_marks(engine, schemas_of(tools), opened_mark(rendered, marks_of(template.source)))


def _shown(conversation: Conversation, marks: OwnMarks) -> ShownText:
    """Return what shows an answer while it comes; `marks` are the marks of a model that thinks by marks of its own."""
    show: ShownText = PlainText()
    if conversation.markdown:
        from edgedec_apps.cli.shown.live_text import LiveMarkdown  # here, as it imports rich

        show = LiveMarkdown()
    return with_thoughts(show, marks)


def _make_room(conversation: Conversation, tools: Tools | None) -> None:
    """Drop the oldest turns where the context is full, and so many that the next turns fit too.

    After each drop the rest must be prefilled again, so several turns are dropped at once.

    Raises:
        PromptTooLongError: What is left would not begin with what the user asked.
    """
    engine = conversation.engine
    n_answer = conversation.options.get("max_tokens") or engine.n_ctx // 4
    try:
        messages, n_dropped = engine.fit_messages(conversation.messages, min(n_answer, engine.n_ctx // 2), tools)
    except PromptTooLongError:
        engine.chat_ids(conversation.messages[-1:], tools=tools)  # raises the error that names the context to ask for
        raise
    if n_dropped:
        with suppress(PromptTooLongError):  # the last message alone takes more than half
            messages, n_dropped = engine.fit_messages(conversation.messages, engine.n_ctx // 2, tools)
        if not any(message["role"] == "user" for message in messages):
            raise PromptTooLongError(
                f"the context of {engine.n_ctx} tokens has no room for what the tools answered; ask for less, or load "
                "the model with a longer context (--context)"
            )
        gone = "message" if n_dropped == 1 else f"{n_dropped} messages"
        say(f"(the context of {engine.n_ctx} tokens is full: the oldest {gone} left out)")
    conversation.messages = messages


def require_template(name: str, flags: LoadFlags, cancel: CancelToken, *, quiet: bool) -> None:
    """Find a model, which may be downloaded, and look in its header for a chat template; its weights are not read.

    Nothing is looked at where the options or the preset of this name bring a template.

    Raises:
        TemplateError: The model has no chat template.
        EdgedecError: There is no such model, it can't be downloaded, or its header is damaged.
    """
    preset = preset_of(name)
    if flags.chat_template is not None or (preset is not None and preset.template):
        return
    with ProgressLine(quiet=quiet) as on_progress:
        model = name if preset is None else preset.model
        path = resolve(model, ResolveOptions(cache_folder(), flags.offline, on_progress, cancel))
    if not describe(read_header_of(path)).has_chat_template:
        raise TemplateError(
            f"{name} has no chat template; give a prompt to continue (edgedec run), or --chat-template FILE"
        )
