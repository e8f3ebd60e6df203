"""A link with a delay and losses, as a TCP proxy: what one side sends arrives in order, and `delay_s` later.

    python -m benchmarks.delayed_link --listen 127.0.0.1:7700 --to 10.0.0.1:7700 --delay-ms 40 --loss 0.005

Without losses a link has no rate of its own. With them each direction of a connection is as fast as TCP's window lets
it be: it doubles every round trip until the first loss, then grows by a packet in each, and a loss leaves WINDOW_KEPT
of it (CUBIC, RFC 9438, 4.6). What was lost comes a round trip later, and everything behind it with it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

CHUNK_BYTES = 64 * 1024

MAX_CHUNKS = 64
"""Under way in one direction: with 50 ms of delay 80 MB/s, more than such a swarm sends."""

PACKET_BYTES = 1448
FIRST_WINDOW, MIN_WINDOW, WINDOW_KEPT = 10.0, 2.0, 0.7
"""In packets: at the start (RFC 6928) and at least; the share of it that a loss leaves."""


class SendingWindow:
    """How fast one direction of a connection sends, and what its losses delay. Pure, but for the random numbers."""

    def __init__(self, round_trip_s: float, loss: float, random: Random) -> None:
        self._round_trip_s, self._loss, self._random = round_trip_s, loss, random
        self._packets, self._grows_fast = FIRST_WINDOW, True

    def send(self, nbytes: int) -> tuple[float, float]:
        """Seconds until so many bytes have been sent, and seconds that losses among them add on their way."""
        if not self._loss:
            return 0.0, 0.0
        sending_s, lost_s = 0.0, 0.0
        for _ in range(math.ceil(nbytes / PACKET_BYTES)):
            sending_s += self._round_trip_s / self._packets
            self._packets += 1.0 if self._grows_fast else 1 / self._packets
            if self._random.random() < self._loss:
                self._packets, self._grows_fast = max(MIN_WINDOW, self._packets * WINDOW_KEPT), False
                lost_s = self._round_trip_s
        return sending_s, lost_s


class DelayingProxy:
    """Passes connections on to a port. Its own handshake costs nothing, so the first bytes of a connection wait for one
    more round trip, as behind a real one. `loss` is a share of the packets."""

    def __init__(self, target: tuple[str, int], delay_s: float, loss: float = 0.0) -> None:
        self._target = target
        self._delay_s = delay_s
        self._loss = loss
        self._random = Random(0)
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def run(self, ready: threading.Event, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._connected, *listen)
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
                onward_reader, onward = await asyncio.open_connection(*self._target)
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
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, chunks, begins))
            group.create_task(_write(chunks, writer))

    async def _read(
        self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]], begins: float
    ) -> None:
        loop = asyncio.get_running_loop()
        window, arrives = SendingWindow(2 * self._delay_s, self._loss, self._random), 0.0
        chunk = b"."
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            sending_s, lost_s = window.send(len(chunk))
            sent = max(begins, loop.time()) + sending_s
            arrives = max(arrives, sent + self._delay_s + lost_s)
            await chunks.put((arrives, chunk))
            if sending_s:
                await asyncio.sleep(sent - loop.time())


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
    proxy, ready, loop = DelayingProxy(("127.0.0.1", target_port), delay_s), threading.Event(), asyncio.new_event_loop()
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


def main() -> None:
    def address(text: str) -> tuple[str, int]:
        host, _, port = text.rpartition(":")
        return host, int(port)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--listen", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--to", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, required=True, help="of each direction")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    options = parser.parse_args()
    proxy = DelayingProxy(options.to, options.delay_ms / 1000, options.loss)
    asyncio.run(proxy.run(threading.Event(), options.listen))


if __name__ == "__main__":
    main()
