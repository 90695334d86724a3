"""A TCP proxy that delays everything that passes, to stand for a machine farther away: one process, no rights needed.

    python benchmarks/speed/delaying_proxy.py LISTEN_PORT TARGET_PORT DELAY_MS

Each way takes DELAY_MS longer, as with `tc netem` on both machines. What is sent in one go stays together, and nothing
waits for what was sent before it, as on a line with that delay and plenty of bandwidth.
"""

import asyncio
import socket
import sys
from contextlib import suppress

_CHUNK = 1 << 20


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Send what is read, each piece `delay_s` after it came."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

    async def send() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    sending = asyncio.create_task(send())
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            await waiting.put((loop.time() + delay_s, data))
    await waiting.put((loop.time() + delay_s, b""))
    with suppress(OSError):
        await sending


async def _serve(port: int, target: int, delay_s: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        for one in (writer, there_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_pass_on(reader, there_writer, delay_s), _pass_on(there_reader, writer, delay_s))

    server = await asyncio.start_server(connect, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000))
