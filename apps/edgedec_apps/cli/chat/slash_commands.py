"""The commands of a chat: the lines that begin with a slash, typed or from a pipe."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edgedec.errors import EdgedecError, PromptTooLongError, RequestError, SessionError, counted
from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.chat.conversation import Conversation, ask, regenerate
from edgedec_apps.cli.chat.files import load_messages, save_messages
from edgedec_apps.cli.chat.settings import set_option, settings
from edgedec_apps.cli.interrupts import TerminatedError, interruptible
from edgedec_apps.cli.pictures import dropped, picture_parts, pictures_document, pictures_lines
from edgedec_apps.cli.reports.memory_report import planned_range
from edgedec_apps.cli.shown.explain import SAMPLED, explained, sampling_line
from edgedec_apps.cli.shown.replies import summary
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.cli.wording import in_options
from edgedec_apps.documents.files import read_document


class Command(NamedTuple):
    """A command of a chat: what it does with the rest of its line, how that is called, and a sentence of help."""

    run: Callable[[Conversation, str], None]
    argument: str
    help: str


def handle(conversation: Conversation, text: str) -> None:
    """Run the command that a line holds, or answer the message.

    Where a person types, what can't be done is said, and the chat goes on.

    Raises:
        RequestError: From a pipe: there is no such command, or what it was given is out of range.
        EdgedecError: As `ask`.
    """
    try:
        _handle(conversation, text)
    except EdgedecError as error:
        if not conversation.typed or isinstance(error, SessionError | TerminatedError):
            raise
        say(f"edgedec: {in_options(error)}")


def leaves(text: str) -> bool:
    """Return whether a line ends the chat."""
    return text.split(maxsplit=1)[0] in (_LEAVE, "/exit", "/quit")


def names() -> list[str]:
    """Return the names of all commands."""
    return [*_COMMANDS, _LEAVE]


def beginnings() -> list[str]:
    """Return what a line with a command begins with: its name, and a space where an argument follows."""
    return [*(f"{name} " if command.argument else name for name, command in _COMMANDS.items()), _LEAVE]


def _handle(conversation: Conversation, text: str) -> None:
    name, _, rest = text.strip().partition(" ")
    if (command := _COMMANDS.get(name)) is not None:
        command.run(conversation, rest.strip())
    elif conversation.typed and (files := dropped(text))[0]:
        _take(conversation, files[0])
        if files[1]:
            ask(conversation, files[1])
    elif name.startswith("/") and not name.startswith("//"):
        _refuse(conversation, name)
    else:
        ask(conversation, text.replace("//", "/", 1) if name.startswith("//") else text)


def _refuse(conversation: Conversation, name: str) -> None:
    """Say that there is no such command; RequestError where messages come from a pipe."""
    error = f"no such command: {one_line(name)}; known: {', '.join(names())} (write // to begin a text with a slash)"
    if not conversation.typed:
        raise RequestError(error)
    say(error)


def _help(_: Conversation, __: str) -> None:
    rows = [(f"{name} {command.argument}".strip(), command.help) for name, command in _COMMANDS.items()]
    for shown, text in (*rows, *_KEYS):
        say(f"{shown:{_COLUMN}}  {text}")


def _begin(conversation: Conversation, system: str | None) -> None:
    conversation.reset(system)
    what = "no system message" if system is None else f"system message: {one_line(system)}"
    conversation.tell(f"forgotten; {what}")


def _set(conversation: Conversation, rest: str) -> None:
    if not rest:
        for name, value in settings(conversation):
            say(f"{name:{_COLUMN}}  {one_line(value)}")
        return
    name, _, value = rest.partition(" ")
    conversation.tell(one_line(set_option(conversation, name, value.strip())))


def _save(conversation: Conversation, rest: str) -> None:
    save_messages(_path("/save", rest), conversation.model, conversation.messages)
    conversation.tell(f"saved in {one_line(rest)}")


def _load(conversation: Conversation, rest: str) -> None:
    messages = load_messages(_path("/load", rest))
    conversation.reset(None)
    conversation.messages = messages
    conversation.tell(f"loaded: {counted(len(messages), 'message')}")


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise RequestError(f"{command} needs the name of a file")
    try:
        return Path(rest).expanduser()
    except RuntimeError as error:  # there is no such user
        raise RequestError(f"{command}: {error}") from error


def _attach(conversation: Conversation, rest: str) -> None:
    path, engine = _path("/file", rest), conversation.engine
    if not path.is_file() and path.exists():
        raise RequestError(f"{path} is no file")
    cap, most = engine.plan.process_cap_bytes, engine.n_ctx * _MOST_TOKEN_BYTES
    free = None if cap is None else max(0, cap - engine.plan.total_bytes)
    most_bytes = None if free is None else max(most, free // _TEXT_PART)
    document = interruptible(lambda cancel: read_document(path, most_bytes, free, cancel))
    text = document.whole.strip("\r\n")
    if not text.strip():
        raise RequestError(f"{path} holds no text")
    try:
        n_tokens = len(engine.prompt_ids(text))
    except PromptTooLongError:
        conversation.searched.append(document)
        what = f"longer than the context of {engine.n_ctx} tokens; for each message it is searched (until /clear)"
        conversation.tell(
            f"{one_line(rest)}: {what}{', but for its end, which is too long' if document.is_cut else ''}"
        )
        return
    conversation.attached.append(text)
    conversation.tell(f"{one_line(rest)}: {counted(n_tokens, 'token')}; its text comes before your next message")


def _attach_picture(conversation: Conversation, rest: str) -> None:
    paths, more = dropped(rest)
    _take(conversation, paths if paths and not more else [_path("/image", rest)])


def _take(conversation: Conversation, paths: Sequence[Path]) -> None:
    """Attach pictures to the next message, all of them or none."""
    parts = picture_parts(paths)
    for line in pictures_lines(
        pictures_document(conversation.engine.requests.mark_pictures, [{"role": "user", "content": parts}])
    ):
        conversation.tell(f"{line}; it comes before your next message")
    conversation.pictures += parts


def _switch(conversation: Conversation, rest: str) -> None:
    if not rest:
        raise RequestError("/model needs the name of a model; edgedec list shows them")
    switch(conversation, rest)
    conversation.tell(f"{one_line(rest)} answers from now on; the conversation stays")


def _show(conversation: Conversation, _: str) -> None:
    for name, value in facts(conversation):
        say(f"{name:{_COLUMN}}  {one_line(value)}")


def _list_tools(conversation: Conversation, _: str) -> None:
    tools = conversation.tools
    for name, value in tools.rows():
        say(f"{name:{_COLUMN}}  {value}")
    for note in tools.notes(conversation.engine):
        conversation.tell(one_line(note))


def _show_stats(conversation: Conversation, rest: str) -> None:
    if rest not in ("", "all"):
        raise RequestError(f"/stats is followed by all, or nothing, not by {rest!r:.100}")
    if conversation.last is None:
        say("(nothing was answered yet)")
        return
    stats = conversation.last.stats
    reused = f", {stats.n_reused_tokens} of them known from before" if stats.n_reused_tokens else ""
    say(summary(conversation.last))
    say(f"prompt: {counted(stats.n_prompt_tokens, 'token')}{reused}")
    further = [sampling_line(conversation.engine, conversation.options)]
    for line in explained(stats, "all" if rest else "short", further):
        say(line)


_COLUMN = 18
_MOST_TOKEN_BYTES, _TEXT_PART = 64, 16  # of a file's text under a memory cap: for each token, or of what is free
_LEAVE = "/bye"
_COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/clear": Command(lambda chat, _: _begin(chat, chat.system), "", "forget the conversation"),
    "/system": Command(lambda chat, rest: _begin(chat, rest or None), "TEXT", "begin again with this system message"),
    "/set": Command(_set, "NAME VALUE", "temperature, system, ...; no VALUE: default, alone: list"),
    "/save": Command(_save, "FILE", "write the conversation to a file"),
    "/load": Command(_load, "FILE", "go on with the conversation of such a file"),
    "/file": Command(_attach, "FILE", "put a text or a PDF before the next message; search a long one"),
    "/image": Command(_attach_picture, "FILE", "put a picture before the next message; or drop its file"),
    "/model": Command(_switch, "NAME", "go on with another model"),
    "/tools": Command(_list_tools, "", "the tools that the model may call (--mcp)"),
    "/show": Command(_show, "", "the model, the settings and the system message"),
    "/stats": Command(_show_stats, "all", "what the last answer took, and what drafting did; all: every figure"),
    "/regen": Command(lambda chat, _: regenerate(chat), "", "answer the last message again"),
}
_KEYS = (
    (_LEAVE, "leave (so does Ctrl-D)"),
    ("//TEXT", "send the text /TEXT, which begins with a slash"),
    ('"""', "begin and end a message of several lines; Alt-Enter begins a line"),
    ("Ctrl-C", "stop the answer"),
)


