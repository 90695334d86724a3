"""edgedec chat: a conversation at the terminal, or one message a line from a pipe."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edgedec.chat import Message
from edgedec.engine import Engine
from edgedec.errors import EdgedecError, PromptTooLongError, RequestError, TemplateError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.cli.opening import open_model, restore_prompt_cache, store_prompt_cache
from edgedec_apps.cli.options import LoadFlags, OutputFlags, SamplingFlags
from edgedec_apps.cli.terminal import interruptible, say, summary, write_text

_HELP = """/clear          forget the conversation
/system TEXT    set the system message and forget the conversation
/regen          answer the last message again
/stats          what the last answer did and cost
/help           this list
/bye            leave (so does Ctrl-D)
\"\"\"             begin and end a message of several lines
Ctrl-C          stop the answer"""


@dataclass(slots=True)
class Conversation:
    """What has been said, and the last answer."""

    engine: Engine
    options: dict[str, Any]
    quiet: bool
    system: str | None
    messages: list[Message] = field(default_factory=list)
    last: Generation | None = None

    def reset(self, system: str | None) -> None:
        """Forget what was said."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system is not None else []
        self.last = None


def converse(model: str, system: str | None, load: LoadFlags, sampling: SamplingFlags, output: OutputFlags) -> None:
    """Load the model and answer until the input ends."""
    if output.as_json or output.json_out is not None:
        raise RequestError("--json and --json-out are for a single prompt; give one, or pipe it in")

    def opened(cancel: CancelToken) -> Engine:
        engine = open_model(model, load, output, cancel)
        restore_prompt_cache(engine, load.prompt_cache)
        return engine

    with interruptible(opened) as engine:
        if not engine.can_chat:
            raise TemplateError(
                f"{model} has no chat template; give a prompt to continue (edgedec run), or --chat-template FILE"
            )
        conversation = Conversation(engine, sampling.as_options(), output.quiet, system)
        conversation.reset(system)
        if sys.stdin.isatty() and not output.quiet:
            say(f"{engine.card.name or model} · {engine.n_ctx} tokens of context · /help for help")
        for message in _typed_messages() if sys.stdin.isatty() else _piped_messages():
            _handle(conversation, message)
        store_prompt_cache(engine, load.prompt_cache)


def _piped_messages() -> Any:
    for line in sys.stdin.buffer:
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8: {error}") from error
        if text:
            yield text


def _typed_messages() -> Any:
    """Yield what the person types; three quotation marks hold lines together."""
    with suppress(ImportError):  # absent on Windows
        import readline  # noqa: F401  # gives input() editing and history
    while True:
        try:
            text = input(">>> ")
            if text.startswith('"""'):
                lines = [text[3:]]
                while not lines[-1].endswith('"""'):
                    lines.append(input("... "))
                text = "\n".join(lines).removesuffix('"""')
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /bye leaves)")
            continue
        if text.strip() in ("/bye", "/exit", "/quit"):
            return
        if text.strip():
            yield text


def _handle(conversation: Conversation, text: str) -> None:
    """Do what a line asks for: a command, or an answer."""
    command, _, rest = text.partition(" ")
    commands: dict[str, Callable[[], None]] = {
        "/help": lambda: say(_HELP),
        "/clear": lambda: conversation.reset(conversation.system),
        "/system": lambda: conversation.reset(rest or None),
        "/stats": lambda: _show_stats(conversation),
        "/regen": lambda: _regenerate(conversation),
    }
    if command in commands:
        commands[command]()
    elif command.startswith("/") and sys.stdin.isatty():
        say(f"no such command: {command} (/help lists them)")
    else:
        conversation.messages.append({"role": "user", "content": text})
        _answer(conversation)


def _regenerate(conversation: Conversation) -> None:
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        conversation.messages.pop()
    if conversation.messages and conversation.messages[-1]["role"] == "user":
        _answer(conversation)
    else:
        say("nothing to answer again")


def _answer(conversation: Conversation) -> None:
    """Answer the last message; one that can't be answered is taken back."""
    engine, options = conversation.engine, conversation.options
    n_reserved = min(options.get("max_tokens") or engine.n_ctx // 4, engine.n_ctx // 2)
    try:
        conversation.messages, n_dropped = engine.fit_messages(conversation.messages, n_reserved)
    except PromptTooLongError as error:
        conversation.messages.pop()
        say(f"edgedec: {error}")
        return
    if n_dropped:
        say(f"(the context is full: the {n_dropped} oldest messages were left out)")

    def work(cancel: CancelToken) -> Generation:
        stream = engine.chat_stream(conversation.messages, cancel=cancel, **options)
        try:
            for token in stream:
                write_text(token.text)
        finally:
            stream.close()
        write_text("\n")
        return stream.generation

    try:
        conversation.last = interruptible(work)
    except EdgedecError:
        conversation.messages.pop()
        raise
    conversation.messages.append({"role": "assistant", "content": conversation.last.text})
    if not conversation.quiet:
        say(summary(conversation.last))


def _show_stats(conversation: Conversation) -> None:
    if conversation.last is None:
        say("nothing was answered yet")
        return
    for name, value in conversation.last.stats.as_dict().items():
        say(f"{name:20} {value}")
