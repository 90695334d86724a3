"""A tool server that is started here, as a transport of MCP's SDK: one JSON message a line, within limits.

The SDK's own transport has no limit on a line, and logs what is no message; so a program that floods would fill the
memory, or the screen.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from edgedec.processes import OWN_GROUP, end_group
from edgedec_apps.tools.configuration import Program

MOST_LINE_BYTES = 8_000_000
"""The most bytes of one message of a tool server."""
_MOST_UNASKED_BYTES = 32_000_000  # between two messages to the server
_MOST_RUBBISH = 100  # lines that are no message
_READ_BYTES = 65_536
_KEPT_BYTES = 2_000  # of what it writes to standard error
_PATIENCE_S = 2.0  # after its input ends, and after SIGTERM
_POLL_S = 0.02

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@dataclass(slots=True)
class Ending:
    """How a connection ended.

    Attributes:
        event: Is set when nothing more comes.
        why: Why it ended, where that is known.
        last_words: What a program wrote last to standard error.
    """

    event: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    last_words: bytes = b""

    @property
    def reason(self) -> str:
        """Why the connection ended, with the last line that the program wrote to standard error."""
        lines = [line for line in self.last_words.decode("utf-8", "replace").splitlines() if line.strip()]
        said = [f"it said: {lines[-1].strip()[:300]}"] if lines else []
        return "; ".join([*([self.why] if self.why else []), *said])


@asynccontextmanager
async def program_streams(program: Program, ending: Ending) -> AsyncIterator[Streams]:
    """Start a program, and yield what MCP's session reads and writes; at the end the program and its children end.

    Raises:
        OSError: The program can't be started.
    """
    environment = get_default_environment() | dict(program.env)
    command = shutil.which(program.command, path=environment.get("PATH")) or program.command  # Windows: npx is npx.cmd
    process = await asyncio.create_subprocess_exec(
        command,
        *program.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd=program.cwd,
        **OWN_GROUP,
    )
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    spent = [0]
    listening = asyncio.create_task(_listen(process, ending))
    tasks = [
        listening,
        asyncio.create_task(_read(process, to_session, ending, spent, listening)),
        asyncio.create_task(_write(process, from_session, spent)),
    ]
    try:
        yield incoming, outgoing
    finally:
        with anyio.CancelScope(shield=True):
            for stream in (incoming, outgoing):
                stream.close()  # what waits for the session goes on
            await _end(process, at_once=ending.event.is_set())
            _, late = await asyncio.wait(tasks, timeout=_PATIENCE_S)
            for task in late:
                task.cancel()
            for stream in (to_session, from_session):
                stream.close()


async def _read(
    process: asyncio.subprocess.Process,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    ending: Ending,
    spent: list[int],
    listening: "asyncio.Task[None]",
) -> None:
    """Pass on the messages that a program writes, until it ends or breaks a limit."""
    assert process.stdout is not None
    held, n_rubbish = bytearray(), 0
    try:
        while chunk := await process.stdout.read(_READ_BYTES):
            spent[0] += len(chunk)
            held += chunk
            lines: list[bytes] = []
            if b"\n" in chunk:
                *lines, rest = bytes(held).split(b"\n")
                held = bytearray(rest)
            if len(held) > MOST_LINE_BYTES or spent[0] > _MOST_UNASKED_BYTES:
                ending.why = f"it floods: a message has at most {MOST_LINE_BYTES // 1_000_000} MB"
                return
            for line in filter(None, map(bytes.strip, lines)):
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    n_rubbish += 1
                    if n_rubbish > _MOST_RUBBISH:
                        ending.why = "it writes lines that are no MCP to its standard output"
                        return
                    continue
                ending.last_words = b""  # they were about something else
                await to_session.send(SessionMessage(message))
        await asyncio.wait({listening}, timeout=_PATIENCE_S)  # its last words come by another pipe
        ending.why = "the program ended"
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the session is over
    finally:
        to_session.close()  # what waits for an answer gets an error
        ending.event.set()


async def _write(
    process: asyncio.subprocess.Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    spent: list[int],
) -> None:
    """Pass on the session's messages; a program that reads none of them ends in the time limit of a call."""
    assert process.stdin is not None
    with suppress(OSError, anyio.ClosedResourceError):
        async for each in from_session:
            spent[0] = 0
            data = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(data.encode("utf-8", "replace") + b"\n")
            await process.stdin.drain()


async def _listen(process: asyncio.subprocess.Process, ending: Ending) -> None:
    """Keep the end of what a program writes to standard error."""
    assert process.stderr is not None
    while chunk := await process.stderr.read(_READ_BYTES):
        ending.last_words = (ending.last_words + chunk)[-_KEPT_BYTES:]


async def _end(process: asyncio.subprocess.Process, *, at_once: bool) -> None:
    """End a program: close its input, then SIGTERM, then SIGKILL, for its children too; or SIGKILL `at_once`."""
    assert process.stdin is not None
    process.stdin.close()
    if not at_once and not await _has_ended(process):
        end_group(process.pid, at_once=False)
        await _has_ended(process)
    end_group(process.pid, at_once=True)  # children that outlived it, too
    await _has_ended(process)
    if (transport := getattr(process, "_transport", None)) is not None:  # nothing public closes its pipes
        transport.close()


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether a program ends soon. Process.wait() would wait for the end of its pipes, too."""
    for _ in range(int(_PATIENCE_S / _POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return process.returncode is not None