def switch(conversation: Conversation, name: str) -> None:
    """Let the model of this name answer from now on; the messages and the settings stay.

    What its header tells is looked at before the present model is closed. Where the new one can't be loaded, the
    present one is loaded again.

    Raises:
        EdgedecError: There is no such model, it has no chat template, or it can't be loaded; or Ctrl-C stopped it.
    """
    conversation.check(name)
    conversation.engine.close()
    try:
        conversation.engine = conversation.open(name)
    except TerminatedError:
        raise
    except EdgedecError:
        say(f"edgedec: {conversation.model} answers again")
        conversation.engine = conversation.open(conversation.model)
        raise
    conversation.model, conversation.last = name, None


def facts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield what a person may ask of a chat, name and value: its model, its messages, and its settings."""
    engine, options = conversation.engine, conversation.options
    card, plan = engine.card, engine.plan
    trained = f", trained for {card.n_ctx_train}" if card.n_ctx_train else ""
    others = [f"{name} {value}" for name, value in options.items() if name not in SAMPLED and value is not False]
    yield "model", conversation.model
    yield "architecture", f"{card.architecture}, {card.n_layer} layers of width {card.n_embd}, {card.n_vocab} tokens"
    yield "runtime", card.runtime
    yield "context", f"{engine.n_ctx} tokens{trained}"
    yield "memory", planned_range(plan) if plan.terms else format_bytes(engine.held_bytes)
    yield "messages", str(len(conversation.messages))
    yield "files", f"{len(conversation.attached)} before the next message"
    yield "pictures", f"{len(conversation.pictures)} before the next message"
    yield "sampling", sampling_line(engine, options).removeprefix("sampling: ")
    yield "other settings", ", ".join(others) or "none"
    yield "system", conversation.system or "none"
