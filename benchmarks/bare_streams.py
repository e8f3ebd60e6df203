"""One node of the bare streams that benchmarks.broadcast --bare compares with: TLS, threads, and nothing else.

It says `listening`. The line `send COPIES NBYTES HOST:PORT ...` then has it send as many bytes to each of these, as a
forwarder of a mesh does: a version's share, NBYTES, once to each. It reads what others send and forgets it, and says
`received` once COPIES * NBYTES have come.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import sys
import threading
import time
from pathlib import Path

from benchmarks.broadcast_learner import say
from swarm.node.identity import load_or_create_tls

BUFFER_BYTES = 64 * 1024


class Node:
    def __init__(self, host: str, port: int, directory: Path) -> None:
        self._context = load_or_create_tls(directory).context
        self._listening = socket.create_server((host, port))
        self._counting = threading.Lock()
        self._missing = 0
        self._began = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def send(self, copies: int, nbytes: int, to: list[str]) -> None:
        self._missing = copies * nbytes
        self._began.set()
        for one in to:
            threading.Thread(target=self._feed, args=(one, nbytes), daemon=True).start()

    def _feed(self, to: str, nbytes: int) -> None:
        host, _, port = to.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        content = memoryview(bytes(BUFFER_BYTES))
        with context.wrap_socket(socket.create_connection((host, int(port)))) as stream:
            while nbytes:
                stream.sendall(content[:nbytes])
                nbytes -= min(nbytes, BUFFER_BYTES)

    def _accept(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            threading.Thread(target=self._drain, args=(sock,), daemon=True).start()

    def _drain(self, sock: socket.socket) -> None:
        place = bytearray(BUFFER_BYTES)
        with self._context.wrap_socket(sock, server_side=True) as stream:
            self._began.wait()
            while count := stream.recv_into(place):
                with self._counting:
                    self._missing -= count
                    if not self._missing:
                        say("received", at_s=time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=7700)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    node = Node(options.host, options.port, options.directory)
    say("listening", at=f"{options.host}:{options.port}")
    for line in sys.stdin:
        _, copies, nbytes, *to = line.split()
        node.send(int(copies), int(nbytes), to)


if __name__ == "__main__":
    main()
