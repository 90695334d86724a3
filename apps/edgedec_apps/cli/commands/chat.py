"""edgedec chat: a conversation at the terminal, or one message a line from a pipe."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgedec.errors import RequestError
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.cli.declared import prompt_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, System, ToolFlags
from edgedec_apps.cli.prompt import argument_text, piped_lines
from edgedec_apps.cli.sampling_options import SamplingFlags
from edgedec_apps.cli.shown.terminal import one_line, say

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec_apps.cli.chat.conversation import Conversation

_HISTORY = "chat-history"  # in the cache's folder


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """The arguments and options of `edgedec chat`."""

    model: ModelName
    system: System = None
    history: bool = prompt_flag(
        "--history/--no-history", "Keep what is typed, for the next start (default: yes).", True, further=True
    )
    load: LoadFlags
    sampling: SamplingFlags
    output: OutputFlags
    tools: ToolFlags


def command(job: ChatJob) -> None:
    """Talk with a model. From a pipe, each line is a message.

    With --mcp the model may call tools of other programs; each call is shown and asked about before it runs. From a
    pipe, where nobody can be asked, only the tools of --allow-tools run.
    """
    from edgedec_apps.cli.chat.conversation import Conversation, require_template
    from edgedec_apps.cli.chat.keyboard import is_screen
    from edgedec_apps.cli.chat.slash_commands import handle
    from edgedec_apps.cli.chat.tool_calls import chat_tools, connect
    from edgedec_apps.cli.methods import require_stages, without_stages
    from edgedec_apps.cli.opening import keep_learned, open_model, text_options_of

    output = job.output
    if output.as_json or output.json_out is not None:
        raise RequestError("--json and --json-out need a single prompt; give one, or pipe it in")
    require_stages(job.load.method, "load", "text")
    load = replace(job.load, method=without_stages(job.load.method, "text"))
    options, system = text_options_of(job.model, job.load, job.sampling, argument_text(job.system, "--system"))
    follows_grammar = "grammar" in options

    def opened(name: str) -> "Engine":
        def work(cancel: CancelToken) -> "Engine":
            return open_model(name, load, output, cancel, grammars=follows_grammar, keeps_prompts=True)

        return interruptible(work)

    def check(name: str) -> None:
        interruptible(lambda cancel: require_template(name, job.load, cancel, quiet=output.quiet))

    typed = sys.stdin.isatty()
    with ExitStack() as stack:
        tools = chat_tools(job.tools, stack, typed=typed)
        check(job.model)
        markdown = typed and is_screen() and not follows_grammar
        chat = Conversation(
            opened(job.model), job.model, opened, check, options, typed, markdown, output.quiet, output.detail
        )
        stack.callback(lambda: chat.engine.close())  # another model may answer by then
        chat.tools = tools
        connect(tools, chat.engine, quiet=output.quiet)
        chat.reset(system)
        for message in _messages(chat, keep_history=job.history):
            handle(chat, message)
        keep_learned(chat.model, chat.engine)


def _messages(conversation: "Conversation", *, keep_history: bool) -> Iterator[str]:
    """Yield the messages and commands that come in, until the input ends or one of them leaves the chat."""
    from edgedec_apps.cli.chat.keyboard import typed_messages
    from edgedec_apps.cli.chat.slash_commands import leaves

    engine = conversation.engine
    if conversation.typed and not conversation.quiet:
        say(f"{one_line(conversation.model)} · {engine.n_ctx} tokens of context · /help for help")
    history = cache_folder() / _HISTORY if keep_history else None
    lines = typed_messages(history) if conversation.typed else piped_lines(engine.plan.process_cap_bytes)
    for text in lines:
        if leaves(text):
            return
        yield text
