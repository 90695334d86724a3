"""The tool servers of a chat: started beside the model, and told about once it is loaded."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgedec.errors import counted
from edgedec_apps.cli.chat.tool_calls import ChatTools
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import ToolFlags
from edgedec_apps.cli.shown.progress import shown
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.tools.configuration import configured
from edgedec_apps.tools.offered import patterns_of

if TYPE_CHECKING:
    from edgedec.api.engine import Engine


def chat_tools(flags: ToolFlags, stack: ExitStack, *, typed: bool) -> ChatTools:
    """Return the tools of a chat, whose servers begin to connect; `stack` ends them.

    The servers of the configuration folder are for a person at a terminal; a script names its file.

    Raises:
        RequestError: The file of servers is malformed, or there are names of tools and no servers.
        StorageError: The file can't be read.
        RuntimeUnavailableError: MCP's SDK is not installed.
    """
    patterns = patterns_of(flags.allow_tools)
    configurations = configured(flags.mcp) if typed or flags.mcp is not None else ()
    if not configurations:
        return ChatTools(None, patterns, typed)
    from edgedec_apps.tools.servers import ToolServers  # here, as most chats have none

    servers = ToolServers(configurations)
    stack.callback(servers.close)
    return ChatTools(servers, patterns, typed)


def connect(tools: ChatTools, engine: "Engine", *, quiet: bool) -> None:
    """Wait for the servers, and say which can't be used, and how many tools there are.

    Raises:
        CancelledError: Ctrl-C came.
    """
    servers = tools.servers
    if servers is None:
        return
    with shown("connecting to the tool servers", quiet=quiet):
        interruptible(servers.wait)
    for note in tools.notes(engine):
        say(f"edgedec: {one_line(note)}")
    if not quiet and tools.allowed:
        say(f"({counted(len(tools.allowed), 'tool')}; /tools lists them)")
