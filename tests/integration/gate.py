"""A gate on loopback between nodes and a learner, which shuts when it sees what it was told to look for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PART_BYTES = 65_536


class Gate:
    """Passes connections on to `port` of this machine while it is open; whoever comes when it is shut is hung up on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._shut_at: bytes | None = None
        self.is_shut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def shut_at(self, words: bytes) -> None:
        """Shut as soon as these words come in one part from a client; they do not reach the learner."""
        self._shut_at = words

    def open(self) -> None:
        self._shut_at = None
        self.is_shut.clear()

    def close(self) -> None:
        self._shut()
        self._listener.close()

    def _shut(self) -> None:
        with self._lock:
            self.is_shut.set()
            for one in self._sockets:
                _hang_up(one)
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
            except ConnectionError:
                client.close()
                continue
            except OSError:
                return
            with self._lock:
                self._sockets |= {client, server}
                if self.is_shut.is_set():
                    _hang_up(client)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        try:
            while part := source.recv(PART_BYTES):
                if watched and self._shut_at is not None and self._shut_at in part:
                    self._shut()
                if self.is_shut.is_set():
                    break
                sink.sendall(part)
        except OSError:
            pass
        _hang_up(source)
        _hang_up(sink)


def _hang_up(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


@contextmanager
def gate_to(port: int) -> Iterator[Gate]:
    gate = Gate(port)
    try:
        yield gate
    finally:
        gate.close()
