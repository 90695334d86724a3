"""edgedec chat: a conversation at the terminal, or one message a line from a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgedec.chat import Message
from edgedec.errors import CancelledError, EdgedecError, PromptTooLongError, RequestError, TemplateError
from edgedec.progress import CancelToken
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.keyboard import typed_messages
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, SamplingFlags, System, SystemFile
from edgedec_apps.cli.preset_options import with_preset
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.prompt import piped_lines, system_text
from edgedec_apps.cli.replies import cut_text, print_stream, say_summary
from edgedec_apps.cli.terminal import one_line, say
from edgedec_apps.cli.wording import in_options

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec.sequence import Generation

_HELP = """/clear          forget the conversation
/system TEXT    set the system message and forget the conversation
/regen          answer the last message again
/stats          counts and times of the last answer
/help           this list
/bye            leave (so does Ctrl-D)
//TEXT          send the text /TEXT, which begins with a slash
\"\"\"             begin and end a message of several lines
Ctrl-C          stop the answer"""
_LEAVE = ("/bye", "/exit", "/quit")


@dataclass(slots=True)
class Conversation:
    """The messages of a chat so far, and how it is answered.

    Attributes:
        engine: The loaded model.
        options: The options of each generation.
        typed: Whether a person types the messages; else they come from a pipe.
        quiet, explain: What is printed after an answer.
        messages: The messages that the next answer follows.
        last: The last answer.
    """

    engine: "Engine"
    options: dict[str, Any]
    typed: bool
    quiet: bool
    explain: bool
    messages: list[Message] = field(default_factory=list)
    last: "Generation | None" = None

    def reset(self, system: str | None) -> None:
        """Forget all messages, and begin with a system message unless it is None."""
        self.messages = [{"role": "system", "content": system}] if system is not None else []
        self.last = None

    @property
    def system(self) -> str | None:
        """The text of the system message; None where there is none."""
        first = self.messages[0] if self.messages else None
        return str(first["content"]) if first and first["role"] == "system" else None


def command(
    model: ModelName,
    *,
    system: System = None,
    system_file: SystemFile = None,
    load: LoadFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
) -> None:
    """Talk with a model. From a pipe, each line is a message."""
    sampling, system = with_preset(model, sampling, system_text(system, system_file))
    converse(model, system, load, sampling, output)


def converse(model: str, system: str | None, load: LoadFlags, sampling: SamplingFlags, output: OutputFlags) -> None:
    """Load the model and answer messages until the input ends.

    Raises:
        RequestError: The output options are those of a single prompt, or an option is out of range.
        TemplateError: The model has no chat template.
        EdgedecError: As edgedec.load; from a pipe also what Engine.chat_stream raises.
    """
    from edgedec_apps.cli.grammar_options import grammar_options
    from edgedec_apps.cli.opening import open_model, restore_prompt_cache, sampling_options, store_prompt_cache

    if output.as_json or output.json_out is not None:
        raise RequestError("--json and --json-out need a single prompt; give one, or pipe it in")
    grammar = grammar_options(sampling)
    options = sampling_options(sampling) | grammar

    def opened(cancel: CancelToken) -> "Engine":
        engine = open_model(model, load, output, cancel, grammars=bool(grammar))
        try:
            restore_prompt_cache(engine, load.prompt_cache)
        except BaseException:
            engine.close()
            raise
        return engine

    with interruptible(opened) as engine:
        if not engine.can_chat:
            raise TemplateError(
                f"{model} has no chat template; give a prompt to continue (edgedec run), or --chat-template FILE"
            )
        conversation = Conversation(engine, options, sys.stdin.isatty(), output.quiet, output.explain)
        conversation.reset(system)
        for message in _messages(conversation, model):
            _handle(conversation, message)
        store_prompt_cache(engine, load.prompt_cache)


def _messages(conversation: Conversation, model: str) -> Iterator[str]:
    """Yield the messages and commands that come in, until the input ends or one of them leaves the chat."""
    engine = conversation.engine
    if conversation.typed and not conversation.quiet:
        say(f"{one_line(engine.card.name or model)} · {engine.n_ctx} tokens of context · /help for help")
    for text in typed_messages() if conversation.typed else piped_lines(engine.plan.process_cap_bytes):
        if text.split(maxsplit=1)[0] in _LEAVE:
            return
        yield text


def _handle(conversation: Conversation, text: str) -> None:
    """Run the command that a line holds, or answer the message; refuse any other line that begins with a slash."""
    command, _, rest = text.strip().partition(" ")
    commands: dict[str, Callable[[], None]] = {
        "/help": lambda: say(_HELP),
        "/clear": lambda: _clear(conversation, conversation.system),
        "/system": lambda: _clear(conversation, rest.strip() or None),
        "/stats": lambda: _show_stats(conversation),
        "/regen": lambda: _regenerate(conversation),
    }
    if command in commands:
        commands[command]()
    elif command.startswith("//"):
        _ask(conversation, text.replace("//", "/", 1))
    elif command.startswith("/"):
        _refuse(conversation, command, [*commands, _LEAVE[0]])
    else:
        _ask(conversation, text)


def _refuse(conversation: Conversation, command: str, known: list[str]) -> None:
    """Say that there is no such command; RequestError where messages come from a pipe."""
    error = f"no such command: {one_line(command)}; known: {', '.join(known)} (write // to begin a text with a slash)"
    if not conversation.typed:
        raise RequestError(error)
    say(error)


def _clear(conversation: Conversation, system: str | None) -> None:
    conversation.reset(system)
    if not conversation.quiet:
        say(f"(forgotten; {'no system message' if system is None else f'system message: {one_line(system)}'})")


def _regenerate(conversation: Conversation) -> None:
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        conversation.messages.pop()
    if conversation.messages and conversation.messages[-1]["role"] == "user":
        _ask(conversation, str(conversation.messages.pop()["content"]))
    else:
        say("(nothing to answer again)")


def _ask(conversation: Conversation, text: str) -> None:
    """Answer a message. One that can't be answered is removed again; where messages come from a pipe it is an error."""
    before = list(conversation.messages)
    conversation.messages.append({"role": "user", "content": text})
    try:
        _answer(conversation)
    except EdgedecError as error:
        conversation.messages = before
        if not conversation.typed or not isinstance(error, RequestError):
            raise
        say(f"edgedec: {in_options(error)}")


