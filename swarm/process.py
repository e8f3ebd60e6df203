"""Heavy work outside the event loop: child processes, such as a trainer or an engine.

The parent (asyncio) starts `python -m MODULE` and passes the path of a Unix socket in the environment, so that the same
child runs alone or as rank 0 under torchrun. A child that makes no progress for `hang_s` is killed; the caller gets
ChildFailed and decides what to do. When the parent is gone, the socket closes or resets and the child exits.

Calls and answers are frames: a 4-byte big-endian length and msgpack. The parent sends Calls. The child sends Progress
frames and answers each call with one Reply or Failure, either in turn or side by side. Weights never travel here; they
cross through memory-mapped files.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

import swarm
from swarm.errors import ChildFailed, ChildHung, UserError

SOCKET_VARIABLE = "ECHO_NODE_CHILD_SOCKET"
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Has torch ask Linux for pages of 2 MB: without, a training step on a CPU spent a fifth of its time in page faults."""

INHERITED = (
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Environment variables that a reward or an engine gets from the node; others may hold secrets."""

MAX_LOG_BYTES = 16 << 20  # Of a child: a model from a learner may have its libraries print without end
FRAME_BYTES = 1 << 30  # Only catches a broken stream: 8,192 rollouts of 8,192 tokens are 600 MB
START_S = 120.0  # Longest wait for a child to import libraries and connect: four at once took 7 s
STOP_S = 5.0  # From the request to end until the child is killed
PROGRESS_S = 1.0  # Shortest time between two progress frames
R = TypeVar("R")


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The child is alive and working. `said` is a line for the person at the terminal."""

    said: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """An encoded command."""

    number: int
    body: msgspec.Raw


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The encoded result of a call."""

    number: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The call raised. `is_user_error` keeps a bad model path from looking like a crash."""

    number: int
    message: str
    is_user_error: bool


class Child:
    """The parent's end. It runs `python -m module arguments`; `name` appears in messages. `environment`
    makes the child's of the node's. Without a `log` the child prints where the node does."""

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        log: Path | None,
        hang_s: float,
        start_s: float = START_S,
        environment: Callable[[Mapping[str, str]], Mapping[str, str]] = dict,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self._module = module
        self._arguments = arguments
        self._log = log
        self._hang_s = hang_s
        self._start_s = start_s
        self._environment = environment
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Reply | Failure]] = {}
        self._calls = 0
        self._heard_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._listening is not None and not self._listening.done()

    async def start(self) -> None:
        """Start the process and wait until it connects. Raise ChildFailed with the log's tail if it does not."""
        with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
            path = os.path.join(directory, "child.sock")
            connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
            connected = asyncio.get_running_loop().create_future()

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connected.set_result((reader, writer))

            server = await asyncio.start_unix_server(accept, path)
            try:
                await self._spawn({**LARGE_PAGES, **self._environment(os.environ), SOCKET_VARIABLE: path})
                assert self._process is not None
                ended = asyncio.ensure_future(self._process.wait())
                waits: set[asyncio.Future[Any]] = {connected, ended}
                await asyncio.wait(waits, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if not connected.done():
                    await self.kill()
                    raise ChildFailed(f"the {self.name} did not start; {self.log_tail()}")
                self._reader, self._writer = connected.result()
                self._listening = asyncio.create_task(self._listen(self._reader))
            finally:
                server.close()

    @overload
    async def call(self, command: msgspec.Struct, kind: type[R], *, hang_s: float | None = None) -> R: ...

    @overload
    async def call(self, command: msgspec.Struct, kind: UnionType, *, hang_s: float | None = None) -> Any: ...

    async def call(self, command: msgspec.Struct, kind: Any, *, hang_s: float | None = None) -> Any:
        """Run one command and return its answer as a `kind`. Raise ChildFailed if the child dies, hangs or fails, and
        UserError if the user has to act. A cancelled call kills the child, because its state would be unknown.
        `hang_s` is the limit of this call, if it has one of its own."""
        hang_s = self._hang_s if hang_s is None else hang_s
        try:
            answer = await self._answer(msgspec.msgpack.encode(command), hang_s)
        except TimeoutError as error:
            fault = ChildHung(f"the {self.name} made no progress for {hang_s:g} s and was killed")
            self._end_calls(fault)  # Before its end does: that would say that the child died
            await self.kill()
            raise fault from error
        except OSError as error:
            # torchrun may have more to say about the end of its rank 0, so let it finish.
            await self.stop()
            raise ChildFailed(f"the {self.name} died; {self.log_tail()}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        match answer:
            case Reply(body=raw):
                return msgspec.msgpack.decode(raw, type=kind)
            case Failure(message=message, is_user_error=True):
                raise UserError(message)
            case Failure(message=message):
                raise ChildFailed(f"the {self.name} failed: {message}; {self.log_tail()}")

    async def _answer(self, body: bytes, hang_s: float) -> Reply | Failure:
        """Send a command and wait for its answer. Raise TimeoutError if the child is silent for too long."""
        assert self._writer is not None
        assert self._listening is not None
        if self._listening.done():
            raise ConnectionResetError("the child is gone")
        loop = asyncio.get_running_loop()
        self._calls += 1
        number = self._calls
        answer: asyncio.Future[Reply | Failure] = loop.create_future()
        if not self._waiting:
            self._heard_at = loop.time()
        self._waiting[number] = answer
        try:
            frame = msgspec.msgpack.encode(Call(number, msgspec.Raw(body)))
            self._writer.write(struct.pack(">I", len(frame)) + frame)
            async with asyncio.timeout(hang_s):
                await self._writer.drain()
            while not answer.done():
                left_s = self._heard_at + hang_s - loop.time()
                if left_s <= 0:
                    raise TimeoutError
                await asyncio.wait((answer,), timeout=left_s)
            return answer.result()
        finally:
            del self._waiting[number]
            if answer.done():
                # It may have ended while the command was being sent, and asyncio would log an
                # exception that was never retrieved
                answer.exception()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                frame = msgspec.msgpack.decode(await read_frame(reader), type=Progress | Reply | Failure)
                with suppress(OSError):
                    if self._log is not None and self._log.stat().st_size > MAX_LOG_BYTES:
                        os.truncate(self._log, 0)  # The child holds it open and appends
                if isinstance(frame, Progress):
                    # Not by answers: samples of an engine that hangs are given up one by one, each in its time.
                    self._heard_at = loop.time()
                    if frame.said:
                        self._say(frame.said)
                else:
                    waiting = self._waiting.get(frame.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(frame)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            self._end_calls(ConnectionResetError(str(error)))

    async def stop(self) -> None:
        """Close the channel, which ends the child; kill it if it stays."""
        self._hang_up()
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill the child and its own children at once, also those of a child that has ended by itself."""
        self._hang_up()
        if self._process is not None and not self._is_killed:
            self._is_killed = True  # Once: later its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
        self._end_calls(ConnectionResetError("the child was ended"))

    def _end_calls(self, why: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(why)

    def log_tail(self) -> str:
        """Return the last lines written by the child and its own processes, without traceback frames, and the path of
        the log."""
        if self._log is None:
            return "its last words are above"
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        telling = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback (most recent"))]
        said = " | ".join(telling[-3:])[-600:] or "it said nothing"
        return f"{said} (log: {self._log})"

    async def _spawn(self, environment: dict[str, str]) -> None:
        self._is_killed = False
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext(2) if self._log is None else self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                *self._arguments,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame. Raise OSError if it is longer than FRAME_BYTES."""
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    if size > FRAME_BYTES:
        raise OSError(f"frame of {size} bytes")
    return await reader.readexactly(size)


class ChildChannel:
    """The child's end. When the parent is gone, the process exits with `status_without_parent`."""

    def __init__(self, *, status_without_parent: int = 0) -> None:
        self._status_without_parent = status_without_parent
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(os.environ[SOCKET_VARIABLE])
        except (FileNotFoundError, ConnectionRefusedError):
            sys.exit("the node that started this process is gone")
        self._commands: queue.Queue[bytes] = queue.Queue(maxsize=4)
        self._last_progress = 0.0
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def progress(self) -> None:
        """Tell the parent that work goes on. Cheap enough to call often."""
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_S:
            self._last_progress = now
            self._send(Progress())

    def tell(self, line: str) -> None:
        """Print a line at the parent's terminal."""
        self._send(Progress(said=line))

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Report progress during a call that cannot do so itself, such as a download."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(PROGRESS_S):
                self.progress()

        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join()

    def serve(
        self, kind: Any, handle: Callable[[Any], msgspec.Struct], *, goes_on_after: type[Exception] = Exception
    ) -> None:
        """Answer commands of the union `kind` with `handle(command)`, one after another, until the parent is gone or
        `handle` raises anything but `goes_on_after`."""
        while True:
            call = msgspec.msgpack.decode(self._commands.get(), type=Call)
            try:
                self._reply(call, handle(msgspec.msgpack.decode(call.body, type=kind)))
            except Exception as error:  # noqa: BLE001 - the parent has to hear of every fault of a command
                self._fail(call, error)
                if not isinstance(error, goes_on_after):
                    return

    async def serve_side_by_side(self, kind: Any, handle: Callable[[Any], Awaitable[msgspec.Struct]]) -> None:
        """Answer commands of the union `kind` with `handle(command)`, started in order and run concurrently, until the
        parent is gone. The parent limits how many run at a time."""

        async def answer(call: Call) -> None:
            try:
                self._reply(call, await handle(msgspec.msgpack.decode(call.body, type=kind)))
            except Exception as error:  # noqa: BLE001 - the parent has to hear of every fault of a command
                self._fail(call, error)

        running = set[asyncio.Task[None]]()
        while True:
            frame = await asyncio.to_thread(self._commands.get)
            task = asyncio.create_task(answer(msgspec.msgpack.decode(frame, type=Call)))
            running.add(task)
            task.add_done_callback(running.discard)

    def _reply(self, call: Call, result: msgspec.Struct) -> None:
        self._send(Reply(call.number, msgspec.Raw(msgspec.msgpack.encode(result))))

    def _fail(self, call: Call, error: Exception) -> None:
        if isinstance(error, UserError):
            self._send(Failure(call.number, str(error), True))
            return
        traceback.print_exception(error)
        self._send(Failure(call.number, f"{type(error).__name__}: {error}", False))

    def _send(self, answer: Progress | Reply | Failure) -> None:
        body = msgspec.msgpack.encode(answer)
        with self._sending:
            self._socket.sendall(struct.pack(">I", len(body)) + body)

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(size := stream.read(4)) == 4:
                    self._commands.put(stream.read(struct.unpack(">I", size)[0]))
        finally:
            # The parent is gone (end of file, or a reset if it died with an unread answer), so the result is not
            # needed.
            os._exit(self._status_without_parent)


class NoParent(ChildChannel):
    """The channel of a process without a parent to report to, such as ranks 1 and up."""

    def __init__(self) -> None: ...

    def progress(self) -> None: ...

    def tell(self, line: str) -> None: ...


def clean_environment(given: Mapping[str, str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of a process that is not to know what the node knows: of `given` the names in INHERITED,
    and those with one of `prefixes` that do not end like a secret's. PYTHONPATH leads to this package."""
    kept = {
        name: value
        for name, value in given.items()
        if name in INHERITED or (name.startswith(prefixes) and not name.endswith(("_KEY", "_TOKEN", "_SECRET")))
    }
    package = str(Path(swarm.__file__).absolute().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    return kept
