"""A link with a delay, as a TCP proxy: what one side sends arrives in order, at its rate, and `delay_s` later."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 64 * 1024

MOST_CHUNKS = 64
"""Under way in one direction: with 50 ms of delay 80 MB/s, more than such a swarm sends."""


class DelayingProxy:
    """Passes connections to 127.0.0.1 on to another port there. Its own handshake costs nothing, so the first bytes of
    a connection wait for one more round trip, as behind a real one."""

    def __init__(self, target_port: int, delay_s: float) -> None:
        self._target_port = target_port
        self._delay_s = delay_s
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def run(self, ready: threading.Event) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        try:
            await server.serve_forever()
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        writers = [writer]
        with suppress(OSError):
            try:
                onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
                writers.append(onward)
                begins = asyncio.get_running_loop().time() + 2 * self._delay_s
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(reader, onward, begins))
                    group.create_task(self._pass_on(onward_reader, writer, begins))
            except* OSError:
                pass  # One side has hung up, and so the other does.
            finally:
                for one in writers:
                    one.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begins: float) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, chunks, begins))
            group.create_task(_write(chunks, writer))

    async def _read(
        self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]], begins: float
    ) -> None:
        loop = asyncio.get_running_loop()
        chunk = b"."
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            await chunks.put((max(begins, loop.time()) + self._delay_s, chunk))


async def _write(chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Write each chunk when it is due; an empty one is the end."""
    loop = asyncio.get_running_loop()
    while True:
        due, chunk = await chunks.get()
        if (left_s := due - loop.time()) > 0:
            await asyncio.sleep(left_s)
        if not chunk:
            writer.write_eof()
            return
        writer.write(chunk)
        await writer.drain()


@contextmanager
def delayed(target_port: int, delay_s: float) -> Iterator[int]:
    """Run a proxy in a thread, and give its port. `delay_s` is of each direction."""
    proxy, ready, loop = DelayingProxy(target_port, delay_s), threading.Event(), asyncio.new_event_loop()
    running = loop.create_task(proxy.run(ready))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()

    thread = threading.Thread(target=run, name="proxy", daemon=True)
    thread.start()
    try:
        if not ready.wait(10.0):
            raise OSError("the proxy cannot listen")
        yield proxy.port
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join(10.0)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