def _answer(conversation: Conversation) -> None:
    """Answer the last message, and append the answer."""
    _make_room(conversation)
    progress = ProgressLine(quiet=conversation.quiet)

    def work(cancel: CancelToken) -> "Generation":
        with progress as on_progress:
            stream = conversation.engine.chat_stream(
                conversation.messages, cancel=cancel, on_progress=on_progress, **conversation.options
            )
            print_stream(stream, progress, show=True)
        return stream.generation

    generation = conversation.last = interruptible(work)
    if not conversation.quiet:
        say_summary(generation, explain=conversation.explain)
    if generation.finish_reason == "cancelled":
        if not conversation.typed:
            raise CancelledError("interrupted")
        if not generation.text:
            conversation.messages.pop()
            return
    if error := cut_text(generation):
        say(f"edgedec: {in_options(error)}")
    conversation.messages.append({"role": "assistant", "content": generation.text})


def _make_room(conversation: Conversation) -> None:
    """Drop the oldest turns where the context is full, and so many that the next turns fit too.

    After each drop the rest must be prefilled again, so several turns are dropped at once.
    """
    engine = conversation.engine
    n_answer = conversation.options.get("max_tokens") or engine.n_ctx // 4
    messages, n_dropped = engine.fit_messages(conversation.messages, min(n_answer, engine.n_ctx // 2))
    if n_dropped:
        with suppress(PromptTooLongError):  # the last message alone takes more than half
            messages, n_dropped = engine.fit_messages(conversation.messages, engine.n_ctx // 2)
        gone = "message" if n_dropped == 1 else f"{n_dropped} messages"
        say(f"(the context of {engine.n_ctx} tokens is full: the oldest {gone} left out)")
    conversation.messages = messages


def _show_stats(conversation: Conversation) -> None:
    if conversation.last is None:
        say("(nothing was answered yet)")
        return
    for name, value in conversation.last.stats.as_dict().items():
        shown = f"{value:.3f}" if isinstance(value, float) else value
        say(f"{name:20} {shown}")
